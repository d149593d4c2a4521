"""Running a command to its end, and ending it and all that it started when we are to end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import FrameType

GRACE = 20.0
"""Seconds that a command has to end after it was asked to, before it is killed."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A signal asked us to end; the command has ended too."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_status(self) -> int:
        """What a shell has for a program that the signal ended."""
        return 128 + self.number


def run_to_end(
    program: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
) -> int:
    """Run a command in `folder` with its output in `log`; return its exit status.

    It reads nothing: every run is to have the same input. It is in a session of its own, so that
    it and all that it started can be ended together, and nothing else. Raises `Stopped` if a
    signal ends us, once the command has ended, and `ProfileError` if it cannot be started.
    """
    with log.open("wb") as output, _signals_raised():
        try:
            process = subprocess.Popen(  # noqa: S603 - what the user asks for, without a shell
                list(command),
                executable=program,
                env=dict(environment),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ProfileError(
                Problem(f"cannot be started: {error.strerror}", found=program)
            ) from None
        try:
            return process.wait()
        except BaseException as stopped:
            _end(process, getattr(stopped, "number", signal.SIGTERM))
            raise


def _end(process: subprocess.Popen[bytes], number: int) -> None:
    """Ask the process and all of its group to end, and kill what has not after a while."""
    try:
        _signal(process, number)
        process.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass  # it takes too long, or the user does not want to wait
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Turn the signals that end a program into `Stopped`, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, _stop)
        for number in _ENDING
        if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
