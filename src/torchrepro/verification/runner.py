"""Runs a command in fresh processes, records each run, and compares two runs.

A `RunRequest` is what a user asks of the runs of a command: one value for `verify` and for its
relations. Its `Runner` starts the runs.
"""

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
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from pathlib import Path
from shlex import join
from typing import IO, TYPE_CHECKING, Any

from torchrepro.application.launch import prepared, program_and_recording_environment
from torchrepro.ground.errors import ApplyError, ProfileError, TraceError, printable
from torchrepro.ground.redaction import (
    HIDDEN,
    shareable,
    shell_line,
    sounds_secret,
    without_secrets,
)
from torchrepro.manifest.contents import known_secrets
from torchrepro.profile.load import resolve
from torchrepro.trace.reader import read_run, steps_so_far
from torchrepro.trace.request import LEVELS, VARIABLE, RecordingRequest
from torchrepro.verdict.comparison import compare_within, refuse_malformed_lines, tolerance_of
from torchrepro.verdict.diagnosis import advice
from torchrepro.verdict.render import counted
from torchrepro.verdict.value import Compared, Divergence, Kind, Verdict
from torchrepro.verification.perturbations import NO_CHANGE, RunEnvironment
from torchrepro.verification.result import Run

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.trace.reader import Trace

    Setup = tuple[ResolvedProfile | None, RunEnvironment]
    """The profile under which a run is started, if any, and its environment."""

GRACE = 20.0  # seconds between the request to end a command and SIGKILL

BETWEEN_LOOKS = 1.0  # seconds between two readings of the progress of a run

LARGEST_LOG = 2**21  # bytes of output that are kept, half of them from the end

_LAST_LINES = 12
_NOT_APPLIED = 3  # the exit status of a command whose profile could not be applied


class Interrupted(KeyboardInterrupt):
    """Raised when a signal asks this process to end. The running command is ended too."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)

    @property
    def exit_status(self) -> int:
        return 128 + self.number


@dataclass(frozen=True, slots=True)
class Runner:
    """A command, the settings for recording it, and the criteria for comparing its runs."""

    command: Sequence[str]
    folder: Path  # the folder of all recordings and logs
    request: RecordingRequest  # what is recorded; each run sets its own folder in it
    tolerance: tuple[float, float] | None  # rtol and atol; None compares bits
    say: Callable[[str], object]  # receives the progress as text with line ends
    meanwhile: Callable[[str], object] | None = None
    """Receives the state of the running command, for a line that the next text overwrites."""
    ignore: Sequence[str] = ()  # lines whose records are ignored
    limit: float | None = None  # seconds after which a run is ended; None for no limit
    beside: Callable[[], object] = lambda: None
    """Called before the command starts, to begin work that runs at the same time."""
    environment: RunEnvironment = NO_CHANGE  # of all its runs
    strayed: Callable[[], str] = str
    """Returns a use of the user's own files by a run in a copy, in words; empty if none."""

    def run(
        self,
        resolved: ResolvedProfile | None,
        name: str,
        environment: RunEnvironment = NO_CHANGE,
        perturbed: tuple[str, ...] = (),
    ) -> Run:
        """Run and record the command once, under the profile `resolved` if it is not None.

        Raises `ProfileError` or `ApplyError` if the command cannot be started, `TraceError` if it
        cannot be recorded, and `Interrupted` if a signal ends this process.
        """
        traces, log = self.folder / name, self.folder / f"{name}.log"
        request = replace(self.request, folder=str(traces))
        if resolved is None:
            program, variables = program_and_recording_environment(self.command)
        else:
            program, variables = prepared(resolved, self.command)
        request.prepare_folder()
        variables |= (environment | self.environment).all_variables()
        variables[VARIABLE] = request.to_variable()
        self.beside()
        begun = time.monotonic()

        def report_steps() -> None:
            if self.meanwhile is not None and (ended := steps_so_far(traces)):
                self.meanwhile(f" {counted(ended, 'step')} so far")

        status = run_to_end(program, self.command, variables, log, self.limit, report_steps)
        seconds = time.monotonic() - begun
        read = traces_in(str(traces))
        recorded = bool(read and read[0].steps)
        steps, amount = 0, "nothing recorded"
        if recorded:
            steps = read[0].ended_steps
            records = sum(row.records for row in read[0].steps.values())
            outside = f"{counted(records, 'record')} outside of any step"
            amount = counted(steps, "step") if steps else outside
        ended = f", exit status {status}" if status else ""
        self.say(f" {seconds:.1f} s, {amount}{ended}\n")
        return Run(name, str(traces), str(log), status, seconds, steps, recorded, perturbed)

    def compare(self, first: Run, second: Run) -> Verdict:
        """Compare two runs. At least one of the two must be recorded.

        Runs with different exit statuses count as different, even if their records are equal.
        """
        if self.meanwhile is not None:
            self.meanwhile(f"comparing {second.name} with {first.name} ...")
        exits = [f"{run.name} with {status_in_words(run.status)}" for run in (first, second)]
        ended = f"they ended: {' and '.join(exits)}"
        empty = next((run for run in (first, second) if not run.recorded), None)
        if empty is not None:
            none = Compared(ranks=0, steps=0, ops=0, bytes=0, level="op")
            verdict = Verdict(same=False, left=first.folder, right=second.folder, compared=none)
            what = f"{empty.name} ended before anything was recorded; {ended}"
            after_last = not (first.steps or second.steps)
        else:
            verdict = compare_within(
                first.folder, second.folder, self.tolerance, self.ignore, one_program=True
            )
            if first.status == second.status:
                return self.advised(verdict, first)
            if not verdict.same:
                return self.advised(replace(verdict, notes=(ended, *verdict.notes)), first)
            what, after_last = f"all records are the same; {ended}", True
        steps = verdict.compared.steps
        return Verdict(
            *(False, first.folder, second.folder, verdict.compared),
            Divergence(0, steps, kind=Kind.ENDED, what=what, after_last=after_last),
            losses=verdict.losses,
            map=verdict.map,
        )

    def refuse_unrecorded(self, run: Run, todo: str = "") -> None:
        """Raise `TraceError` if a run succeeded but was not recorded.

        The message ends with the advice `todo`, or with general advice if `todo` is empty.
        """
        if run.status or run.recorded:
            return
        prefix = f"torchrepro: {run.folder}: "
        lines = (line.removeprefix(prefix) for line in last_lines(run, _LAST_LINES))
        reason = next((line for line in lines if line.endswith("nothing was recorded")), "")
        computes = "it has to import torch and compute something with it"
        if self.request.level == LEVELS[0]:
            computes = "it has to make a step of an optimizer, or to call torchrepro.end_step()"
        raise TraceError.about(
            reason or "nothing was recorded, so its runs cannot be compared",
            found=join(self.command),
            todo=todo or ("" if reason else f"{computes}, in a Python with torchrepro installed"),
        )

    def refuse_failed(self, runs: Sequence[Run], todo: str = "") -> None:
        """Raise an error with the last lines of output, if all runs failed with the same status.

        The error is an `ApplyError` if the profile could not be applied, and a `TraceError` in
        other cases. `todo` is advice for the user.
        """
        last = runs[-1]
        if last.status == 0 or len({run.status for run in runs}) > 1:
            return
        lines = last_lines(last, _LAST_LINES)
        if last.status == _NOT_APPLIED and any(line.startswith("torchrepro: ") for line in lines):
            raise ApplyError("\n".join(line.removeprefix("torchrepro: ") for line in lines))
        output = [f"    {line}" for line in lines] or ["    (it printed nothing)"]
        ended = f"it ended with {status_in_words(last.status)}"
        ended = f"{ended} in each of {len(runs)} runs" if len(runs) > 1 else ended
        what = "\n".join([f"{ended}:", *output])
        raise TraceError.about(what, found=join(self.command), todo=todo)

    def advised(self, verdict: Verdict, run: Run) -> Verdict:
        """Return `verdict` with advice that is based on the metadata of a trace of `run`."""
        meta = traces_in(run.folder)[0].meta
        command = shell_line(shareable(self.command, known_secrets()))
        return replace(verdict, advice=advice(verdict, meta, command))


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A command, and how its runs are started, recorded, compared and reported.

    The caller of `verify` or the command line makes it once. Nothing changes it. Its creation
    raises `ProfileError` or `TraceError` if a value is invalid.
    """

    command: Sequence[str]
    _: KW_ONLY
    profile: Any = None  # as the user named it; None starts the command without a profile
    overrides: Sequence[str] = ()
    folder: str = ""  # a new or empty folder; without a name, a temporary folder
    recording: RecordingRequest = field(default_factory=partial(RecordingRequest, ""))
    rtol: float | None = None
    atol: float | None = None
    ignore: Sequence[str] = ()  # program lines whose results are ignored
    say: Callable[[str], object] = lambda text: None  # receives the progress as text
    meanwhile: Callable[[str], object] | None = None  # receives the state of the running command
    resolved: ResolvedProfile | None = field(init=False, default=None)
    tolerance: tuple[float, float] | None = field(init=False)  # rtol and atol; None compares bits

    def __post_init__(self) -> None:
        if self.profile is not None:
            object.__setattr__(self, "resolved", resolve(self.profile, self.overrides))
        elif self.overrides:
            problem = "overrides without a profile that they could change"
            todo, overrides = "name the profile before them", " ".join(self.overrides)
            raise ProfileError.about(problem, found=overrides, todo=todo)
        object.__setattr__(self, "tolerance", tolerance_of(self.rtol, self.atol))
        refuse_malformed_lines(self.ignore)

    @property
    def command_line(self) -> str:
        """The verified command line as shell input, with possible secrets hidden."""
        resolved = self.resolved
        secrets = known_secrets(*([resolved] if resolved else []))
        words = shareable(self.command, secrets)
        if resolved is not None:
            is_named = isinstance(self.profile, str | os.PathLike)
            launcher = ["torchrepro", "run", os.fspath(self.profile) if is_named else resolved.name]
            for text in self.overrides:
                key, equals, _ = text.partition("=")
                secret = equals and sounds_secret(key)
                launcher.append(f"{key}={HIDDEN}" if secret else without_secrets(text, secrets))
            words = [*launcher, "--", *words]
        return shell_line(words)

    @contextmanager
    def runner(
        self, tolerance: tuple[float, float] | None, *, loading: bool = True
    ) -> Iterator[Runner]:
        """Yield the runner of the command. A tolerance needs statistics of the recorded tensors.

        If `folder` is empty, makes a temporary folder. Reports the path if the block fails. Raises
        `TraceError` if `folder` contains files already.
        """
        if self.folder:
            RecordingRequest(self.folder).prepare_folder()
        output = Path(self.folder or tempfile.mkdtemp(prefix="torchrepro-verify-")).absolute()
        recording = replace(self.recording, statistics=tolerance is not None, loading=loading)
        criteria = tolerance, self.say, self.meanwhile, self.ignore
        try:
            with raise_on_signals():  # also between two runs, so that open files are closed
                yield Runner(tuple(self.command), output, recording, *criteria)
        except BaseException:
            if any(output.iterdir()):
                written = "the recordings so far, and the output of the command, are in"
                self.say(f"\n{written} {output}\n")
            else:
                self.say("\n")  # ends the line of a run that had begun
                if not self.folder:
                    output.rmdir()
            raise


def traces_in(folder: str) -> list[Trace]:
    """Return the traces of a run, without records. The list is empty for an unrecorded run."""
    traces: list[Trace] = []
    with suppress(TraceError):
        traces = read_run(folder, records=False)
    for trace in traces:
        trace.close()
    return traces


def rows_of(run: Run, key: str) -> list[Any]:
    """Return the rows under `key` in the metadata of all traces of a run."""
    return [row for trace in traces_in(run.folder) for row in trace.meta.get(key) or ()]


def last_lines(run: Run, most: int) -> list[str]:
    """Return the last `most` lines of the output of a run."""
    with Path(run.log).open(encoding="utf-8", errors="replace") as file:
        return [printable(line.rstrip("\n")) for line in deque(file, most)]


def run_to_end(
    program: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    limit: float | None = None,
    look: Callable[[], object] = lambda: None,
) -> int:
    """Run a command with its output in `log`, and return the exit status.

    The command is ended after `limit` seconds. `look` is called every `BETWEEN_LOOKS` seconds until
    the command ends. Its standard input is empty, so that all runs read the same input. The command
    has its own session, and a second process watches this one. So the command and its child
    processes are ended even if this process is killed. A child that has started another session
    continues. Of a long output, only the beginning and the end are kept.
    Raises `ProfileError` if the command cannot be started. Raises `Interrupted` if a signal ends
    this process.
    """
    with log.open("wb") as output, raise_on_signals():
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
            with _ended_with_parent(process):
                while (remaining := deadline - time.monotonic()) > 0:
                    with suppress(subprocess.TimeoutExpired):
                        return process.wait(min(remaining, BETWEEN_LOOKS))
                    _free_middle(output)
                    look()
                end_group(process)
                return process.returncode
        except BaseException as stopped:
            end_group(process, getattr(stopped, "number", signal.SIGTERM))
            raise
        finally:
            _shorten(log)


_AFTER_PARENT = """
read -r over || {
    kill -s TERM -- "-$1"
    waited=0
    while kill -s 0 -- "-$1" && [ "$waited" -lt "$2" ]; do sleep 1; waited=$((waited + 1)); done
    kill -s KILL -- "-$1"
}
"""
"""Ends the process group $1, by SIGTERM and after $2 seconds by SIGKILL, once its input ends
without a line: the process at the other end of that pipe has died."""


@contextmanager
def _ended_with_parent(process: subprocess.Popen[bytes]) -> Iterator[None]:
    watcher = subprocess.Popen(  # noqa: S603 - a constant script
        ["/bin/sh", "-c", _AFTER_PARENT, "sh", str(process.pid), str(int(GRACE))],
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
    # Frees the disk blocks in the middle of a file that the command still writes. Positions in the
    # file stay valid, so no output is lost. Python has no call for this, but libc has. Where it
    # fails, `_shorten` cuts the file at the end of the run.
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
            file.write(b"\n... %d bytes omitted ...\n" % (size - LARGEST_LOG) + end)
            file.truncate()


def status_in_words(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    return f"signal {signal.Signals(-status).name}"


def end_group(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> None:
    """Signal a process group, wait up to `GRACE` seconds for `process`, then kill the group."""
    try:
        _signal(process, number)
        process.wait(GRACE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        pass  # it took too long, or the user pressed Ctrl+C
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """In the main thread, raise `Interrupted` for signals that end a program, such as SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: object) -> None:
        raise Interrupted(number)

    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup ignores SIGHUP
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
