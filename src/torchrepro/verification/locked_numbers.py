"""Locks that hold the numbers of a command, and whether a run of it still has them."""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from shlex import join
from typing import TYPE_CHECKING, Any

from torchrepro.console import Displayed, listing, parts
from torchrepro.errors import ProfileError
from torchrepro.launch import untouched
from torchrepro.lock.diff import change
from torchrepro.lock.lock_file import (
    CheckResult,
    by_lines,
    check,
    contents_of_lock,
    is_relative_path,
    refuse_other_file,
    sectioned,
    write_in_place,
)
from torchrepro.lock.numbers import Numbers, first_difference, numbers_of
from torchrepro.manifest.contents import (
    MACHINES,
    read_complete,
    read_contents,
    seal_of,
    secrets_here,
)
from torchrepro.manifest.environment import kind_of_machine
from torchrepro.messages import printable, some
from torchrepro.profile.load import resolve
from torchrepro.redaction import HIDDEN, without_secrets
from torchrepro.trace.request import is_range
from torchrepro.verdict.render import counted, verdict_json
from torchrepro.verification.copies import CopyError
from torchrepro.verification.locked_command import LockedCommand
from torchrepro.verification.runner import all_failed, failure, output_directory, refuse_unrecorded
from torchrepro.verification.who_changed import Locked, Who, who_changed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torchrepro.console import Part
    from torchrepro.lock.numbers import NumbersDifference
    from torchrepro.report import Report
    from torchrepro.verdict.value import Verdict


@dataclass(frozen=True, slots=True)
class LockedRun(Displayed):
    """What became of a lock with numbers."""

    lock: str
    report: Report
    numbers: Numbers | None
    """None where two runs did not agree, so that nothing was written."""
    verdict: Verdict
    machine: str

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON values."""
        steps = None if self.numbers is None else len(self.numbers.steps)
        its = {"lock": self.lock, "written": self.numbers is not None, "steps": steps}
        its |= {"machine": self.machine, "digest": self.report.digest}
        return its if self.numbers is not None else {**its, "verdict": verdict_json(self.verdict)}


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
        done = []
        for number in (1, 2):
            say(f"run {number} of 2 ...")
            done.append(asked.run(runner, resolved, f"run-{number}"))
            refuse_unrecorded(done[-1].run, asked.command)
        runs = [each.run for each in done]
        if all_failed(runs):
            raise failure(runs, asked.command)
        verdict = runner.compare(*runs)
        machine = kind_of_machine()
        if not verdict.same or any(run.status for run in runs):
            return LockedRun(str(path), report, None, verdict, machine)
        numbers = numbers_of(runs[0].folder, asked.every)
        held: dict[str, Any] = {"numbers": numbers.to_json()}
        try:
            held["files"] = dict(asked.files_of(done[0], resolved).code)
        except CopyError as error:
            held["no_files"] = str(error)
        shutil.rmtree(output, ignore_errors=True)
    if reason:
        held["reason"] = reason
    its = sectioned(contents, machine, **held) | asked.to_json()
    with suppress(ProfileError):
        before = read_contents(path)[1]
        if isinstance(before.get(MACHINES), dict) and _same_request(before, its):
            its = {**before, MACHINES: {**before[MACHINES], **its[MACHINES]}}
    # Each section has a seal of its own: those that two branches have changed can be merged.
    section = its[MACHINES][machine]
    shared = {key: its[key] for key in its.keys() - {MACHINES}}
    section["seal"] = seal_of({**shared, **section})
    write_in_place(path, by_lines(its) + "\n")
    return LockedRun(str(path), report, numbers, verdict, machine)


_REQUEST = ("digest", "named", "command", "folder", "steps", "every")


def _same_request(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in _REQUEST)


@dataclass(frozen=True, slots=True)
class NumbersCheck(Displayed):
    """Whether a run has the numbers of a lock, and who changed them if not."""

    settings: CheckResult
    machine: str
    torch: str
    """Its version in the lock."""
    steps: int
    """How many the run has."""
    first: NumbersDifference | None
    """Where they first differ; None where they are the same."""
    who: Who | None = None
    """None where that was not asked for."""

    @property
    def met(self) -> bool:
        """Whether the lock is met: the numbers decide, and with `--strict` the settings as well."""
        return self.first is None and (self.settings.met or not self.settings.strict)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain JSON values."""
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
    asked = locked_request(path, contents, command)
    numbers = Numbers.from_json(contents.get("numbers"), str(path))
    resolved = resolve(*named_in(path, contents), typed=False)
    with output_directory("", say) as output, ThreadPoolExecutor(1) as aside:
        settings_here: list[Future[CheckResult]] = []

        def check_settings() -> None:  # imports torch, which who prepares a run would wait for
            settings_here.append(aside.submit(untouched()(check), path, strict=strict))

        runner = asked.runner(output, say, meanwhile)
        say("run ...")
        its = asked.run(replace(runner, beside=check_settings), resolved, "here")
        settings = settings_here[0].result()
        refuse_unrecorded(its.run, asked.command)
        if its.run.status:
            raise failure([its.run], asked.command)
        here = numbers_of(its.run.folder, asked.every)
        first = first_difference(numbers, here)
        torch = str(contents["versions"]["torch"])
        found = NumbersCheck(settings, kind_of_machine(), torch, len(here.steps), first)
        if first is not None and blame:
            locked = Locked(
                path=path,
                contents=contents,
                numbers=numbers,
                here=here,
                settings=settings,
            )
            found = replace(found, who=who_changed(locked, asked, its, runner))
        shutil.rmtree(output, ignore_errors=True)
    return found


def locked_request(
    path: Path, contents: Mapping[str, Any], command: Sequence[str]
) -> LockedCommand:
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
            what = f"another {key} than the lock's"
            todo = "another lock for it: torchrepro lock PROFILE -o FILE -- COMMAND"
            raise ProfileError.about(what, str(path), key, found, legal=legal, todo=todo)
    return asked


def named_in(path: Path, contents: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return the profile of a lock, as it is named from here, and its overrides."""
    its: Any = contents.get("named")
    try:
        name, overrides = str(its["profile"]), [str(text) for text in its["overrides"]]
    except (TypeError, KeyError):
        raise ProfileError.about("damaged: it does not name its profile", str(path)) from None
    return str(path.parent / name) if is_relative_path(name) else name, overrides


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
        todo = "lock them: torchrepro lock PROFILE -o FILE -- COMMAND"
        raise ProfileError.about("holds no numbers that could be updated", str(path), todo=todo)
    asked = locked_request(path, contents, command)
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
    )


@parts.register(NumbersCheck)
def _check_parts(found: NumbersCheck) -> tuple[Part, ...]:
    shown: list[Part] = []
    every = found.settings.comparison.substantial
    differing = [change(each) for each in every if each.section != "source"]
    if found.first is None:
        steps = counted(found.steps, "step")
        shown.append(
            f"same numbers: {steps} as in the lock (torch {found.torch}, this kind of machine)"
        )
        if differing:
            shown.append(f"without effect on them: {some(differing)}")
        if found.settings.strict:
            shown += parts(found.settings)
        return tuple(shown)
    shown.append(str(found.first))
    if found.who is not None:
        rows = [(f"  {label:<6}", text) for label, text in found.who.rows]
        shown.append(listing(rows, style="bold"))
    return tuple(shown)
