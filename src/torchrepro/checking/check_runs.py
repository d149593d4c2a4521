"""Writes the results of a command into a lock, and checks later runs against these results."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from shlex import join
from typing import TYPE_CHECKING, Any

from torchrepro.application.launch import untouched
from torchrepro.checking.causes import UNKNOWN, Who
from torchrepro.checking.locked_command import (
    LOCK_COMMAND,
    Dependencies,
    LockedCommand,
    ResultsLock,
    files_read,
)
from torchrepro.ground.console import Displayed, listing, parts
from torchrepro.ground.errors import ProfileError, printable, some
from torchrepro.ground.imports import named
from torchrepro.ground.redaction import HIDDEN, without_secrets
from torchrepro.ground.writing import write_in_place
from torchrepro.lock import lock_file
from torchrepro.lock.diff import change
from torchrepro.lock.locked_results import Numbers, first_difference, numbers_of
from torchrepro.lock.repository import CopyError
from torchrepro.manifest.contents import (
    MACHINES,
    as_text,
    known_secrets,
    read_contents,
    seal_of,
)
from torchrepro.manifest.environment import platform_name
from torchrepro.profile.load import resolve
from torchrepro.verdict.render import counted
from torchrepro.verification.copies import FolderState
from torchrepro.verification.leftovers import Leftovers, carried

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.ground.console import Part
    from torchrepro.lock.locked_results import ResultsDifference
    from torchrepro.reporting.report import Report
    from torchrepro.verdict.value import Verdict

ATTRIBUTIONS = ("checking.attribution:who_changed",)
"""Functions that find the cause of a difference, in order; imported when results differ."""


@dataclass(frozen=True, slots=True)
class LockedRun(Displayed):
    """The answer of `lock_numbers`: the results that were written, or why two runs differed."""

    lock: str
    report: Report
    numbers: Numbers | None  # None if two runs did not agree: no lock was written
    verdict: Verdict
    machine: str
    dependencies: Dependencies

    def to_json(self) -> dict[str, Any]:
        steps = None if self.numbers is None else len(self.numbers.steps)
        answer = {"lock": self.lock, "written": self.numbers is not None, "steps": steps}
        answer |= {"machine": self.machine, "digest": self.report.digest}
        if self.numbers is None:
            return {**answer, "verdict": self.verdict.to_json()}
        return answer | self.dependencies.to_json()


def lock_numbers(
    path: Path,
    profile: str,
    overrides: Sequence[str],
    asked: LockedCommand,
    *,
    reason: str = "",
    say: Callable[[str], object] = lambda text: None,
    meanwhile: Callable[[str], object] | None = None,
) -> LockedRun:
    """Run a command twice under a profile, and write its results into a lock if both agree.

    An existing lock for the same profile and command keeps its sections for other platforms. Any
    other lock is replaced. Raises the same exceptions as `write_lock` and `verify`.
    """
    lock_file.refuse_other_file(path)
    resolved = resolve(profile, overrides)
    with untouched():  # the runs must not inherit variables that importing torch changes
        contents, report = lock_file.contents_of_lock(path, resolved, profile, overrides)
    with asked.runner(say, meanwhile) as runner:
        states, done = [], []
        for number in (1, 2):
            states.append(FolderState.now(runner.folder))  # before each run
            say(f"run {number} of 2 ...")
            done.append(asked.run(runner, resolved, f"run-{number}"))
            runner.refuse_unrecorded(done[0].run)
        runs = [recorded.run for recorded in done]
        runner.refuse_failed(runs)
        left = Leftovers(states[0], states[1], (runs[0], runs[1]), carried(*runs))
        verdict = left.explained(runner.compare(*runs))
        machine = platform_name()
        if not verdict.same or any(run.status for run in runs):
            return LockedRun(str(path), report, None, verdict, machine, Dependencies())
        numbers = numbers_of(runs[0].folder, asked.every)
        locked: dict[str, Any] = {"numbers": numbers.to_json()}
        try:
            locked["files"] = dict(files_read(done[0]).code)
        except CopyError as error:
            locked["no_files"] = str(error)
        dependencies = Dependencies.of(done[0], locked.get("files", {}).keys())
        locked |= dependencies.to_json()
        shutil.rmtree(runner.folder, ignore_errors=True)
    if reason:
        locked["reason"] = reason
    shared = {key: contents.pop(key) for key in lock_file.SHARED} | asked.to_json()
    knobs = [
        {key: row[key] for key in ("knob", "outcome", "after", "absent") if key in row}
        for row in contents["report"]["knobs"]
    ]
    short = {"guarantee": contents["report"]["guarantee"], "knobs": knobs}
    section = {**contents, "report": short, **locked}
    machines: dict[str, Any] = {}
    with suppress(ProfileError):
        before = read_contents(path)[1]
        request = ("digest", "named", "command", "folder", "steps", "every")
        is_same = all(before.get(key) == shared[key] for key in request)
        if is_same and isinstance(before.get(MACHINES), dict):
            machines, shared = before.pop(MACHINES), before
    # Each section has its own seal, so that sections from two branches can be merged.
    section["seal"] = seal_of({**shared, **section})
    lock = {**shared, MACHINES: {**machines, machine: section}}
    write_in_place(path, as_text(lock))
    return LockedRun(str(path), report, numbers, verdict, machine, dependencies)


@dataclass(frozen=True, slots=True)
class NumbersCheck(Displayed):
    """The answer of `check_numbers`: the first difference from the lock, and the reason for it."""

    settings: lock_file.CheckResult
    machine: str
    torch: str  # the version in the lock
    steps: int  # the number of steps of the run
    first: ResultsDifference | None  # None if the results are equal
    who: Who | None = None  # None if the results are equal, or with `blame` false

    @property
    def met(self) -> bool:
        """Whether the results agree with the lock, and with `--strict` the settings too."""
        return self.first is None and (self.settings.met or not self.settings.strict)

    def to_json(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {
            "same": self.first is None,
            "first": self.first and self.first.to_json(),
            "who": None,
            "steps": self.steps,
            "machine": self.machine,
        }
        if self.who is not None:
            numbers |= self.who.to_json()
        return {**self.settings.to_json(), "met": self.met, "numbers": numbers}


def check_numbers(
    path: Path,
    command: Sequence[str],
    *,
    strict: bool = False,
    blame: bool = True,
    say: Callable[[str], object] = lambda text: None,
    meanwhile: Callable[[str], object] | None = None,
) -> NumbersCheck:
    """Run the command of a lock once, and compare its results with the lock.

    If the results differ and `blame` is true, further runs look for the cause. Raises the same
    exceptions as `check` and `verify`. Also raises `ProfileError` if the lock has no results, or
    if `command` is not the command of the lock.
    """
    lock = ResultsLock.read(path, command)
    with lock.asked.runner(say, meanwhile) as runner, ThreadPoolExecutor(1) as aside:
        futures: list[Future[lock_file.CheckResult]] = []

        def check_settings() -> None:  # imports torch while the command runs
            checking = untouched()(lock_file.check)
            futures.append(aside.submit(checking, path, strict=strict, profile=lock.resolved))

        say("run ...")
        now = lock.asked.run(replace(runner, beside=check_settings), lock.resolved, "here")
        todo, has_failed = "", now.run.status or not now.run.recorded
        if has_failed and (left := now.left_before()):
            todo = f"check in a folder without files of earlier runs, such as {left[0]}"
        runner.refuse_unrecorded(now.run, todo)
        settings = futures[0].result()
        runner.refuse_failed([now.run], todo)
        here = numbers_of(now.run.folder, lock.asked.every)
        first = first_difference(lock.numbers, here)
        who = None
        if first is not None and blame:
            answers = (named(find)(lock, now, here, settings, runner) for find in ATTRIBUTIONS)
            who = next(answers, Who(UNKNOWN))
        shutil.rmtree(runner.folder, ignore_errors=True)
    torch = str(lock.contents["versions"]["torch"])
    return NumbersCheck(settings, platform_name(), torch, len(here.steps), first, who)


def update_numbers(
    path: Path,
    command: Sequence[str],
    reason: str,
    *,
    say: Callable[[str], object] = lambda text: None,
    meanwhile: Callable[[str], object] | None = None,
) -> LockedRun:
    """Replace the results for this platform in a lock by today's, and store the `reason`.

    The sections of other platforms stay. Raises the same exceptions as `lock_numbers`. Also raises
    `ProfileError` if the reason is empty, or if the profile has changed while other platforms
    still have results under the old profile.
    """
    text = printable(" ".join(reason.split()))
    if not text:
        todo = 'write a reason: --update "addmm of torch 2.14"'
        raise ProfileError.about("the reason is missing", key="--update", todo=todo)
    if without_secrets(text, known_secrets()) != text:
        problem = "the reason may contain a secret, and a lock is shared"
        raise ProfileError.about(problem, key="--update", found=HIDDEN)
    kind, contents = read_contents(path)
    if kind != "lock" or not isinstance(contents.get(MACHINES), dict):
        todo = f"add them: {LOCK_COMMAND}"
        raise ProfileError.about("has no results to update", str(path), todo=todo)
    asked = LockedCommand.of_lock(path, contents, command)
    name, overrides = lock_file.named_in(path, contents)
    platforms = sorted(contents[MACHINES].keys() - {platform_name()})
    if resolve(name, overrides, typed=False).digest != contents["digest"] and platforms:
        problem = f"its profile has changed, and the results of {some(platforms)} used the old one"
        todo = f"lock again, without them: torchrepro lock {name} -o {path} -- {join(command)}"
        raise ProfileError.about(problem, str(path), todo=todo)
    return lock_numbers(path, name, overrides, asked, reason=text, say=say, meanwhile=meanwhile)


@parts.register(LockedRun)
def _locked_parts(answer: LockedRun) -> tuple[Part, ...]:
    lock = answer.lock
    if answer.numbers is None:
        return (*parts(answer.verdict), f"{lock} is unchanged: these results do not repeat")
    report, steps = answer.report, counted(len(answer.numbers.steps), "step")
    return (
        f"{lock} locks {report.profile} ({report.guarantee}) as it is on this machine, "
        f"with the results of {steps}",
        f"  {report.digest}",
        f"  torchrepro check {lock} -- COMMAND",
        *_dependency_lines(answer.dependencies),
    )


def _dependency_lines(dependencies: Dependencies) -> Iterator[str]:
    names = (dependencies.data, dependencies.listed, dependencies.variables)
    words = ("file", "folder", "variable")
    counts = [counted(len(group), word) for group, word in zip(names, words, strict=True)]
    if any(names):
        yield f"  it also lists {', '.join(counts)} as dependencies (lock --json shows them)"
    if dependencies.left_out:
        yield f"  limit of {dependencies.left_out} outside of git reached: some files are missing"


@parts.register(NumbersCheck)
def _check_parts(answer: NumbersCheck) -> tuple[Part, ...]:
    if answer.first is not None:
        if answer.who is None:
            return (str(answer.first),)
        rows = [(f"  {label:<6}", text) for label, text in answer.who.rows]
        return str(answer.first), listing(rows, style="bold")
    steps = counted(answer.steps, "step")
    lines = [f"same results: {steps} as in the lock (torch {answer.torch}, this platform)"]
    differences = answer.settings.comparison.substantial
    if changes := [change(row) for row in differences if row.section != "source"]:
        lines.append(f"without effect on them: {some(changes)}")
    return (*lines, *(parts(answer.settings) if answer.settings.strict else ()))
