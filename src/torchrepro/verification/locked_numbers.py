"""Locks that hold the numbers of a command, whether a run still has them, and who changed them.

Who did is found out by experiment. The code of the lock runs in today's environment, in a copy of
its commit. Where it has the numbers of the lock, the change is in the code: old and new code, both
recorded today, show where. Where it has other numbers, something besides the code has changed. That
is the environment only where what the lock holds of it differs, and nothing else that the run
depended on is known to differ; otherwise nobody can tell.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import chdir, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.console import Displayed, listing, parts
from torchrepro.errors import ApplyError, ProfileError, TraceError
from torchrepro.launch import is_python, untouched
from torchrepro.lock.diff import ENFORCED, change
from torchrepro.lock.lock_file import (
    SHARED,
    CheckResult,
    check,
    contents_of_lock,
    is_relative_path,
    named_in,
    refuse_other_file,
)
from torchrepro.lock.numbers import Numbers, first_difference, numbers_of
from torchrepro.manifest.contents import (
    MACHINES,
    as_text,
    read_complete,
    read_contents,
    seal_of,
    secrets_here,
)
from torchrepro.manifest.environment import kind_of_machine
from torchrepro.messages import printable, shown, some
from torchrepro.profile.load import resolve
from torchrepro.profile.search_path import SUFFIXES
from torchrepro.redaction import HIDDEN, shareable, without_secrets
from torchrepro.trace.request import LEVELS, Request, is_range
from torchrepro.verdict.comparison import compare_within
from torchrepro.verdict.render import counted, from_here, moment
from torchrepro.verification.copies import Copy, FolderState, temporary_folder
from torchrepro.verification.dependencies import Dependencies
from torchrepro.verification.file_notes import READ, WRITTEN, is_of_cache, noted
from torchrepro.verification.leftovers import Leftovers
from torchrepro.verification.perturbations import RunEnvironment, noting_files
from torchrepro.verification.repository import (
    FAILED,
    CopyError,
    FilesRead,
    blobs_of,
    commit_with,
    commits_of_lock,
    files_now,
    files_read,
    names_by_git,
    repository_root,
    write_commit,
    write_files,
)
from torchrepro.verification.runner import Runner, last_lines, output_directory
from torchrepro.writing import write_in_place

if TYPE_CHECKING:
    from torchrepro.console import Part
    from torchrepro.lock.diff import Difference
    from torchrepro.lock.numbers import NumbersDifference
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.report import Report
    from torchrepro.verdict.value import Divergence, Verdict
    from torchrepro.verification.result import Run

_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")  # of SHA-1 and SHA-256
_QUOTED = re.compile("'([^']+)'")
_LOCK_THEM = "torchrepro lock PROFILE -o FILE -- COMMAND"


class _Recorded(NamedTuple):
    run: Run
    files: Path  # what it noted of its files
    began: float


@dataclass(frozen=True, slots=True)
class LockedCommand:
    """What is run for its numbers: they stand in the lock, and `check` takes them from there."""

    command: tuple[str, ...]
    folder: Path  # where it is started
    root: Path | None  # the root of its repository
    steps: tuple[int, int] | None = None
    every: int = 1

    @classmethod
    def here(
        cls, command: Sequence[str], steps: tuple[int, int] | None = None, every: int = 1
    ) -> LockedCommand:
        folder = Path.cwd()
        return cls(tuple(command), folder, repository_root(folder), steps, every)

    def to_json(self) -> dict[str, Any]:
        """Return it as a lock holds it: the interpreter's path is not part of the command."""
        words = shareable(self.command, secrets_here())
        inside = self.folder.relative_to(self.root) if self.root else Path()
        return {
            "command": [*(["python"] if is_python(words[0]) else words[:1]), *words[1:]],
            "folder": inside.as_posix(),
            "steps": list(self.steps) if self.steps else None,
            "every": self.every,
        }

    def runner(self, output: Path, say: Any, meanwhile: Any) -> Runner:
        request = Request("", LEVELS[0], self.steps)
        return Runner(self.command, output, request, None, say, meanwhile)

    def run(self, runner: Runner, resolved: ResolvedProfile, name: str) -> _Recorded:
        """Run it once; raises what `Runner.run` does."""
        files, began = runner.folder / f"{name}.files", time.time()
        noting = RunEnvironment()
        if self.root is not None:
            noting = noting_files(self.root, files, ours=runner.folder)
        run = runner.run(resolved, name, noting)
        return _Recorded(run, files, began)

    def left_before(self, its: _Recorded) -> list[str]:
        """Return the files without git that a run read, or failed for, as it had found them.

        Earlier runs may have left them. The newest comes first.
        """
        read = [use for use in noted(its.files) if use.kind == READ]
        found = [(use.changed, Path(use.path)) for use in read]
        found = [each for each in found if self.root in each[1].parents]
        if its.run.status:
            named = map(Path, _QUOTED.findall("".join(last_lines(its.run, 1))))
            found = [(path.stat().st_mtime_ns, path) for path in named if path.exists()]
        tracked: set[Path] = set()
        if self.root is not None:
            with suppress(*FAILED):
                tracked = {self.root / name for name in names_by_git(self.root, "ls-files", "-z")}
        old = {each for each in found if each[0] / 1e9 < its.began and each[1] not in tracked}
        return [from_here(str(path)) for _, path in sorted(old, reverse=True)]

    def besides(
        self, its: _Recorded, files: Set[str], held: Dependencies | None = None
    ) -> Dependencies:
        """Return what a run depended on besides `files`, and how what is `held` is now."""
        if self.root is None:
            return Dependencies()
        return Dependencies.of(self.root, its.files, its.began, files, held)

    def files_of(self, its: _Recorded, resolved: ResolvedProfile) -> FilesRead:
        """Return the files that a run read; raises `CopyError` where that cannot be known."""
        if self.root is None:
            raise CopyError("git finds no repository here")
        words = [Path(word) for word in self.command]
        origins = (each.to_json()["set_by"] for each in resolved.origins.values())
        profiles = [Path(origin.rpartition(":")[0]) for origin in origins]
        return files_read(self.root, its.files, its.began, [*words, *profiles])


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
    refuse_damaged_files(path, contents)
    Dependencies.from_json(contents, str(path))
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
            its = _Experiment(path, contents, numbers, here, settings, asked, now, runner)
            try:
                who = its.who_changed()
            except (CopyError, ApplyError, ProfileError, TraceError) as error:
                who = Who(UNKNOWN, str(error))
        shutil.rmtree(output, ignore_errors=True)
    return NumbersCheck(settings, kind_of_machine(), torch, len(here.steps), first, who)


def refuse_damaged_files(path: Path, contents: Mapping[str, Any]) -> None:
    """Raise `ProfileError` for files of a lock that are none of its repository."""
    files = contents.get("files", {})
    pairs = files.items() if isinstance(files, dict) else [("", files)]
    for name, blob in pairs:
        inside = not {"", ".", "..", ".git"} & {*name.split("/")} and "\0" not in name
        if not (inside and isinstance(blob, str) and _BLOB.fullmatch(blob)):
            legal = "a path inside of the repository, with 40 hexadecimal digits"
            found = f"{name!r}: {shown(blob)}"
            what, todo = "damaged: no file of a repository", f"lock again: {_LOCK_THEM}"
            raise ProfileError.about(what, str(path), "files", found, legal=legal, todo=todo)


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


CODE, ENVIRONMENT, BOTH, UNKNOWN = "code", "environment", "both", "unknown"
WORDS: Mapping[str, str] = {
    CODE: "your change: the code of the lock gives the lock's numbers here",
    ENVIRONMENT: "the environment: the code of the lock gives other numbers here too",
    BOTH: "both: the code of the lock gives other numbers here, and yours gives others again",
    UNKNOWN: "cannot tell",
}
_OF_PROFILE = ("profile", "asked", "guarantee", "packs", "knobs")
"""Sections that differ where a profile does, and the code of the lock had its own."""

_NOT_HELD = (
    "the lock does not hold all files outside of git, nor the values of variables that are not of "
    "a library that computes"
)
_TRIES = 3  # commits that are run
_LARGEST = 2 * 10**9  # bytes of a recording op by op


@dataclass(frozen=True, slots=True)
class Who:
    who: str  # ``code``, ``environment``, ``both`` or ``unknown``
    why: str = ""  # why nobody can tell
    suspects: tuple[Difference, ...] = ()  # what differs in the environment, the likeliest first
    where: Divergence | None = None
    """The first op that old and new code, both recorded today, compute otherwise."""

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        yield "who", f"{WORDS[self.who]}: {self.why}" if self.why else WORDS[self.who]
        if self.suspects:
            first, *others = map(change, self.suspects)
            then = f" (then: {some(others)})" if others else ""
            is_known = self.who != UNKNOWN
            yield "", f"{first} is the likeliest{then}" if is_known else f"{first} differs{then}"
        if self.where is not None:
            its = self.where
            what = "  ".join(filter(None, (from_here(its.source), its.module, its.op)))
            when = moment(its.step, after_last=its.after_last)
            phase = f"{its.phase} of " if its.phase and when else ""
            yield "where", printable(f"{what}, {phase}{when.removeprefix('at ')}" if when else what)

    def to_json(self) -> dict[str, Any]:
        its = self.where
        names = ("rank", "step", "phase", "module", "op", "source")
        return {
            "who": self.who,
            "why": self.why,
            "suspects": [each.to_json("locked", "here") for each in self.suspects],
            "where": its and {name: getattr(its, name) for name in names},
        }


@dataclass
class _Experiment:
    path: Path
    contents: Mapping[str, Any]
    locked: Numbers
    here: Numbers
    settings: CheckResult
    asked: LockedCommand
    now: _Recorded  # the run that has the numbers `here`
    runner: Runner
    root: Path = field(init=False)
    ignored: tuple[str, ...] = ()  # files that git ignores and that a run needs
    untracked: tuple[str, ...] = ()  # those that the copy of a commit has as well

    def who_changed(self) -> Who:
        """Return who changed the numbers between the lock and now.

        Raises `CopyError`, and what `Runner.run` and `numbers_of` do, where nobody can tell.
        """
        if self.asked.root is None or self.settings.resolved is None:
            raise CopyError("git finds no repository here")
        if self.contents["seal"] != self.contents["true_seal"]:
            raise CopyError("the lock was edited by hand, so its numbers may be those of no run")
        self.root, files = self.asked.root, self.contents.get("files")
        if files is None:
            why = self.contents.get("no_files", "")
            raise CopyError(f"the lock does not name its files: {why}")
        today = self.asked.files_of(self.now, self.settings.resolved)
        self.ignored = today.ignored
        present = blobs_of(self.root, [*files])
        changed = {name for name, blob in files.items() if present.get(name) != blob}
        changed |= today.code.keys() - files.keys()
        absent: set[str] = set()
        for number in range(_TRIES):
            commit = self._commit(files, absent, changed)
            old, extra = self._old_numbers(commit, files, f"old-{number + 1}")
            if first_difference(self.locked, old) is None:
                return Who(CODE, where=self._where(commit, old))
            if not extra:
                break
            absent |= extra  # it is a later commit, which reads more
        else:
            raise CopyError(f"the code of the lock did not read {some(sorted(absent))}")
        if commit:  # files that git does not know may be new, or as old as the lock
            words = ("ls-files", "-o", "--exclude-standard", "-z")
            found = names_by_git(self.root, *words)
            self.untracked = tuple(name for name in found if not is_of_cache(name))
        if self.untracked:
            old, _ = self._old_numbers(commit, files, "old-untracked")
            if first_difference(self.locked, old) is None:
                return Who(CODE, where=self._where(commit, old))
        suspects = self.settings.comparison.having(*ENFORCED)
        if any(name.endswith(SUFFIXES) for name in changed):
            suspects = tuple(each for each in suspects if each.section not in _OF_PROFILE)
        where, who = None, ENVIRONMENT
        if first_difference(self.here, old) is not None:
            where, who = self._where(commit, old), BOTH
        held = Dependencies.from_json(self.contents, str(self.path))
        now = self.asked.besides(self.now, files.keys(), held)
        besides = tuple(held.differing(now, self.root))
        if suspects and not besides and self._comes_from(suspects, commit, files):
            return Who(who, suspects=suspects, where=where)
        again = ", and yours gives others again" if who == BOTH else ""
        why = f"the code of the lock gives other numbers here too{again}"
        if not besides:
            what = (
                "also with the lock's own variables" if suspects else "and nothing differs of the"
            )
            what = what if suspects else f"{what} environment that the lock holds"
            why = f"{why}, {what}; {_NOT_HELD}"
            if held.variables:
                why = f"{why} (the program reads {some(held.variables)})"
        return Who(UNKNOWN, why, (*besides, *suspects), where)

    def _comes_from(
        self, suspects: Sequence[Difference], commit: str, files: Mapping[str, str]
    ) -> bool:
        """Whether the code of the lock has its numbers again without what differs.

        Where that is more than variables, which can be put back, nobody can try.
        """
        for each in suspects:
            is_gone = each.section == "other variables" and each.left is None
            if each.section != "environment" and not is_gone:
                return True
        before = dict(os.environ)
        try:
            for each in suspects:
                os.environ.pop(each.key, None)
                if each.left is not None:
                    os.environ[each.key] = each.left
            old, _ = self._old_numbers(commit, files, "old-variables")
        finally:
            os.environ.clear()
            os.environ.update(before)
        return first_difference(self.locked, old) is None

    def _commit(self, files: Mapping[str, str], absent: Set[str], changed: Set[str]) -> str:
        """Return the commit of the lock; empty where its files were never committed, and are here.

        Raises `CopyError` where there is none of both.
        """
        at = self.contents["repository"].get("commit")
        likely = commits_of_lock(self.root, self.path, self.contents["seal"], at)
        try:
            return commit_with(self.root, files, absent, likely)
        except CopyError:
            if changed or absent:
                raise
            return ""

    def _run(
        self, commit: str, temporary: Path, name: str, whose: str, runner: Runner
    ) -> tuple[Copy, Run, Numbers]:
        """Run the command in a copy of a commit, or of the files as they are without one."""
        copy = Copy.of(self.root, self.asked.folder, temporary, self.runner.folder)
        if commit:
            write_commit(self.root, commit, copy.tree)
        write_files(self.root, self.untracked if commit else files_now(self.root), copy.tree)
        copy.link(self.ignored)
        copy.link_beside(noted(self.now.files))
        resolved = self.settings.resolved
        named = self.contents["named"]
        place = (self.path.parent / named["profile"]).absolute()
        if is_relative_path(named["profile"]) and place.is_relative_to(self.root):
            there = copy.tree / place.relative_to(self.root)
            if there.is_file():  # the profile as it was then
                with chdir(copy.tree):
                    resolved = resolve(str(there), named["overrides"], typed=False)
        runner = replace(runner, command=copy.command(self.asked.command))
        with copy.entered():
            run = runner.run(resolved, name, copy.environment)
        if strayed := copy.strayed():
            raise CopyError(f"{whose} did not stay in its copy: {strayed}")
        if run.status or not run.recorded:
            said = last_lines(run, 1) or ["it says nothing"]
            raise CopyError(f"{whose} cannot run here: {said[0].strip()}")
        return copy, run, numbers_of(run.folder, self.asked.every)

    def _old_numbers(
        self, commit: str, files: Mapping[str, str], name: str
    ) -> tuple[Numbers, set[str]]:
        """Return the numbers of the code of the lock here, and what it read besides its files."""
        self.runner.say("the code of the lock ...")
        with temporary_folder() as temporary:
            copy, _, found = self._run(commit, temporary, name, "the code of the lock", self.runner)
            first: dict[Path, str] = {}
            for use in noted(copy.log):
                if use.kind in (READ, WRITTEN) and Path(use.path).is_relative_to(copy.tree):
                    first.setdefault(Path(use.path).relative_to(copy.tree), use.kind)
        read = [path for path, kind in first.items() if kind == READ]
        ours = [path for path in read if not any(map(path.is_relative_to, copy.linked))]
        return found, {*map(str, ours)} - files.keys()

    def _where(self, commit: str, old: Numbers) -> Divergence | None:
        """Return the first op that old and new code compute otherwise, both recorded op by op.

        Raises `CopyError` where one of them has other numbers in a copy than before.
        """
        first = first_difference(old, self.here)
        if first is None:
            return None
        steps = self.asked.steps
        is_whole = first.what in ("steps", "end")
        if not is_whole:
            begin = max(first.step - 1, steps[0] if steps else 0)
            steps = (begin, first.step)
        request = replace(self.runner.request, level=LEVELS[-1], steps=steps, max_size=_LARGEST)
        runner = replace(self.runner, request=request)
        sides = (("", self.here, "your code"), (commit, old, "the code of the lock"))
        folders = []
        for number, (source, expected, whose) in enumerate(sides, start=1):
            runner.say(f"{whose}, op by op ...")
            with temporary_folder() as temporary:
                copy, run, its = self._run(source, temporary, f"op-by-op-{number}", whose, runner)
            folders.append((run.folder, str(copy.tree)))
            differs = any(each != expected.steps.get(step) for step, each in its.steps.items())
            if differs or (is_whole and first_difference(expected, its)):
                left = self.asked.left_before(self.now)
                such = f" ({some(left)})" if left else ""
                raise CopyError(
                    f"{whose} has other numbers in a second run: they depend on files that runs "
                    f"leave behind{such}, or do not repeat"
                )
        (mine, my_tree), (theirs, their_tree) = folders
        found = compare_within(mine, theirs, None).first
        if found is None:
            return None
        source = found.source.replace(f"{my_tree}/", f"{self.root}/")
        return replace(found, source=source.replace(f"{their_tree}/", "(in the lock) "))


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
        *found.besides.lines,
    )


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
