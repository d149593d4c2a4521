"""Runs a command again and again, each time in fresh processes and recorded."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError, TraceError
from torchrepro.launch import prepared, prepared_as_it_is
from torchrepro.messages import Problem
from torchrepro.trace.reader import read_run
from torchrepro.trace.request import VARIABLE, Request
from torchrepro.verification.perturbations import RunEnvironment, mirrored
from torchrepro.verification.result import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from torchrepro.profile.resolved import ResolvedProfile


class OutputDirectory:
    """A folder that was named, or a temporary one."""

    def __init__(self, folder: Path, *, temporary: bool) -> None:
        self.folder = folder
        self._temporary = temporary

    def clear(self) -> str:
        """Remove a temporary folder; return the path of one that stays, and else nothing."""
        if not self._temporary:
            return str(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        return ""


@contextmanager
def workplace(folder: str, say: Callable[[str], object]) -> Iterator[OutputDirectory]:
    """Make the folder, a temporary one if none is named; say where it is if the block fails.

    Raises `TraceError` for one in which there is something.
    """
    if folder:
        Request(folder).prepare_folder()
    place = Path(folder or tempfile.mkdtemp(prefix="torchrepro-verify-")).absolute()
    try:
        yield OutputDirectory(place, temporary=not folder)
    except BaseException:
        if any(place.iterdir()):
            say(f"\nwhat was recorded until then, and what the command printed, is in {place}\n")
        else:
            say("\n")  # ends the line that a run had begun
            if not folder:
                place.rmdir()
        raise


GRACE = 20.0
"""Seconds that a command has to end after it was asked to, before it is killed."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
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
    raise Interrupted(number)


CALM = RunEnvironment()


@dataclass(frozen=True, slots=True)
class Runner:
    """A command, the folder that its recordings go into, and how it is recorded."""

    command: Sequence[str]
    folder: Path
    request: Request
    """What is recorded; the folder in it is not looked at."""
    say: Callable[[str], object]
    """Takes what is told of the progress, as text with its own ends of lines."""

    def run(
        self,
        resolved: ResolvedProfile | None,
        name: str,
        around: RunEnvironment = CALM,
        perturbed: tuple[str, ...] = (),
    ) -> Run:
        """Run the command once, as it is without a profile, and say how long it took.

        Raises `ProfileError`, `ApplyError` and `TraceError` for a command that cannot be started
        under the profile, or recorded, and `Stopped` if a signal ends us.
        """
        traces, log = self.folder / name, self.folder / f"{name}.log"
        request = replace(self.request, folder=str(traces))
        if resolved is None:
            program, environment = prepared_as_it_is(self.command)
        else:
            program, environment = prepared(resolved, self.command)
        request.prepare_folder()
        environment |= {**around.environment(), VARIABLE: request.to_variable()}
        with ExitStack() as stack:
            place = Path.cwd()
            if around.elsewhere:
                place = stack.enter_context(mirrored(place))
                environment["PWD"] = str(place)
            begun = time.monotonic()
            status = run_to_end(program, self.command, environment, place, log)
        seconds = time.monotonic() - begun
        steps = _steps(traces)
        self.say(f" {seconds:.1f} s, {steps:,} step{'s' * (steps != 1)}{_ended(status)}\n")
        return Run(name, str(traces), str(log), status, seconds, steps, perturbed)

    def recording(self, request: Request) -> Runner:
        """Return what runs the same command and records what `request` asks for."""
        return replace(self, request=request)


def _steps(traces: Path) -> int:
    try:
        return len(read_run(traces, records=False)[0].steps)
    except TraceError:
        return 0


def _ended(status: int) -> str:
    return f", exit status {status}" if status else ""
