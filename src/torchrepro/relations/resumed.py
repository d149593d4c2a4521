"""Whether a run that was killed and resumed from its checkpoint goes on as the whole run does.

Each run is in a fresh copy of the repository, so that none finds another one's checkpoint.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from subprocess import SubprocessError
from typing import TYPE_CHECKING, Any

from torchrepro.errors import TraceError
from torchrepro.manifest.environment import git
from torchrepro.messages import size as in_units
from torchrepro.relations.checkpoint_watch import settles
from torchrepro.relations.lost_state import State, began_anew, not_restored, step_restored
from torchrepro.relations.related import Side, words_of
from torchrepro.verdict.comparison import compare_from
from torchrepro.verdict.value import Advice, Divergence, Kind
from torchrepro.verification.copies import (
    Copy,
    CopyError,
    files_now,
    is_of_environment,
    repositories,
    repository_root,
    temporary_folder,
    write_files,
)
from torchrepro.verification.file_notes import LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.relations.experiment import Experiment
    from torchrepro.trace.request import Request
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.result import Run

LARGE = 1 << 26
"""Bytes of a file above which it is linked, not copied."""

MOST = 4 << 30
"""Bytes of all files that are copied above which nothing is."""

BUDGET = 1 << 30
"""Bytes of ignored files that the first copy has as files of its own."""

MANY = 20_000
"""Files of an ignored folder above which it is linked as one."""

NAME_ONE = "name its files: --checkpoint GLOB"
RESUME_SO = 'say how it goes on: --resume-command "python train.py --resume {checkpoint}"'


class Resumed:
    """The whole run; and one that is killed after a checkpoint, and started again."""

    agreement = "resumed from its checkpoints it goes on as the whole run does"
    takes = frozenset(("checkpoint", "resume_command"))

    def __init__(self) -> None:
        self._root = Path()
        self._written: frozenset[str] = frozenset()
        self._strayed = ""
        self._has_copies = False
        self._own: Mapping[str, tuple[int, int]] = {}

    def recorded(self, request: Request) -> Request:
        """Record as it is asked for."""
        return request

    def plain(self, experiment: Experiment, name: str) -> Run:
        """Run the program to its end, in a copy of its own."""
        first = not self._has_copies
        if first:
            self._root = (repository_root(Path.cwd()) or Path.cwd()).resolve()
            self._own = _listing(self._root, experiment.runner.folder)
        copy = self._copy(experiment, all_files=first)
        run = self._run(experiment, name, copy)
        if first:
            # What it has written of the ignored files is a result, as an old checkpoint is.
            self._written = frozenset(
                path for path in _ignored(self._root) if _changed(self._root / path, copy, path)
            )
            if self._written:
                copy = self._copy(experiment)
                run = self._run(experiment, f"{name}-anew", copy)
        return run

    def sides(self, experiment: Experiment, plain: Run) -> Iterator[Side]:
        """Kill it after its first and its last checkpoint, and resume it."""
        if self._strayed:
            yield Side("resumed", None, unknown=self._strayed)
            return
        whole = State.of(experiment, plain)
        at, unknown = _checkpoints(whole)
        if unknown:
            yield Side("resumed", None, unknown=unknown)
        for number, saved in enumerate(at, start=1):
            yield self._resumed(experiment, plain, whole, number, saved)

    def _resumed(
        self, experiment: Experiment, plain: Run, whole: State, number: int, saved: int
    ) -> Side:
        name = f"resumed after step {saved - 1}"
        copy = self._copy(experiment)
        killed = self._run(experiment, f"killed-{number}", copy, kill=saved)
        state = State.of(experiment, killed)
        if not state.killed:
            why = (
                "it ended before a checkpoint had settled"
                if killed.status == plain.status
                else (f"the run that was to be killed failed: see {killed.log}")
            )
            return Side(name, killed, unknown=why)
        command = _resume_command(experiment, copy, state)
        run = self._run(experiment, f"resumed-{number}", copy, command=command)
        if self._strayed:
            return Side(name, run, unknown=self._strayed)
        if run.status != plain.status:
            unknown = f"the resumed run failed, see {run.log}; {RESUME_SO}"
            return Side(name, run, unknown=unknown)
        after = State.of(experiment, run)
        if not after.steps:
            return Side(name, run, unknown=f"the resumed run made no step; {RESUME_SO}")
        if began_anew(whole, after):
            return Side(name, run, unknown=f"it did not resume, it began anew; {RESUME_SO}")
        written = max((each["saved"] for each in state.saves), default=saved)
        begins = step_restored(whole, after, written)
        name = f"resumed after step {begins - 1}"
        verdict = compare_from(plain.folder, run.folder, begins)
        if verdict.same:
            verdict = _with_buffers(verdict, whole, after, begins)
        said = killed_words(state)
        if verdict.same or verdict.first is None:
            return Side(name, run, verdict, said=said)
        lost = not_restored(whole, after, begins)
        words = "; ".join(map(words_of, lost))
        cause = (
            f"Not restored: {words}."
            if lost
            else "All state that is known was restored: what differs is of the program's own."
        )
        found = replace(verdict, advice=Advice(cause=cause))
        return Side(name, run, found, not_restored=lost, said=said)

    def _run(
        self,
        experiment: Experiment,
        name: str,
        copy: Copy,
        kill: int | None = None,
        command: Sequence[str] = (),
    ) -> Run:
        words = copy.command(command or experiment.runner.command)
        told: dict[str, Any] = {"tree": str(copy.tree), "pattern": experiment.checkpoint}
        if kill is not None:
            told["kill"] = kill
        with copy.entered():
            runner = replace(experiment.runner, command=words)
            run = experiment.run(name, {"state": told}, copy.environment, runner=runner)
        strayed = copy.strayed() or _differs(
            self._own, _listing(self._root, experiment.runner.folder)
        )
        if strayed and not self._strayed:
            self._strayed = f"{strayed}; write to a path in the folder that it is started in"
        return run

    def _copy(self, experiment: Experiment, *, all_files: bool = False) -> Copy:
        """Make a copy; the first has files of its own for what git ignores, as it may write them.

        Later ones link what the first run did not write.
        """
        temporary = experiment.open.enter_context(temporary_folder())
        copy = Copy.of(self._root, Path.cwd().resolve(), temporary)
        self._has_copies = True
        experiment.copies[str(copy.tree)] = str(self._root)
        ours = experiment.runner.folder
        names, ignored = (
            [name for name in its if ours not in (self._root / name).parents]
            for its in (files_now(self._root), _ignored(self._root))
        )
        large = [name for name in names if _size(self._root / name) > LARGE]
        if sum(_size(self._root / name) for name in {*names} - {*large}) > MOST:
            todo = "start it in a repository of git that ignores its data, or in a smaller folder"
            what = f"more than {in_units(MOST)} would have to be copied for each run"
            raise TraceError.about(what, found=str(self._root), todo=todo)
        kept = [name for name in ignored if name not in self._written]
        own: list[str] = []
        if all_files:
            left = BUDGET
            for name in sorted(kept, key=lambda each: -_changed_at(self._root / each)):
                path = self._root / name
                size = _size(path)
                if not path.is_dir() and not path.is_symlink() and size <= min(LARGE, left):
                    own.append(name)
                    left -= size
        try:
            write_files(self._root, [*sorted({*names} - {*large}), *own], copy.tree)
        except CopyError as error:
            raise TraceError.about(str(error), found=str(self._root)) from None
        copy.link([*large, *kept])
        return copy


def _with_buffers(verdict: Verdict, whole: State, resumed: State, begins: int) -> Verdict:
    """Add the first difference in a buffer: training may not show it, and evaluation does."""
    for place, step in enumerate(resumed.steps):
        if begins + place >= len(whole.steps):
            break
        left, right = whole.steps[begins + place]["buffers"], step["buffers"]
        names = [name for name in left if name in right and left[name] != right[name]]
        if names:
            what = f"buffer {names[0]} differs as the step begins"
            first = Divergence(
                *(0, begins + place, "forward", names[0].rpartition(".")[0], "buffer", ""),
                *(Kind.VALUES, "", None, None),
                what=what,
            )
            return replace(verdict, same=False, first=first)
    return verdict


def killed_words(state: State) -> str:
    """Return when a run was killed, in words."""
    files = sorted({path for save in state.saves for path in save["files"]})
    return f"killed after step {state.killed - 1}, its checkpoints being {', '.join(files[:4])}"


def _checkpoints(whole: State) -> tuple[list[int], str]:
    """Return after how many steps the first and the last checkpoint are written; or why not."""
    last = len(whole.steps) - 1
    new_at = [save["saved"] for save in whole.saves if save["new"]]
    usable = [
        save["saved"]
        for save in whole.saves
        if save["saved"] > 0
        and any(settles(save["saved"], new_at, step) for step in range(save["saved"], last + 1))
    ]
    if usable:
        return sorted({usable[0], usable[-1]}), ""
    if not whole.steps:
        return [], "it makes no step of an optimizer"
    if not whole.saves:
        return (
            [],
            f"it never saved a checkpoint in {last + 1} steps; save more often, or {NAME_ONE}",
        )
    return [], "it saves too late for a step to follow; let it save earlier, or train longer"


def _resume_command(experiment: Experiment, copy: Copy, state: State) -> list[str]:
    if not experiment.resume_command:
        return []
    files = [copy.tree / path for path in state.saves[-1]["files"]]
    folders = {file.parent for file in files}
    alone = len(files) == 1 or folders & {copy.tree, copy.place}
    newest = max(files, key=_changed_at) if alone else min(folders)
    return [
        word.replace("{checkpoint}", str(newest)) for word in shlex.split(experiment.resume_command)
    ]


def _ignored(root: Path) -> list[str]:
    """Return the files and folders below `root` that git ignores, by their paths.

    A folder is taken apart into its files, so that what is written there is written in the copy,
    but for virtual environments and folders of very many files.
    """
    try:
        words = ("ls-files", "-z", "-oi", "--exclude-standard", "--directory")
        found = [
            str((part / name).relative_to(root))
            for part in repositories(root)
            for name in os.fsdecode(git(part, *words)).split("\0")
            if name
        ]
    except (OSError, SubprocessError):
        found = [
            str(path.relative_to(root))
            for path in root.iterdir()
            if path.is_dir() and is_of_environment(path, root)
        ]
    apart: list[str] = []
    for name in found:
        path = root / name
        if path.name == "__pycache__":
            continue
        if not _is_folder(path) or is_of_environment(path, root):
            apart.append(name)
            continue
        within: list[str] = []
        for folder, folders, files in os.walk(path):
            folders[:] = [each for each in folders if each not in LEFT_OUT]
            within += [str(Path(folder, file).relative_to(root)) for file in files]
        apart += within if len(within) <= MANY else [name]
    return apart


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def _changed_at(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_mtime_ns
    return 0


def _changed(original: Path, copy: Copy, name: str) -> bool:
    there = copy.tree / name
    if there.is_symlink():
        return False  # `Copy.strayed` knows
    return (_changed_at(there), _size(there)) != (_changed_at(original), _size(original))


def _listing(root: Path, ours: Path) -> dict[str, tuple[int, int]]:
    """Return when each file below `root` was changed, and its size, but for caches and `ours`."""
    found: dict[str, tuple[int, int]] = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in LEFT_OUT and not is_of_environment(Path(folder, name), root)
        ]
        for name in files:
            path = Path(folder, name)
            found[str(path.relative_to(root))] = _changed_at(path), _size(path)
        if len(found) > MANY:
            break
    return found


def _differs(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [name for name in now if before.get(name) != now[name]]
    return f"{changed[0]} in your own folder was written meanwhile" if changed else ""
