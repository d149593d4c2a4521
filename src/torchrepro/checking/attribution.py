"""Finds the reason why the results of a command differ from the results in its lock.

The locked code runs once more in the present environment, in a checkout of its commit. If it
reproduces the locked results, the code is the cause. The old and the new code are then recorded,
to find the first op whose results differ. Otherwise something else has changed. The environment is
the cause if it differs from the lock, and all other known dependencies of the run are unchanged.
In all other cases the cause is unknown.
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
from torchrepro.lock.lock_file import CheckResult, is_relative_path
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
from torchrepro.manifest.contents import known_secrets
from torchrepro.profile.load import resolve
from torchrepro.profile.search_path import SUFFIXES
from torchrepro.trace.request import LEVELS, RecordingRequest
from torchrepro.verdict.comparison import compare_within
from torchrepro.verdict.render import moment, relative_location
from torchrepro.verification.copies import Copy, temporary_folder
from torchrepro.verification.perturbations import RunEnvironment, logging_file_uses
from torchrepro.verification.runner import Runner, last_lines

if TYPE_CHECKING:
    from torchrepro.lock.diff import Difference
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Divergence
    from torchrepro.verification.result import Run

_QUOTED = re.compile("'([^']+)'")


class Recorded(NamedTuple):
    run: Run
    files: Path  # the log of the files that the run used, see `file_notes`
    began: float


@dataclass(frozen=True, slots=True)
class LockedCommand:
    """The command of a lock, and the steps whose results the lock contains."""

    command: tuple[str, ...]
    folder: Path  # the working directory
    root: Path | None  # the root of the folder's repository
    steps: tuple[int, int] | None = None
    every: int = 1

    @classmethod
    def here(
        cls, command: Sequence[str], steps: tuple[int, int] | None = None, every: int = 1
    ) -> LockedCommand:
        folder = Path.cwd()
        return cls(tuple(command), folder, repository_root(folder), steps, every)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values for a lock, with ``python`` in place of the interpreter path."""
        words = shareable(self.command, known_secrets())
        folder = self.folder.relative_to(self.root) if self.root else Path()
        return {
            "command": [*(["python"] if is_python(words[0]) else words[:1]), *words[1:]],
            "folder": folder.as_posix(),
            "steps": list(self.steps) if self.steps else None,
            "every": self.every,
        }

    def runner(self, output: Path, say: Any, meanwhile: Any) -> Runner:
        request = RecordingRequest("", LEVELS[0], self.steps)
        return Runner(self.command, output, request, None, say, meanwhile)

    def run(self, runner: Runner, resolved: ResolvedProfile, name: str) -> Recorded:
        """Run and record the command once. Raises the same exceptions as `Runner.run`."""
        files, began = runner.folder / f"{name}.files", time.time()
        noting = RunEnvironment()
        if self.root is not None:
            noting = logging_file_uses(self.root, files, ours=runner.folder)
        run = runner.run(resolved, name, noting)
        return Recorded(run, files, began)

    def left_before(self, recorded: Recorded) -> list[str]:
        """Return untracked files that a run read and that are older than the run, newest first.

        Earlier runs may have created these files. If the run failed, returns the existing files
        that the last line of its output names.
        """
        uses = (use for use in noted(recorded.files) if use.kind == READ)
        paths = [(use.changed, Path(use.path)) for use in uses]
        paths = [(changed, path) for changed, path in paths if self.root in path.parents]
        if recorded.run.status:
            named = map(Path, _QUOTED.findall("".join(last_lines(recorded.run, 1))))
            paths = [(path.stat().st_mtime_ns, path) for path in named if path.exists()]
        tracked: set[Path] = set()
        if self.root is not None:
            with suppress(*FAILED):
                tracked = {self.root / name for name in names_by_git(self.root, "ls-files", "-z")}
        old = {
            (changed, path)
            for changed, path in paths
            if changed / 1e9 < recorded.began and path not in tracked
        }
        return [relative_location(str(path)) for _, path in sorted(old, reverse=True)]

    def dependencies(
        self, recorded: Recorded, files: Set[str], locked: Dependencies | None = None
    ) -> Dependencies:
        """Return the dependencies of a run, and the present state of the dependencies in `locked`.

        Omits the files in `files`.
        """
        root = self.root or Path()
        return Dependencies.of(root, recorded.files, recorded.began, files, locked)

    def files_of(self, recorded: Recorded, resolved: ResolvedProfile) -> FilesRead:
        """Return the files that a run read. Raises `CopyError` if they cannot be determined."""
        if self.root is None:
            raise CopyError("git finds no repository here")
        words = [Path(word) for word in self.command]
        origins = (origin.to_json()["set_by"] for origin in resolved.origins.values())
        profiles = [Path(source.rpartition(":")[0]) for source in origins]
        return files_read(self.root, recorded.files, recorded.began, [*words, *profiles])


CODE, ENVIRONMENT, BOTH, UNKNOWN = "code", "environment", "both", "unknown"
WORDS: Mapping[str, str] = {
    CODE: "your change: the locked code gives the locked results here",
    ENVIRONMENT: "the environment: the locked code gives different results here too",
    BOTH: "both: the locked code gives different results here, and your code differs from both",
    UNKNOWN: "cannot tell",
}
_OF_PROFILE = ("profile", "asked", "guarantee", "packs", "knobs")
"""Sections that differ only because the profile differs: the locked code ran with its own."""

_NOT_LOCKED = (
    "the lock does not record all files outside of git, and variable values only for numerical "
    "libraries"
)
_LARGEST = 2 * 10**9  # bytes of a recording op by op


@dataclass(frozen=True, slots=True)
class Who:
    """The reason why the results of a run differ from the results in a lock."""

    who: str  # ``code``, ``environment``, ``both`` or ``unknown``
    why: str = ""  # why the cause is unknown
    suspects: tuple[Difference, ...] = ()  # differences of the environment, the likeliest first
    where: Divergence | None = None
    """The first op whose results differ between old and new code, both recorded today."""

    @property
    def rows(self) -> Iterator[tuple[str, str]]:
        yield "cause", f"{WORDS[self.who]}: {self.why}" if self.why else WORDS[self.who]
        if self.suspects:
            likeliest, *further = map(change, self.suspects)
            then = f" (then: {some(further)})" if further else ""
            verb = "differs" if self.who == UNKNOWN else "is the likeliest"
            yield "", f"{likeliest} {verb}{then}"
        if self.where is not None:
            divergence = self.where
            source = relative_location(divergence.source)
            text = "  ".join(filter(None, (source, divergence.module, divergence.op)))
            if when := moment(divergence.step, after_last=divergence.after_last):
                phase = f"{divergence.phase} of " if divergence.phase else ""
                text = f"{text}, {phase}{when.removeprefix('at ')}"
            yield "where", printable(text)

    def to_json(self) -> dict[str, Any]:
        divergence = self.where
        names = ("rank", "step", "phase", "module", "op", "source")
        return {
            "who": self.who,
            "why": self.why,
            "suspects": [suspect.to_json("locked", "here") for suspect in self.suspects],
            "where": divergence and {name: getattr(divergence, name) for name in names},
        }


@dataclass
class Experiment:
    """An experiment that runs the locked code, to find out why a run differs from its lock."""

    path: Path  # the path of the lock
    contents: Mapping[str, Any]
    locked: Numbers
    here: Numbers
    settings: CheckResult
    asked: LockedCommand
    now: Recorded  # the run with the results `here`
    runner: Runner
    root: Path = field(init=False)
    ignored: tuple[str, ...] = ()  # files that git ignores and that a run reads
    untracked: tuple[str, ...] = ()  # untracked files, which are added to the checkout

    def who_changed(self) -> Who:
        """Return the reason why the results of the run differ from the lock.

        Raises `CopyError` if it cannot be found. Also raises as `Runner.run` and `numbers_of` do.
        """
        if self.asked.root is None or self.settings.resolved is None:
            raise CopyError("git finds no repository here")
        if self.contents["seal"] != self.contents["true_seal"]:
            raise CopyError("the lock was edited by hand, so its results may not be from a run")
        self.root, files = self.asked.root, self.contents.get("files")
        if files is None:
            why = self.contents.get("no_files", "")
            raise CopyError(f"the lock does not list its files: {why}")
        today = self.asked.files_of(self.now, self.settings.resolved)
        self.ignored = today.ignored
        present = blobs_of(self.root, [*files])
        changed = {name for name, blob in files.items() if present.get(name) != blob}
        changed |= today.code.keys() - files.keys()
        commit = self._commit(files, is_unchanged=not changed)
        old, extra = self._old_numbers(commit, files, "old")
        if first_difference(self.locked, old) is None:
            return Who(CODE, where=self._where(commit, old))
        if extra:  # `commit` may be later than the lock, and read more files
            raise CopyError(f"the locked code did not read {some(sorted(extra))}")
        if commit:  # the locked run may have used files that are untracked
            with suppress(*FAILED):
                names = names_by_git(self.root, "ls-files", "-o", "--exclude-standard", "-z")
                self.untracked = tuple(name for name in names if not is_of_cache(name))
        if self.untracked:
            old, _ = self._old_numbers(commit, files, "old-untracked")
            if first_difference(self.locked, old) is None:
                return Who(CODE, where=self._where(commit, old))
        suspects = self.settings.comparison.having(*ENFORCED)
        if any(name.endswith(SUFFIXES) for name in changed):
            suspects = tuple(it for it in suspects if it.section not in _OF_PROFILE)
        where, who = None, ENVIRONMENT
        if first_difference(self.here, old) is not None:
            where, who = self._where(commit, old), BOTH
        locked = Dependencies.held_by(self.contents)
        now = self.asked.dependencies(self.now, files.keys(), locked)
        changed_dependencies = tuple(locked.differing(now, self.root))
        environment_alone = suspects and not changed_dependencies
        if environment_alone and self._explain(suspects, commit, files, locked):
            return Who(who, suspects=suspects, where=where)
        why = "the locked code gives different results here too"
        if who == BOTH:
            why = f"{why}, and your code differs from both"
        if not changed_dependencies:
            known = "nothing that the lock records differs"
            if suspects:
                known = "the differences of the environment may not be the cause"
            reads = f"; the program reads {some(locked.variables)}" if locked.variables else ""
            why = f"{why}, and {known}; {_NOT_LOCKED}{reads}"
        return Who(UNKNOWN, why, (*changed_dependencies, *suspects), where)

    def _explain(
        self,
        suspects: Sequence[Difference],
        commit: str,
        files: Mapping[str, str],
        locked: Dependencies,
    ) -> bool:
        """Return whether the differences in `suspects` explain the changed results.

        If all are variables whose old values are known, the locked code runs again with these
        values, and has to give the locked results. Other differences cannot be reverted. They
        explain the changed results if one of them is known to change results, or if the locked run
        read no variable that was set.
        """
        reverted = [it.left if it.section == "environment" else None for it in suspects]
        sections = {suspect.section for suspect in suspects}
        only_variables = sections <= {"environment", "other variables"}
        if not only_variables or reverted != [suspect.left for suspect in suspects]:
            changes = any(suspect.impact is Impact.CHANGES for suspect in suspects)
            return changes or "set" not in locked.variables.values()
        before = dict(os.environ)
        try:
            for suspect in suspects:
                os.environ.pop(suspect.key, None)
                if suspect.left is not None:
                    os.environ[suspect.key] = suspect.left
            old, _ = self._old_numbers(commit, files, "old-variables")
        finally:
            os.environ.clear()
            os.environ.update(before)
        return first_difference(self.locked, old) is None

    def _commit(self, files: Mapping[str, str], *, is_unchanged: bool) -> str:
        """Return a commit that contains the locked `files`.

        Without such a commit, returns an empty string if the files are unchanged since the lock.
        Raises `CopyError` if they have changed.
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
        self, commit: str, temporary: Path, name: str, code: str, runner: Runner
    ) -> tuple[Copy, Run, Numbers]:
        """Run the command in a checkout of `commit`, or of today's files if `commit` is empty.

        Raises `CopyError` if the run fails or leaves the checkout. Messages call the code `code`.
        """
        copy = Copy.of(self.root, self.asked.folder, temporary, self.runner.folder)
        if commit:
            write_commit(self.root, commit, copy.tree)
        write_files(self.root, self.untracked if commit else files_now(self.root), copy.tree)
        copy.link(self.ignored)
        copy.link_beside(noted(self.now.files))
        resolved = self.settings.resolved
        named = self.contents["named"]
        profile = (self.path.parent / named["profile"]).absolute()
        if is_relative_path(named["profile"]) and profile.is_relative_to(self.root):
            old_profile = copy.tree / profile.relative_to(self.root)
            if old_profile.is_file():
                with chdir(copy.tree):
                    resolved = resolve(str(old_profile), named["overrides"], typed=False)
        runner = replace(runner, command=copy.command(self.asked.command))
        with copy.entered():
            run = runner.run(resolved, name, copy.environment)
        if strayed := copy.strayed():
            raise CopyError(f"{code} did not stay in its checkout: {strayed}")
        if run.status or not run.recorded:
            output = last_lines(run, 1) or ["it printed nothing"]
            raise CopyError(f"{code} cannot run here: {output[0].strip()}")
        return copy, run, numbers_of(run.folder, self.asked.every)

    def _old_numbers(
        self, commit: str, files: Mapping[str, str], name: str
    ) -> tuple[Numbers, set[str]]:
        """Return today's results of the locked code, and files it read that are not locked."""
        self.runner.say("the locked code ...")
        with temporary_folder() as temporary:
            copy, _, numbers = self._run(commit, temporary, name, "the locked code", self.runner)
            first_uses: dict[Path, str] = {}
            for use in noted(copy.log):
                if use.kind in (READ, WRITTEN) and Path(use.path).is_relative_to(copy.tree):
                    first_uses.setdefault(Path(use.path).relative_to(copy.tree), use.kind)
        read = [path for path, use in first_uses.items() if use == READ]
        not_linked = [path for path in read if not any(map(path.is_relative_to, copy.linked))]
        return numbers, {*map(str, not_linked)} - files.keys()

    def _where(self, commit: str, old: Numbers) -> Divergence | None:
        """Return the first op whose results differ between the old and the new code.

        Both run again, recorded op by op. Raises `CopyError` if one does not repeat its results.
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
        variants = (("", self.here, "your code"), (commit, old, "the locked code"))
        folders = []
        for number, (source, expected, code) in enumerate(variants, start=1):
            runner.say(f"{code}, op by op ...")
            with temporary_folder() as temporary:
                name = f"op-by-op-{number}"
                copy, run, numbers = self._run(source, temporary, name, code, runner)
            folders.append((run.folder, str(copy.tree)))
            differs = any(row != expected.steps.get(step) for step, row in numbers.steps.items())
            if differs or (is_whole and first_difference(expected, numbers)):
                left = self.asked.left_before(self.now)
                names = f" ({some(left)})" if left else ""
                raise CopyError(
                    f"a second run of {code} gives different results: they depend on files that "
                    f"runs leave behind{names}, or do not repeat"
                )
        (new_run, new_tree), (old_run, old_tree) = folders
        divergence = compare_within(new_run, old_run, None).first
        if divergence is None:
            return None
        source = divergence.source.replace(f"{new_tree}/", f"{self.root}/")
        return replace(divergence, source=source.replace(f"{old_tree}/", "(in the lock) "))
