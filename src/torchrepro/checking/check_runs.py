"""Locks that hold the numbers of a command, and whether a run still has them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from shlex import join
from typing import TYPE_CHECKING, Any

from torchrepro.application.launch import untouched
from torchrepro.checking.attribution import UNKNOWN, Experiment, LockedCommand, Who
from torchrepro.checking.dependencies import Dependencies
from torchrepro.ground.console import Displayed, listing, parts
from torchrepro.ground.errors import ApplyError, ProfileError, TraceError
from torchrepro.ground.messages import printable, shown, some
from torchrepro.ground.redaction import HIDDEN, without_secrets
from torchrepro.ground.writing import write_in_place
from torchrepro.lock.diff import OF_A_RUN, change
from torchrepro.lock.lock_file import (
    SHARED,
    CheckResult,
    check,
    contents_of_lock,
    named_in,
    refuse_other_file,
)
from torchrepro.lock.locked_results import Numbers, first_difference, numbers_of
from torchrepro.lock.repository import (
    CopyError,
)
from torchrepro.manifest.contents import (
    MACHINES,
    as_text,
    read_complete,
    read_contents,
    seal_of,
    secrets_here,
)
from torchrepro.manifest.environment import kind_of_machine
from torchrepro.profile.load import resolve
from torchrepro.trace.request import is_range
from torchrepro.verdict.render import counted
from torchrepro.verification.copies import FolderState
from torchrepro.verification.leftovers import Leftovers
from torchrepro.verification.runner import output_directory

if TYPE_CHECKING:
    from pathlib import Path

    from torchrepro.ground.console import Part
    from torchrepro.lock.locked_results import NumbersDifference
    from torchrepro.reporting.report import Report
    from torchrepro.verdict.value import Verdict

_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # of SHA-1 and SHA-256
_LOCK_THEM = "torchrepro lock PROFILE -o FILE -- COMMAND"


@dataclass(frozen=True, slots=True)
class LockedRun(Displayed):
    lock: str
    report: Report
    numbers: Numbers | None  # None where two runs did not agree, so that nothing was written
    verdict: Verdict
    machine: str
    besides: Dependencies

    def to_json(self) -> dict[str, Any]:
        steps = None if self.numbers is None else len(self.numbers.steps)
        its = {"lock": self.lock, "written": self.numbers is not None, "steps": steps}
        its |= {"machine": self.machine, "digest": self.report.digest}
        if self.numbers is None:
            return {**its, "verdict": self.verdict.to_json()}
        return its | self.besides.to_json()


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
    """Run a command twice under a profile, and write its numbers into a lock if they repeat.

    A lock of the same profile and command keeps the sections of other machines; any other is
    replaced. Raises as `write_lock` and `verify` do.
    """
    refuse_other_file(path)
    with untouched():  # the runs inherit what torch changes as it is imported
        contents, report = contents_of_lock(path, profile, overrides)
    resolved = resolve(profile, overrides)
    with output_directory("", say) as output:
        runner = asked.runner(output, say, meanwhile)
        states, done = [], []
        for number in (1, 2):
            states.append(FolderState.now(output))  # before each run
            say(f"run {number} of 2 ...")
            done.append(asked.run(runner, resolved, f"run-{number}"))
            runner.refuse_unrecorded(done[0].run)
        runs = [each.run for each in done]
        runner.refuse_failed(runs)
        left = Leftovers.of(states[0], states[1], runs[0], runs[1])
        verdict = left.explained(runner.compare(*runs))
        machine = kind_of_machine()
        if not verdict.same or any(run.status for run in runs):
            return LockedRun(str(path), report, None, verdict, machine, Dependencies())
        numbers = numbers_of(runs[0].folder, asked.every)
        held: dict[str, Any] = {"numbers": numbers.to_json()}
        try:
            held["files"] = dict(asked.files_of(done[0], resolved).code)
        except CopyError as error:
            held["no_files"] = str(error)
        besides = asked.besides(done[0], held.get("files", {}).keys())
        held |= besides.to_json()
        shutil.rmtree(output, ignore_errors=True)
    if reason:
        held["reason"] = reason
    shared = {key: contents.pop(key) for key in SHARED} | asked.to_json()
    knobs = [
        {key: row[key] for key in ("knob", "outcome", "after", "absent") if key in row}
        for row in contents["report"]["knobs"]
    ]
    short = {"guarantee": contents["report"]["guarantee"], "knobs": knobs}
    section = {**contents, "report": short, **held}
    machines: dict[str, Any] = {}
    with suppress(ProfileError):
        before = read_contents(path)[1]
        request = ("digest", "named", "command", "folder", "steps", "every")
        is_same = all(before.get(key) == shared[key] for key in request)
        if is_same and isinstance(before.get(MACHINES), dict):
            machines, shared = before.pop(MACHINES), before
    # Each section has a seal of its own: those that two branches have changed can be merged.
    section["seal"] = seal_of({**shared, **section})
    its = {**shared, MACHINES: {**machines, machine: section}}
    write_in_place(path, as_text(its))
    return LockedRun(str(path), report, numbers, verdict, machine, besides)


@dataclass(frozen=True, slots=True)
class NumbersCheck(Displayed):
    """Whether a run has the numbers of a lock, and who changed them if not."""

    settings: CheckResult
    machine: str
    torch: str  # its version in the lock
    steps: int  # how many the run has
    first: NumbersDifference | None  # where they first differ; None where they are the same
    who: Who | None = None  # None where that was not asked for

    @property
    def met(self) -> bool:
        """Whether the lock is met: the numbers decide, and with `--strict` the settings as well."""
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
    """Run the command of a lock once, and say whether it has the lock's numbers.

    If it has not, it is found out who changed them, unless `blame` is false. Raises as `check` and
    `verify` do, and `ProfileError` for a lock without numbers and for another command.
    """
    _, contents = read_complete(path)
    asked = _request_of(path, contents, command)
    numbers = Numbers.from_json(contents.get("numbers"), str(path))
    refuse_damaged(path, contents)
    resolved = resolve(*named_in(path, contents), typed=False)
    with output_directory("", say) as output, ThreadPoolExecutor(1) as aside:
        settings_here: list[Future[CheckResult]] = []

        def check_settings() -> None:  # imports torch, which who prepares a run would wait for
            settings_here.append(aside.submit(untouched()(check), path, strict=strict))

        runner = asked.runner(output, say, meanwhile)
        say("run ...")
        now = asked.run(replace(runner, beside=check_settings), resolved, "here")
        todo, has_failed = "", now.run.status or not now.run.recorded
        if has_failed and (left := asked.left_before(now)):
            todo = f"check in a folder without what earlier runs have left, such as {left[0]}"
        runner.refuse_unrecorded(now.run, todo)
        settings = settings_here[0].result()
        runner.refuse_failed([now.run], todo)
        here = numbers_of(now.run.folder, asked.every)
        first = first_difference(numbers, here)
        torch = str(contents["versions"]["torch"])
        who = None
        if first is not None and blame:
            its = Experiment(path, contents, numbers, here, settings, asked, now, runner)
            try:
                who = its.who_changed()
            except (CopyError, ApplyError, ProfileError, TraceError) as error:
                who = Who(UNKNOWN, str(error))
        shutil.rmtree(output, ignore_errors=True)
    return NumbersCheck(settings, kind_of_machine(), torch, len(here.steps), first, who)


def refuse_damaged(path: Path, contents: Mapping[str, Any]) -> None:
    """Raise `ProfileError` for files of a lock that are none, and for names without states."""
    for key in ("files", *OF_A_RUN):
        held = contents.get(key, {})
        for name, its in held.items() if isinstance(held, dict) else [("", held)]:
            inside = not {"", ".", "..", ".git"} & {*name.split("/")} and "\0" not in name
            is_file = inside and _BLOB.fullmatch(str(its))
            if not isinstance(its, str) or (key == "files" and not is_file):
                legal = "a path inside of the repository, with 40 hexadecimal digits"
                found, todo = f"{name!r}: {shown(its)}", f"lock again: {_LOCK_THEM}"
                what, legal = "damaged: no name with its state", legal if key == "files" else ""
                raise ProfileError.about(what, str(path), key, found, legal=legal, todo=todo)


def _request_of(path: Path, contents: Mapping[str, Any], command: Sequence[str]) -> LockedCommand:
    """Return what the lock asks for; raises `ProfileError` for another command than the lock's."""
    if "command" not in contents:
        todo = f"lock them: torchrepro lock PROFILE -o {path} -- {join(command)}"
        raise ProfileError.about("the lock holds no numbers", str(path), todo=todo)
    steps, every = contents.get("steps"), contents.get("every")
    if not (steps is None or is_range(steps)) or type(every) is not int or every < 1:
        raise ProfileError.about("damaged: no steps of a run", str(path), "steps")
    asked = LockedCommand.here(command, None if steps is None else (steps[0], steps[1]), every)
    now = asked.to_json()
    for key in ("command", "folder"):
        found, legal = (
            join(map(str, its)) if isinstance(its, list) else str(its)
            for its in (now[key], contents.get(key))
        )
        if found != legal:
            what, todo = f"another {key} than the lock's", f"another lock for it: {_LOCK_THEM}"
            raise ProfileError.about(what, str(path), key, found, legal=legal, todo=todo)
    return asked


def update_numbers(
    path: Path,
    command: Sequence[str],
    reason: str,
    *,
    say: Callable[[str], object] = lambda text: None,
    meanwhile: Callable[[str], object] | None = None,
) -> LockedRun:
    """Write the numbers that a command has now into this machine's section, and why.

    Other sections stay. Raises as `lock_numbers`, and `ProfileError` for no reason and for a
    profile that is another by now while there are other sections, which were under the old one.
    """
    text = printable(" ".join(reason.split()))
    if not text:
        todo = 'say why: --update "addmm of torch 2.14"'
        raise ProfileError.about("no reason is given", key="--update", todo=todo)
    if without_secrets(text, secrets_here()) != text:
        what = "a reason that may hold a secret, and a lock is shared"
        raise ProfileError.about(what, key="--update", found=HIDDEN)
    kind, contents = read_contents(path)
    if kind != "lock" or not isinstance(contents.get(MACHINES), dict):
        what, todo = "holds no numbers that could be updated", f"lock them: {_LOCK_THEM}"
        raise ProfileError.about(what, str(path), todo=todo)
    asked = _request_of(path, contents, command)
    name, overrides = named_in(path, contents)
    others = sorted(contents[MACHINES].keys() - {kind_of_machine()})
    if resolve(name, overrides, typed=False).digest != contents["digest"] and others:
        what = f"its profile has changed, and the numbers of {some(others)} are under the old one"
        todo = f"lock again, without them: torchrepro lock {name} -o {path} -- {join(command)}"
        raise ProfileError.about(what, str(path), todo=todo)
    return lock_numbers(path, name, overrides, asked, reason=text, say=say, meanwhile=meanwhile)


@parts.register(LockedRun)
def _locked_parts(found: LockedRun) -> tuple[Part, ...]:
    if found.numbers is None:
        return (*parts(found.verdict), f"{found.lock} is as it was: these numbers do not repeat")
    report, steps = found.report, counted(len(found.numbers.steps), "step")
    return (
        f"{found.lock} locks {report.profile} ({report.guarantee}) as it is on this machine, "
        f"with the numbers of {steps}",
        f"  {report.digest}",
        f"  torchrepro check {found.lock} -- COMMAND",
        *_besides(found.besides),
    )


def _besides(its: Dependencies) -> Iterator[str]:
    if any(its[:3]):
        amount = ", ".join(
            counted(len(some), one) for some, one in zip(its, _COUNTED, strict=False)
        )
        yield f"  it also depends on {amount}, whose names it holds (lock --json shows them)"
    if its.left_out:
        yield f"  no more files after {its.left_out} outside of git: these are not held"


_COUNTED = ("file", "folder", "variable")


@parts.register(NumbersCheck)
def _check_parts(found: NumbersCheck) -> tuple[Part, ...]:
    if found.first is not None:
        rows = [(f"  {label:<6}", text) for label, text in found.who.rows] if found.who else []
        return (str(found.first), *([listing(rows, style="bold")] if rows else []))
    steps = counted(found.steps, "step")
    shown: list[Part] = [
        f"same numbers: {steps} as in the lock (torch {found.torch}, this kind of machine)"
    ]
    every = found.settings.comparison.substantial
    if differing := [change(each) for each in every if each.section != "source"]:
        shown.append(f"without effect on them: {some(differing)}")
    return (*shown, *(parts(found.settings) if found.settings.strict else ()))
