"""Runs a command in fresh processes, each time recorded, and compares two of its runs."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import CDLL, c_int, c_int64
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join
from typing import IO, TYPE_CHECKING

from torchrepro.application.launch import prepared, prepared_as_it_is
from torchrepro.ground.errors import ApplyError, ProfileError, TraceError
from torchrepro.ground.messages import printable
from torchrepro.ground.redaction import shareable, shell_line
from torchrepro.manifest.contents import secrets_here
from torchrepro.trace.reader import read_run, steps_so_far
from torchrepro.trace.request import LEVELS, VARIABLE, RecordingRequest
from torchrepro.verdict.comparison import compare_within
from torchrepro.verdict.diagnosis import advice
from torchrepro.verdict.render import counted
from torchrepro.verdict.value import Compared, Divergence, Kind, Verdict
from torchrepro.verification.result import Run

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verification.perturbations import RunEnvironment

    Setup = tuple[ResolvedProfile | None, RunEnvironment]
    """The profile under which a run is started, if any, and what else it is started in."""

GRACE = 20.0  # seconds that a command has to end after it was asked to, before it is killed

BETWEEN_LOOKS = 1.0  # seconds between two readings of how far a run is

LARGEST_LOG = 2**21  # bytes of what a run has printed that are kept, half of them the last ones

_LAST_LINES = 12
_NOT_IN_FORCE = 3  # the exit status of a command whose profile could not be put in force


class Interrupted(KeyboardInterrupt):
    """A signal asked us to end; the command has ended too."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_status(self) -> int:
        return 128 + self.number


@dataclass(frozen=True, slots=True)
class Runner:
    """A command, how it is recorded, and by what criteria its runs are compared."""

    command: Sequence[str]
    folder: Path  # the folder of all recordings and logs
    request: RecordingRequest  # what is recorded. Its own folder is replaced by that of each run.
    tolerance: tuple[float, float] | None  # rtol and atol; None asks for the same bits
    say: Callable[[str], object]  # takes text on the progress, which has its own ends of lines
    meanwhile: Callable[[str], object] | None = None
    """Takes what is going on at the moment, until the next text; None where nobody watches."""
    ignore: Sequence[str] = ()  # lines whose records are left out
    limit: float | None = None  # seconds after which a run is ended; None for no limit
    beside: Callable[[], object] = lambda: None
    """Called once a run is prepared: what it begins goes on beside the command."""

    def run(
        self,
        resolved: ResolvedProfile | None,
        name: str,
        environment: RunEnvironment,
        perturbed: tuple[str, ...] = (),
    ) -> Run:
        """Run the command once, under a profile or as it is without one.

        Raises `ProfileError`, `ApplyError` and `TraceError` for a command that cannot be started
        under the profile, or recorded, and `Interrupted` if a signal ends us.
        """
        traces, log = self.folder / name, self.folder / f"{name}.log"
        request = replace(self.request, folder=str(traces))
        if resolved is None:
            program, variables = prepared_as_it_is(self.command)
        else:
            program, variables = prepared(resolved, self.command)
        request.prepare_folder()
        variables |= {**environment.all_variables(), VARIABLE: request.to_variable()}
        self.beside()
        begun = time.monotonic()
        with _watched(traces, self.meanwhile):
            status = run_to_end(program, self.command, variables, log, self.limit)
        seconds = time.monotonic() - begun
        found = []
        with suppress(TraceError):
            found = read_run(traces, records=False)
        for trace in found:
            trace.close()
        recorded = bool(found and found[0].steps)
        steps, amount = 0, "nothing recorded"
        if recorded:
            steps = found[0].ended_steps
            records = sum(row.records for row in found[0].steps.values())
            outside = f"{counted(records, 'record')} outside of any step"
            amount = counted(steps, "step") if steps else outside
        ended = f", exit status {status}" if status else ""
        self.say(f" {seconds:.1f} s, {amount}{ended}\n")
        return Run(name, str(traces), str(log), status, seconds, steps, recorded, perturbed)

    def compare(self, first: Run, other: Run) -> Verdict:
        """Compare two runs, of which one at least was recorded.

        Runs that end with another exit status are not the same, whatever was recorded of them.
        """
        if self.meanwhile is not None:
            self.meanwhile(f"comparing {other.name} with {first.name} ...")
        exits = [f"{run.name} with {status_in_words(run.status)}" for run in (first, other)]
        ended = f"they ended: {' and '.join(exits)}"
        empty = next((run for run in (first, other) if not run.recorded), None)
        if empty is not None:
            what = f"{empty.name} ended before anything was recorded of it; {ended}"
            after_last = not (first.steps or other.steps)
            return Verdict(
                same=False,
                left=first.folder,
                right=other.folder,
                compared=Compared(ranks=0, steps=0, ops=0, bytes=0, level="op"),
                first=Divergence(0, 0, kind=Kind.ENDED, what=what, after_last=after_last),
            )
        found = compare_within(
            first.folder, other.folder, self.tolerance, self.ignore, one_program=True
        )
        if first.status == other.status:
            return self.advised(found, first)
        if not found.same:
            return self.advised(replace(found, notes=(ended, *found.notes)), first)
        what = f"all that was recorded is the same; {ended}"
        steps = found.compared.steps
        return Verdict(
            same=False,
            left=first.folder,
            right=other.folder,
            compared=found.compared,
            first=Divergence(0, steps, kind=Kind.ENDED, what=what, after_last=True),
            losses=found.losses,
            map=found.map,
        )

    def refuse_unrecorded(self, run: Run, todo: str = "") -> None:
        """Raise `TraceError` if a run went well and nothing was recorded of it.

        `todo` is what helps, where that is known.
        """
        if run.status or run.recorded:
            return
        ours = f"torchrepro: {run.folder}: "
        said = (line.removeprefix(ours) for line in last_lines(run, _LAST_LINES))
        why = next((line for line in said if line.endswith("nothing was recorded")), "")
        computes = "it has to import torch and compute something with it"
        if self.request.level == LEVELS[0]:
            computes = "it has to make a step of an optimizer, or to call torchrepro.end_step()"
        raise TraceError.about(
            why or "nothing was recorded of it, so nothing can be said of its runs",
            found=join(self.command),
            todo=todo
            or ("" if why else f"{computes}, in a Python in which torchrepro is installed"),
        )

    def refuse_failed(self, runs: Sequence[Run], todo: str = "") -> None:
        """Raise what says why, if the command has failed in all its runs with the same status.

        `todo` is what helps, where that is known.
        """
        run = runs[-1]
        if run.status == 0 or len({each.status for each in runs}) > 1:
            return
        lines = last_lines(run, _LAST_LINES)
        if run.status == _NOT_IN_FORCE and any(line.startswith("torchrepro: ") for line in lines):
            raise ApplyError("\n".join(line.removeprefix("torchrepro: ") for line in lines))
        said = [f"    {line}" for line in lines] or ["    (it printed nothing)"]
        ended = f"it ended with {status_in_words(run.status)}"
        ended = f"{ended} in each of {len(runs)} runs" if len(runs) > 1 else ended
        raise TraceError.about("\n".join([f"{ended}:", *said]), found=join(self.command), todo=todo)

    def advised(self, verdict: Verdict, run: Run) -> Verdict:
        """Return a verdict with advice by what the trace of a run says of the program."""
        meta = read_run(run.folder, records=False)[0].meta
        command = shell_line(shareable(self.command, secrets_here()))
        return replace(verdict, advice=advice(verdict, meta, command))


def last_lines(run: Run, most: int) -> list[str]:
    """Return the last lines that a run has printed."""
    with Path(run.log).open(encoding="utf-8", errors="replace") as file:
        return [printable(line.rstrip("\n")) for line in deque(file, most)]


@contextmanager
def output_directory(folder: str, say: Callable[[str], object]) -> Iterator[Path]:
    """Make the folder of all recordings, a temporary one if none is named.

    It says where the folder is if the block fails. Raises `TraceError` for a folder that is not
    empty.
    """
    if folder:
        RecordingRequest(folder).prepare_folder()
    place = Path(folder or tempfile.mkdtemp(prefix="torchrepro-verify-")).absolute()
    try:
        with signals_raised():  # also between two runs: what is open then is closed
            yield place
    except BaseException:
        if any(place.iterdir()):
            say(f"\nwhat was recorded until then, and what the command printed, is in {place}\n")
        else:
            say("\n")  # ends the line that a run had begun
            if not folder:
                place.rmdir()
        raise


def run_to_end(
    program: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    limit: float | None = None,
) -> int:
    """Run a command with its output in `log`; return its exit status.

    After `limit` seconds it is ended.

    Its standard input is empty, so that every run has the same. It has a session of its own, so
    that it and all processes that it started can be ended together, also where this process is
    killed; a process that has begun another session is left alone. Of a long output its beginning
    and its end are kept, also while the command runs. Raises `Interrupted` if a signal ends us,
    once the command has ended, and `ProfileError` if it cannot be started.
    """
    with log.open("wb") as output, signals_raised():
        try:
            process = subprocess.Popen(  # noqa: S603 - what the user asks for, without a shell
                list(command),
                executable=program,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            what = f"cannot be started: {error.strerror}"
            raise ProfileError.about(what, found=program) from None
        deadline = math.inf if limit is None else time.monotonic() + limit
        try:
            with _ended_with_us(process):
                while (left := deadline - time.monotonic()) > 0:
                    with suppress(subprocess.TimeoutExpired):
                        return process.wait(min(left, BETWEEN_LOOKS))
                    _free_middle(output)
                end_group(process)
                return process.returncode
        except BaseException as stopped:
            end_group(process, getattr(stopped, "number", signal.SIGTERM))
            raise
        finally:
            _shorten(log)


_AFTER_US = """
read -r over || {
    kill -s TERM -- "-$1"
    waited=0
    while kill -s 0 -- "-$1" && [ "$waited" -lt "$2" ]; do sleep 1; waited=$((waited + 1)); done
    kill -s KILL -- "-$1"
}
"""
"""Ends the process group $1, at first kindly and after $2 seconds not, once its input ends without
a line: whoever holds the other end of that pipe has died."""


@contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    watcher = subprocess.Popen(  # noqa: S603 - a text of ours
        ["/bin/sh", "-c", _AFTER_US, "sh", str(process.pid), str(int(GRACE))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with suppress(BrokenPipeError):
            watcher.communicate(b"over\n")


def _free_middle(output: IO[bytes]) -> None:
    # The command goes on at its own place in the file: only blocks are given back, and no byte that
    # it writes meanwhile is lost. Python has no call for that; without it, or where the file system
    # has none, `_shorten` does it at the end of the run.
    size = os.fstat(output.fileno()).st_size
    if size > LARGEST_LOG:
        with suppress(AttributeError):
            arguments = c_int(output.fileno()), c_int(_PUNCH), c_int64(LARGEST_LOG // 2)
            CDLL(None).fallocate(*arguments, c_int64(size - LARGEST_LOG))


_PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of Linux


def _shorten(log: Path) -> None:
    half, size = LARGEST_LOG // 2, log.stat().st_size
    if size > LARGEST_LOG:
        with log.open("r+b") as file:
            file.seek(-half, os.SEEK_END)
            end = file.read()
            file.seek(half)
            file.write(b"\n... %d bytes are left out here ...\n" % (size - LARGEST_LOG) + end)
            file.truncate()


@contextmanager
def _watched(traces: Path, tell: Callable[[str], object] | None) -> Iterator[None]:
    if tell is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(BETWEEN_LOOKS):
            steps = steps_so_far(traces)
            if steps:
                tell(f" {counted(steps, 'step')} so far")

    thread = threading.Thread(target=watch, name="torchrepro-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def status_in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    return f"signal {signal.Signals(-status).name}"


def end_group(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """Ask the process and all of its group to end; kill those that have not after a while."""
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
def signals_raised() -> Iterator[None]:
    """Turn the signals that end a program into `Interrupted`, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: object) -> None:
        raise Interrupted(number)

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is not signal.SIG_IGN  # as under nohup
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
