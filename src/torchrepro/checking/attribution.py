"""Who changed the numbers of a command, between a lock and now.

That is found out by experiment. The code of the lock runs in today's environment, in a copy of
its commit. Where it has the numbers of the lock, the change is in the code: old and new code, both
recorded today, show where. Where it has other numbers, something besides the code has changed. That
is the environment only where what the lock holds of it differs, and nothing else that the run
depended on is known to differ; otherwise nobody can tell.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import chdir, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.application.launch import is_python
from torchrepro.checking.dependencies import Dependencies
from torchrepro.ground.messages import printable, some
from torchrepro.ground.redaction import shareable
from torchrepro.lock.diff import ENFORCED, Impact, change
from torchrepro.lock.file_notes import READ, WRITTEN, is_of_cache, noted
from torchrepro.lock.lock_file import (
    CheckResult,
    is_relative_path,
)
from torchrepro.lock.locked_results import Numbers, first_difference, numbers_of
from torchrepro.lock.repository import (
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
from torchrepro.manifest.contents import (
    secrets_here,
)
from torchrepro.profile.load import resolve
from torchrepro.profile.search_path import SUFFIXES
from torchrepro.trace.request import LEVELS, RecordingRequest
from torchrepro.verdict.comparison import compare_within
from torchrepro.verdict.render import from_here, moment
from torchrepro.verification.copies import Copy, temporary_folder
from torchrepro.verification.perturbations import RunEnvironment, noting_files
from torchrepro.verification.runner import Runner, last_lines

if TYPE_CHECKING:
    from torchrepro.lock.diff import Difference
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Divergence
    from torchrepro.verification.result import Run

_QUOTED = re.compile("'([^']+)'")


class Recorded(NamedTuple):
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
        request = RecordingRequest("", LEVELS[0], self.steps)
        return Runner(self.command, output, request, None, say, meanwhile)

    def run(self, runner: Runner, resolved: ResolvedProfile, name: str) -> Recorded:
        """Run it once; raises what `Runner.run` does."""
        files, began = runner.folder / f"{name}.files", time.time()
        noting = RunEnvironment()
        if self.root is not None:
            noting = noting_files(self.root, files, ours=runner.folder)
        run = runner.run(resolved, name, noting)
        return Recorded(run, files, began)

    def left_before(self, its: Recorded) -> list[str]:
        """Return the files without git that a run read, or failed for, as it had found them.

        Earlier runs may have left them. The newest comes first.
        """
        found = [(use.changed, Path(use.path)) for use in noted(its.files) if use.kind == READ]
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
        self, its: Recorded, files: Set[str], held: Dependencies | None = None
    ) -> Dependencies:
        """Return what a run depended on besides `files`, and how what is `held` is now."""
        return Dependencies.of(self.root or Path(), its.files, its.began, files, held)

    def files_of(self, its: Recorded, resolved: ResolvedProfile) -> FilesRead:
        """Return the files that a run read; raises `CopyError` where that cannot be known."""
        if self.root is None:
            raise CopyError("git finds no repository here")
        words = [Path(word) for word in self.command]
        origins = (each.to_json()["set_by"] for each in resolved.origins.values())
        profiles = [Path(origin.rpartition(":")[0]) for origin in origins]
        return files_read(self.root, its.files, its.began, [*words, *profiles])


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
class Experiment:
    path: Path
    contents: Mapping[str, Any]
    locked: Numbers
    here: Numbers
    settings: CheckResult
    asked: LockedCommand
    now: Recorded  # the run that has the numbers `here`
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
        commit = self._commit(files, is_unchanged=not changed)
        old, extra = self._old_numbers(commit, files, "old")
        if first_difference(self.locked, old) is None:
            return Who(CODE, where=self._where(commit, old))
        if extra:  # it is a later commit, which reads more
            raise CopyError(f"the code of the lock did not read {some(sorted(extra))}")
        if commit:  # files that git does not know may be new, or as old as the lock
            with suppress(*FAILED):
                found = names_by_git(self.root, "ls-files", "-o", "--exclude-standard", "-z")
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
        held = Dependencies.held_by(self.contents)
        now = self.asked.besides(self.now, files.keys(), held)
        besides = tuple(held.differing(now, self.root))
        if suspects and not besides and self._comes_from(suspects, commit, files, held):
            return Who(who, suspects=suspects, where=where)
        why = "the code of the lock gives other numbers here too"
        if who == BOTH:
            why = f"{why}, and yours gives others again"
        if not besides:
            what = "nothing that the lock holds differs"
            if suspects:
                what = "what differs of the environment need not be why"
            reads = f"; the program reads {some(held.variables)}" if held.variables else ""
            why = f"{why}, and {what}; {_NOT_HELD}{reads}"
        return Who(UNKNOWN, why, (*besides, *suspects), where)

    def _comes_from(
        self,
        suspects: Sequence[Difference],
        commit: str,
        files: Mapping[str, str],
        held: Dependencies,
    ) -> bool:
        """Whether the code of the lock has its numbers again once variables are put back.

        Where more than those differs nobody can try: it is what changes numbers, or, where the
        program reads no variable of its own, what may change them.
        """
        values = [each.left if each.section == "environment" else None for each in suspects]
        of_variables = {"environment", "other variables"}.issuperset(e.section for e in suspects)
        if not of_variables or values != [each.left for each in suspects]:
            changes = any(each.impact is Impact.CHANGES for each in suspects)
            return changes or "set" not in held.variables.values()
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

    def _commit(self, files: Mapping[str, str], *, is_unchanged: bool) -> str:
        """Return the commit of the lock; empty where its files were never committed, and are here.

        Raises `CopyError` where there is none of both.
        """
        at = self.contents["repository"].get("commit")
        likely = commits_of_lock(self.root, self.path, self.contents["seal"], at)
        try:
            return commit_with(self.root, files, likely)
        except CopyError:
            if is_unchanged:
                return ""
            raise

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
