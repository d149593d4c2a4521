"""Who changed the numbers of a lock: the code, the environment, or both; by experiment.

The code of the lock runs in today's environment, in a copy of its commit. Where it has the numbers
of the lock, the change is in the code: old and new code, both recorded today, show where. Where it
has today's numbers, the change is in the environment. All else is both, or nobody can tell.
"""

from __future__ import annotations

from collections import deque
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ApplyError, ProfileError, TraceError
from torchrepro.lock.diff import ENFORCED, change
from torchrepro.lock.lock_file import is_relative_path
from torchrepro.lock.numbers import first_difference, numbers_of
from torchrepro.messages import printable, some
from torchrepro.profile.load import resolve
from torchrepro.trace.request import LEVELS
from torchrepro.verdict.comparison import compare_within
from torchrepro.verdict.render import from_here, moment
from torchrepro.verification.copies import (
    Copy,
    CopyError,
    files_now,
    temporary_folder,
    write_commit,
    write_files,
)
from torchrepro.verification.file_notes import READ, WRITTEN, noted
from torchrepro.verification.repository_files import blobs_of, commit_with

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torchrepro.lock.diff import Difference
    from torchrepro.lock.lock_file import CheckResult
    from torchrepro.lock.numbers import Numbers
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Divergence
    from torchrepro.verification.locked_command import LockedCommand, Recorded
    from torchrepro.verification.repository_files import FilesRead
    from torchrepro.verification.runner import Runner

CODE, ENVIRONMENT, BOTH, UNKNOWN = "code", "environment", "both", "unknown"
WORDS: Mapping[str, str] = {
    CODE: "your change: the code of the lock gives the lock's numbers here",
    ENVIRONMENT: "the environment: the code of the lock gives other numbers here too",
    BOTH: "both: the code of the lock gives other numbers here, and yours gives others again",
    UNKNOWN: "cannot tell",
}
_TRIES = 3  # commits that are run
_LARGEST = 2 * 10**9  # bytes of a recording op by op


@dataclass(frozen=True, slots=True)
class Who:
    """Who changed the numbers of a lock."""

    who: str
    """``code``, ``environment``, ``both`` or ``unknown``."""
    why: str = ""
    """Why nobody can tell."""
    suspects: tuple[Difference, ...] = ()
    """What differs in the environment, the likeliest first."""
    where: Divergence | None = None
    """The first op that old and new code, both recorded today, compute otherwise."""

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        """The lines that say it, each with its label."""
        yield "who", f"{WORDS[self.who]}: {self.why}" if self.why else WORDS[self.who]
        if self.who in (ENVIRONMENT, BOTH):
            first, *others = [*map(change, self.suspects)] or [""]
            then = f" (then: {some(others)})" if others else ""
            yield "", f"{first} is the likeliest{then}" if first else "nothing in the lock differs"
        if self.where is not None:
            its = self.where
            what = "  ".join(filter(None, (from_here(its.source), its.module, its.op)))
            when = moment(its.step, after_last=its.after_last)
            phase = f"{its.phase} of " if its.phase and when else ""
            yield "where", printable(f"{what}, {phase}{when.removeprefix('at ')}" if when else what)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        its = self.where
        names = ("rank", "step", "phase", "module", "op", "source")
        return {
            "who": self.who,
            "why": self.why,
            "suspects": [each.to_json("locked", "here") for each in self.suspects],
            "where": its and {name: getattr(its, name) for name in names},
        }


@dataclass(frozen=True, slots=True)
class Locked:
    """A lock, and a run that has other numbers."""

    path: Path
    contents: Mapping[str, Any]
    numbers: Numbers
    here: Numbers
    """Those of the run."""
    settings: CheckResult

    @property
    def suspects(self) -> tuple[Difference, ...]:
        """What differs in the environment that may change numbers."""
        found = self.settings.comparison.having(*ENFORCED)
        return tuple(each for each in found if not each.key.startswith("seal"))


def who_changed(locked: Locked, asked: LockedCommand, now: Recorded, runner: Runner) -> Who:
    """Return who changed the numbers between the lock and the run `now`; raises `Interrupted`."""
    try:
        return _found_out(locked, asked, now, runner)
    except (CopyError, ApplyError, ProfileError, TraceError) as error:
        return Who(UNKNOWN, str(error))


def _found_out(locked: Locked, asked: LockedCommand, now: Recorded, runner: Runner) -> Who:
    resolved, root = locked.settings.resolved, asked.root
    if root is None or resolved is None:
        raise CopyError("git finds no repository here")
    files = locked.contents.get("files")
    if not isinstance(files, dict):
        raise CopyError(f"the lock does not name its files: {locked.contents.get('no_files', '')}")
    today = asked.files_of(now, resolved)
    experiment = _Experiment(locked, asked, runner, root, today)
    absent: set[str] = set()
    for number in range(_TRIES):
        commit = ""
        unchanged = blobs_of(root, [*files]) == files and today.code.keys() <= files.keys()
        if absent or not unchanged:
            commit = commit_with(root, files, absent)
        old, extra = experiment.old_numbers(commit, files, f"old-{number + 1}")
        if first_difference(locked.numbers, old) is None:
            return Who(CODE, where=experiment.where(commit, old))
        if not extra:
            break
        absent |= extra  # it is a later commit, which reads more
    else:
        raise CopyError(f"the code of the lock did not read {some(sorted(absent))}")
    if first_difference(locked.here, old) is None:
        return Who(ENVIRONMENT, suspects=locked.suspects)
    return Who(BOTH, suspects=locked.suspects, where=experiment.where(commit, old))


@dataclass(frozen=True, slots=True)
class _Experiment:
    locked: Locked
    asked: LockedCommand
    runner: Runner
    root: Path
    today: FilesRead

    def _copy(self, commit: str, temporary: Path) -> Copy:
        """Make a copy of a commit, or of the files as they are where none is named."""
        copy = Copy.of(self.root, self.asked.folder, temporary)
        if commit:
            write_commit(self.root, commit, copy.tree)
        else:
            write_files(self.root, files_now(self.root), copy.tree)
        copy.link(self.today.ignored)
        return copy

    def _run(self, copy: Copy, name: str, runner: Runner, whose: str) -> tuple[str, Numbers]:
        """Run the command in a copy; returns the folder of the recording and its numbers."""
        resolved = self._profile(copy)
        runner = replace(runner, command=copy.command(self.asked.command))
        with copy.entered():
            run = runner.run(resolved, name, copy.environment)
        if run.status or not run.recorded:
            with open(run.log, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
                said = deque(file, 1)
            words = printable(said[0].strip()) if said else "it says nothing"
            raise CopyError(f"{whose} cannot run here: {words}")
        if strayed := copy.strayed():
            raise CopyError(f"{whose} did not stay in its copy: {strayed}")
        return run.folder, numbers_of(run.folder, self.asked.every)

    def _profile(self, copy: Copy) -> ResolvedProfile:
        """Return the profile as it is in a copy, or as it is here where the copy has none."""
        resolved = self.locked.settings.resolved
        if resolved is None:
            raise CopyError("the profile of the lock cannot be put in force")
        named = self.locked.contents["named"]
        place = (self.locked.path.parent / named["profile"]).absolute()
        if not (is_relative_path(named["profile"]) and place.is_relative_to(self.root)):
            return resolved
        there = copy.tree / place.relative_to(self.root)
        if not there.is_file():
            return resolved
        with chdir(copy.tree):
            return resolve(str(there), named["overrides"], typed=False)

    def old_numbers(
        self, commit: str, files: Mapping[str, str], name: str
    ) -> tuple[Numbers, set[str]]:
        """Return the numbers of the code of the lock here, and what it read besides its files."""
        self.runner.say("the code of the lock ...")
        with temporary_folder() as temporary:
            copy = self._copy(commit, temporary)
            _, found = self._run(copy, name, self.runner, "the code of the lock")
            first: dict[str, str] = {}
            for use in noted(copy.log):
                if use.kind in (READ, WRITTEN) and Path(use.path).is_relative_to(copy.tree):
                    first.setdefault(str(Path(use.path).relative_to(copy.tree)), use.kind)
            read = {each for each, kind in first.items() if kind == READ}
            linked = tuple(copy.linked)
            extra = {
                each
                for each in read - files.keys()
                if not any(each == name or each.startswith(f"{name}/") for name in linked)
            }
        return found, extra

    def where(self, commit: str, old: Numbers) -> Divergence | None:
        """Return the first op that old and new code compute otherwise, both recorded op by op.

        Raises `CopyError` where one of them has other numbers in a copy than before.
        """
        first = first_difference(old, self.locked.here)
        if first is None:
            return None
        near = None if first.what in ("steps", "end") else (max(first.step - 1, 0), first.step)
        steps = (near and self._within(near)) or self.asked.steps
        request = self.runner.request
        request = replace(request, level=LEVELS[-1], steps=steps, max_size=_LARGEST)
        runner = replace(self.runner, request=request)
        sides = (("", self.locked.here, "your code"), (commit, old, "the code of the lock"))
        folders = []
        for number, (source, expected, whose) in enumerate(sides, start=1):
            runner.say(f"{whose}, op by op ...")
            with temporary_folder() as temporary:
                copy = self._copy(source, temporary)
                folder, found = self._run(copy, f"op-by-op-{number}", runner, whose)
                folders.append((folder, str(copy.tree)))
            if any(its != expected.steps.get(step) for step, its in found.steps.items()):
                raise CopyError(
                    f"{whose} has other numbers in a second run: they depend on files that runs "
                    "leave behind, or do not repeat"
                )
        (mine, my_tree), (theirs, their_tree) = folders
        found_first = compare_within(mine, theirs, None).first
        if found_first is None:
            return None
        source = found_first.source.replace(f"{my_tree}/", f"{self.root}/")
        return replace(found_first, source=source.replace(f"{their_tree}/", "(in the lock) "))

    def _within(self, steps: tuple[int, int]) -> tuple[int, int]:
        asked = self.asked.steps
        return (max(steps[0], asked[0]), steps[1]) if asked else steps
