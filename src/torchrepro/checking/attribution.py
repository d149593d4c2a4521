"""Runs the locked code, and the code of today, to fill the table from which a cause is decided.

`check` imports this module only for results that differ from a lock. The locked code runs in the
present environment, in a checkout of its commit. If it is the cause, both codes are also recorded
op by op, to find the first op whose results differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import chdir, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchrepro.checking import causes
from torchrepro.checking.causes import Cell, Table, Who
from torchrepro.checking.locked_command import Dependencies, files_read
from torchrepro.ground.errors import ApplyError, ProfileError, TraceError, some
from torchrepro.ground.patching import set_variable, variables_restored
from torchrepro.lock import repository
from torchrepro.lock.diff import ENFORCED
from torchrepro.lock.file_notes import READ, first_uses, is_of_cache, noted
from torchrepro.lock.lock_file import is_relative_path
from torchrepro.lock.locked_results import Numbers, first_difference, numbers_of
from torchrepro.lock.repository import FAILED, CopyError, names_by_git
from torchrepro.profile.load import resolve
from torchrepro.profile.search_path import SUFFIXES
from torchrepro.trace.request import LEVELS
from torchrepro.verdict.comparison import compare_within
from torchrepro.verification.copies import Copy, temporary_folder
from torchrepro.verification.runner import Runner, last_lines

if TYPE_CHECKING:
    from torchrepro.checking.locked_command import RecordedRun, ResultsLock
    from torchrepro.lock.lock_file import CheckResult
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Divergence

_OF_PROFILE = ("profile", "asked", "guarantee", "packs", "knobs")
"""Sections that differ only because the profile differs: the locked code ran with its own."""

_LARGEST = 2 * 10**9  # bytes of a recording op by op


def who_changed(
    lock: ResultsLock, now: RecordedRun, numbers: Numbers, settings: CheckResult, runner: Runner
) -> Who:
    """Return the reason why the results `numbers` of the run `now` differ from the lock.

    `settings` are the differences of settings between the lock and this machine.
    """
    try:
        checkouts = Checkouts.of(lock, now, runner)
        table = checkouts.filled_table(numbers, settings)
        return replace(causes.cause(table), where=checkouts.first_divergence(table))
    except (CopyError, ApplyError, ProfileError, TraceError) as error:
        return Who(causes.UNKNOWN, str(error))


class CellRun(NamedTuple):
    """A run of the command in a checkout, which has been removed since."""

    numbers: Numbers
    folder: str  # of its traces
    tree: Path  # the removed checkout
    not_locked: set[str]  # files of the checkout that it read and that the lock does not list


@dataclass(frozen=True, slots=True)
class Checkouts:
    """Runs the command of a lock in checkouts, each with the code and environment of one cell."""

    lock: ResultsLock
    now: RecordedRun  # the run whose results differ from the lock
    runner: Runner
    root: Path
    changed: set[str]  # files that differ from the lock
    commit: str  # a commit with the locked code; empty if today's files are the locked code
    ignored: tuple[str, ...]  # files that git ignores and that the run read
    untracked: tuple[str, ...]  # untracked files of today; empty without a commit

    @classmethod
    def of(cls, lock: ResultsLock, now: RecordedRun, runner: Runner) -> Checkouts:
        """Find the locked code. Raises `CopyError` with the reason if that is impossible."""
        root, contents = lock.asked.root, lock.contents
        if root is None:
            raise CopyError("git finds no repository here")
        if contents["seal"] != contents["true_seal"]:
            raise CopyError("the lock was edited by hand, so its results may not be from a run")
        files = contents.get("files")
        if files is None:
            why = contents.get("no_files", "")
            raise CopyError(f"the lock does not list its files: {why}")
        today = files_read(now)
        present = repository.blobs_of(root, files)
        changed = {name for name, blob in files.items() if present.get(name) != blob}
        changed |= today.code.keys() - files.keys()
        commit, untracked = "", list[str]()
        at = contents["repository"].get("commit")
        likely = repository.commits_of_lock(root, lock.path, contents["seal"], at)
        try:
            commit = repository.commit_with(root, files, likely)
            with suppress(*FAILED):
                untracked = names_by_git(root, "ls-files", "-o", "--exclude-standard", "-z")
        except CopyError:
            if changed:
                raise
        used = tuple(name for name in untracked if not is_of_cache(name))
        return cls(lock, now, runner, root, changed, commit, today.ignored, used)

    def filled_table(self, numbers: Numbers, settings: CheckResult) -> Table:
        """Return the differences from the lock, and the results of each cell that matters.

        Raises the same exceptions as `run`.
        """
        suspects = settings.comparison.having(*ENFORCED)
        if any(name.endswith(SUFFIXES) for name in self.changed):
            suspects = tuple(it for it in suspects if it.section not in _OF_PROFILE)
        locked = Dependencies.held_by(self.lock.contents)
        results = {causes.LOCK: self.lock.numbers, causes.HERE: numbers}
        table = Table(results, bool(self.untracked), suspects, locked.variables)
        while (cell := causes.next_cell(table)) is not None:
            self.runner.say(f"{cell.code} ...")
            run = self.run(cell, table.old_variables if cell == causes.OLD_VARIABLES else {})
            results[cell] = run.numbers
            if cell == causes.OLD and not table.agree(causes.LOCK, causes.OLD):
                if run.not_locked:  # `commit` may be later than the lock, and read more files
                    names = some(sorted(run.not_locked))
                    raise CopyError(f"the locked code did not read {names}")
                files = self.lock.contents["files"].keys()
                present = Dependencies.of(self.now, files, locked)
                table.dependencies = tuple(locked.differing(present, self.root))
        return table

    def run(self, cell: Cell, variables: Mapping[str, str | None]) -> CellRun:
        """Run the command with the code of a cell, under today's environment and `variables`.

        Raises `CopyError` if the run fails or leaves the checkout. Also raises as `Runner.run`
        and `numbers_of` do.
        """
        asked = self.lock.asked
        with variables_restored(), temporary_folder() as temporary:
            for name, text in variables.items():
                set_variable(name, text)
            copy = Copy.of(self.root, asked.folder, temporary, self.runner.folder)
            names: Iterable[str] = self.untracked if cell.with_untracked else ()
            if self.commit and cell.code == causes.LOCKED_CODE:
                repository.write_commit(self.root, self.commit, copy.tree)
            else:
                names = repository.files_now(self.root)
            repository.write_files(self.root, names, copy.tree)
            copy.link(self.ignored)
            copy.link_beside(self.now.uses)
            resolved = self._profile_in(copy)
            with copy.entered(self.runner) as runner:
                run = runner.run(resolved, cell.name)
            if strayed := runner.strayed():
                raise CopyError(f"{cell.code} did not stay in its checkout: {strayed}")
            if run.status or not run.recorded:
                output = last_lines(run, 1) or ["it printed nothing"]
                raise CopyError(f"{cell.code} cannot run here: {output[0].strip()}")
            read = self._read_in(copy)
        return CellRun(numbers_of(run.folder, asked.every), run.folder, copy.tree, read)

    def _profile_in(self, copy: Copy) -> ResolvedProfile:
        """Return the profile as a checkout has it, or as today if it is not in the checkout."""
        named = self.lock.contents["named"]
        profile = (self.lock.path.parent / named["profile"]).absolute()
        if is_relative_path(named["profile"]) and profile.is_relative_to(self.root):
            old_profile = copy.tree / profile.relative_to(self.root)
            if old_profile.is_file():
                with chdir(copy.tree):
                    return resolve(str(old_profile), named["overrides"], typed=False)
        return self.lock.resolved

    def _read_in(self, copy: Copy) -> set[str]:
        """Return the files of a checkout that a run read before it wrote them, if not locked."""
        uses = first_uses(noted(copy.log)).items()
        paths = [Path(name) for name, by_kind in uses if next(iter(by_kind)) == READ]
        read = [path.relative_to(copy.tree) for path in paths if copy.tree in path.parents]
        not_linked = {str(path) for path in read if not any(map(path.is_relative_to, copy.linked))}
        return not_linked.difference(self.lock.contents["files"])

    def first_divergence(self, table: Table) -> Divergence | None:
        """Return the first op whose results differ between the old and the new code.

        Both run again, recorded op by op. Raises `CopyError` if one does not repeat its results.
        """
        first = first_difference(table.results[table.old], table.results[causes.HERE])
        if first is None:
            return None
        steps = self.lock.asked.steps
        is_whole = first.what in ("steps", "end")
        if not is_whole:
            begin = max(first.step - 1, steps[0] if steps else 0)
            steps = (begin, first.step)
        request = replace(self.runner.request, level=LEVELS[-1], steps=steps, max_size=_LARGEST)
        recorded = replace(self, runner=replace(self.runner, request=request))
        runs = []
        for number, cell in enumerate((causes.HERE, table.old), start=1):
            self.runner.say(f"{cell.code}, op by op ...")
            run = recorded.run(cell._replace(name=f"op-by-op-{number}"), {})
            expected = table.results[cell]
            differs = any(row != expected.steps.get(at) for at, row in run.numbers.steps.items())
            if differs or (is_whole and first_difference(expected, run.numbers)):
                left = self.now.left_before()
                names = f" ({some(left)})" if left else ""
                raise CopyError(
                    f"a second run of {cell.code} gives different results: they depend on files "
                    f"that runs leave behind{names}, or do not repeat"
                )
            runs.append(run)
        new, old = runs
        divergence = compare_within(new.folder, old.folder, None).first
        if divergence is None:
            return None
        source = divergence.source.replace(f"{new.tree}/", f"{self.root}/")
        return replace(divergence, source=source.replace(f"{old.tree}/", "(in the lock) "))
