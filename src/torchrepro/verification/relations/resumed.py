"""Whether a run that was killed and resumed from its checkpoint goes on as the whole run does.

Each run is in a fresh copy of the repository, so that none finds another one's checkpoint. What of
its state a resumed run does not have again follows from what both runs have noted.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.errors import TraceError
from torchrepro.ground.messages import shortened
from torchrepro.ground.messages import size as in_units
from torchrepro.lock.file_notes import LEFT_OUT
from torchrepro.lock.repository import (
    FAILED,
    CopyError,
    file_state,
    files_now,
    is_of_environment,
    names_by_git,
    repositories,
    repository_root,
    walked,
    write_files,
)
from torchrepro.verdict.comparison import compare_from
from torchrepro.verdict.first_line import Origins
from torchrepro.verdict.render import LINE, are, counted, short
from torchrepro.verdict.value import Advice, Divergence, Kind
from torchrepro.verification.copies import MANY, Copy, temporary_folder
from torchrepro.verification.relations.variants import NotRestored, Relation, Variant

if TYPE_CHECKING:
    from torchrepro.verdict.value import LineOfOrigin
    from torchrepro.verification.result import Run

LARGE = 1 << 26  # bytes of a file above which it is linked, not copied

MOST = 4 << 30  # bytes of all files that are copied above which nothing is

BUDGET = 1 << 30  # bytes of ignored files that the first copy has as files of its own

WEIGHTS = "weights "  # how the names begin of weights that nothing trains
NAME_ONE = "name its files: --checkpoint GLOB"
RESUME_SO = 'say how it goes on: --resume-command "python train.py --resume {checkpoint}"'


class State(NamedTuple):
    """What the processes of a run have noted, and of its passes the one that made most."""

    passes: Sequence[Mapping[str, Any]]
    """The state as each backward pass begins, and as a step does before which there was none."""
    saves: Sequence[Mapping[str, Any]]
    """The checkpoints, each with the number of passes after which it was written."""
    settled: Sequence[int]
    """The numbers of passes after which a checkpoint was written that has settled since."""
    killed: int  # after how many passes it was killed; 0 if it was not
    opened: frozenset[str]  # checkpoints that it opened before its first pass
    fetched: Mapping[str, Mapping[str, Any]]
    """How a process has loaded each batch, by the digest of the batch."""

    @property
    def written(self) -> dict[str, int]:
        """The number of passes after which each file of a checkpoint was written last."""
        return {path: save["saved"] for save in self.saves for path in save["files"]}

    def batches(self, number: int) -> list[str]:
        return [digest for *_, digest in self.passes[number]["batches"]]

    def step(self, number: int) -> int:
        return int(self.passes[number]["step"])

    def left_of_step(self, number: int) -> int:
        """Return how many passes of its step follow a pass, it included."""
        return sum(its["step"] == self.step(number) for its in self.passes[number:])

    def place(self, number: int) -> str:
        """Return where a pass begins, in words."""
        step, within = self.step(number), self.passes[number]["within"]
        if within:
            return f"within step {step}, after {within} of its batches"
        return f"after step {step - 1}"


class Resumed(Relation):
    """The whole run; and one that is killed after a checkpoint, and started again."""

    agreement = "resumed from its checkpoints it goes on as the whole run does"
    takes = frozenset(("checkpoint", "resume_command"))

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._root = (repository_root(Path.cwd()) or Path.cwd()).resolve()
        self._recordings = self.runner.folder.resolve()
        self._before = self._users_files()
        self._written: frozenset[str] = frozenset()  # results, which no later run finds
        self._updated: frozenset[str] = frozenset()  # what every run has a file of its own for

    def plain(self, name: str) -> Run:
        if self.copies:
            return self._run(name, self._copy())
        copy = self._copy(all_files=True)
        run = self._run(name, copy)
        # What it has written of the ignored files is a result, as an old checkpoint is. Of what is
        # linked, `Copy.strayed` knows.
        self._written = frozenset(
            path
            for path in _ignored(self._root)
            if not (copy.tree / path).is_symlink()
            and file_state(copy.tree / path) != file_state(self._root / path)
        )
        if not self._written:
            return run
        anew = self._run(f"{name}-anew", self._copy())
        if run.status or not anew.status:
            return anew
        # It needs what it writes: no results, but data that it updates.
        self._updated, self._written = self._written, frozenset()
        return self._run(f"{name}-with-all", self._copy())

    def sides(self, plain: Run) -> Iterator[Variant]:
        whole = self._state(plain)
        usable = sorted({saved for saved in whole.settled if saved > 0})
        unknown = self.strayed
        if not unknown and not usable:
            if not whole.passes:
                unknown = "it makes no backward pass, and no step of an optimizer"
            elif not whole.saves:
                seen = f"it never saved a checkpoint in {whole.step(-1) + 1} steps"
                unknown = f"{seen}; save more often, or {NAME_ONE}"
            else:
                unknown = (
                    "it saves too late for a batch to follow; let it save earlier, or train longer"
                )
        if unknown:
            yield Variant("resumed", None, unknown=unknown)
            return
        for number, saved in enumerate(sorted({usable[0], usable[-1]}), start=1):
            yield self._resumed(plain, whole, number, saved)

    def _resumed(self, plain: Run, whole: State, number: int, saved: int) -> Variant:
        name = f"resumed {whole.place(saved)}"
        copy = self._copy()
        killed = self._run(f"killed-{number}", copy, kill=saved)
        before = self._state(killed)
        if not before.killed:
            failed = f"the run that was to be killed failed: see {killed.log}"
            ended_well = killed.status == plain.status
            why = "it ended before a checkpoint had settled" if ended_well else failed
            return Variant(name, killed, unknown=why)
        command = self._resume_command(copy, before)
        run = self._run(f"resumed-{number}", copy, command=command)
        after = self._state(run)
        unknown = ""
        if self.strayed:
            unknown = self.strayed
        elif run.status != plain.status:
            unknown = f"the resumed run failed, see {run.log}; {RESUME_SO}"
        elif not after.passes:
            unknown = f"the resumed run made no backward pass, and no step; {RESUME_SO}"
        elif (
            len(after.passes) == len(whole.passes)
            and after.passes[0]["parameters"] == whole.passes[0]["parameters"]
            and after.batches(0) == whole.batches(0)
        ):
            unknown = f"it did not resume, it began anew; {RESUME_SO}"
        if unknown:
            return Variant(name, run, unknown=unknown)
        written = before.written
        read = {path: number for path, number in written.items() if path in after.opened}
        begins = _pass_restored(whole, after, {*(read or written).values()})
        files = ", ".join(sorted(written)[:4])
        if begins is None:
            why = f"no parameter is as it was in any of {files}"
            return Variant(name, run, unknown=f"{why}; {RESUME_SO}")
        name = f"resumed {whole.place(begins)}"
        said = f"killed {whole.place(before.killed)}, its checkpoints being {files}"
        said += _which(whole, begins, read, written)
        losses = whole.passes[begins]["losses"]
        verdict = compare_from(plain.folder, run.folder, whole.step(begins), losses)
        own = _own_values(whole, before, after, begins, begins)
        if verdict.same and (first := _first_kept(whole, before, after, begins)):
            verdict = replace(verdict, same=False, first=first)
        if verdict.same or verdict.first is None:
            return Variant(name, run, verdict, said=said)
        lost = tuple(_not_restored(whole, after, begins, verdict.first))
        if not lost:
            its = f": {_few([_became(each, *both) for each, both in own.items()])}" if own else ""
            kept = f"what differs is something that the program keeps itself{its}"
            cause = f"All state that is known was restored: {kept}."
            origin = self._line(whole, number, begins, saved, verdict.first)
            verdict = replace(verdict, advice=Advice(cause=cause), origin=origin)
        return Variant(name, run, verdict, not_restored=lost, said=said)

    def _line(
        self, whole: State, number: int, begins: int, saved: int, first: Divergence
    ) -> LineOfOrigin | None:
        """Return the line that first reads what the program keeps itself, as followed runs show it.

        Where a run goes on within a step, lines cannot be laid side by side.
        """
        step = whole.step(begins)
        if not first.source or whole.passes[begins]["within"]:
            return None
        last, copy = first.step + 1, self._copy()
        source = self.in_own(first.source).replace(str(self._root), str(copy.tree), 1)
        plain = self._run(f"followed-{number}", copy, follow=(max(step - 1, 0), last))
        copy = self._copy()
        killed = self._state(self._run(f"killed-to-follow-{number}", copy, kill=saved))
        command = self._resume_command(copy, killed) if killed.killed else []
        name = f"resumed-and-followed-{number}"
        resumed = self._run(name, copy, command=command, follow=(0, max(last - step, 0)))
        origins = Origins(plain.folder, resumed.folder, first.rank, step)
        return origins.of(replace(first, source=source))

    def _state(self, run: Run) -> State:
        every = self.noted(run)
        passes = max(([n for n in notes if "step" in n] for notes in every), key=len, default=[])
        rest = [note for notes in every for note in notes]
        return State(
            passes,
            [note for note in rest if "saved" in note],
            [note["settled"] for note in rest if "settled" in note],
            max((note["killed"] for note in rest if "killed" in note), default=0),
            frozenset(note["opened"] for note in rest if "opened" in note),
            {note["batch"]: note for note in rest if "fetched" in note},
        )

    def _run(
        self,
        name: str,
        copy: Copy,
        kill: int | None = None,
        command: Sequence[str] = (),
        follow: tuple[int, int] | None = None,  # steps of which lines are followed
    ) -> Run:
        told = {"tree": str(copy.tree), "pattern": self.checkpoint, "kill": kill}
        observed: dict[str, Any] | None = {
            "verification.relations.state_observer:note_state": told,
            "verification.relations.loading_observer:observe_loading": {},
        }
        request = self.runner.request
        if follow is not None:
            request, observed = replace(request, steps=follow, detail=True), None
        words = copy.command(command or self.runner.command)
        runner = replace(self.runner, command=words, request=request)
        with copy.entered():
            run = self.run(name, copy.environment, observed, runner=runner)
        now = self._users_files()
        changed = [name for name in now if self._before.get(name) != now[name]]
        strayed = copy.strayed()
        if changed and not strayed:
            strayed = f"{changed[0]} in your own folder was written meanwhile"
        if strayed and not self.strayed:
            self.strayed = f"{strayed}; write to a path in the folder that it is started in"
        return run

    def _users_files(self) -> dict[str, tuple[int, int]]:
        files = (each for each in walked(self._root) if self._recordings not in each.parents)
        return {str(path.relative_to(self._root)): file_state(path) for path in islice(files, MANY)}

    def _copy(self, *, all_files: bool = False) -> Copy:
        """Make a copy; the first has files of its own for what git ignores, as it may write them.

        Later ones link what the first run did not write.
        """
        root = self._root
        temporary = self.open.enter_context(temporary_folder())
        copy = Copy.of(root, Path.cwd().resolve(), temporary, self._recordings)
        self.copies[str(copy.tree)] = str(root)
        names, ignored = (
            [name for name in its if self._recordings not in (root / name).parents]
            for its in (files_now(root), _ignored(root))
        )
        sizes = {name: file_state(root / name)[1] for name in (*names, *ignored)}
        large = [name for name in names if sizes[name] > LARGE]
        own = ({*names} - {*large}) | self._updated
        if sum(sizes[name] for name in own) > MOST:
            todo = "start it in a repository of git that ignores its data, or in a smaller folder"
            what = f"more than {in_units(MOST)} would have to be copied for each run"
            raise TraceError.about(what, found=str(root), todo=todo)
        kept = [name for name in ignored if name not in self._written]
        left = BUDGET
        newest = sorted(kept, key=lambda each: -file_state(root / each)[0]) if all_files else ()
        for name in newest:
            path = root / name
            if not path.is_dir() and not path.is_symlink() and sizes[name] <= min(LARGE, left):
                own.add(name)
                left -= sizes[name]
        try:
            write_files(root, sorted(own), copy.tree)
        except CopyError as error:
            raise TraceError.about(str(error), found=str(root)) from None
        copy.link([*large, *kept])
        return copy

    def _resume_command(self, copy: Copy, killed: State) -> list[str]:
        if not self.resume_command:
            return []
        files = [copy.tree / path for path in killed.saves[-1]["files"]]
        folders = {file.parent for file in files}
        alone = len(files) == 1 or folders & {copy.tree, copy.place}
        newest = max(files, key=lambda each: file_state(each)[0]) if alone else min(folders)
        words = shlex.split(self.resume_command)
        return [word.replace("{checkpoint}", str(newest)) for word in words]


def _ignored(root: Path) -> list[str]:
    """Return the files and folders below `root` that git ignores, by their paths.

    A folder is taken apart into its files, so that what is written there is written in the copy,
    but for virtual environments and folders of very many files.
    """
    try:
        words = ("ls-files", "-z", "-oi", "--exclude-standard", "--directory")
        found = [part / name for part in repositories(root) for name in names_by_git(part, *words)]
    except FAILED:
        found = [each for each in root.iterdir() if each.is_dir() and is_of_environment(each, root)]
    apart: list[Path] = []
    for path in found:
        if path.name == "__pycache__":
            continue
        within = [path]
        if path.is_dir() and not path.is_symlink() and not is_of_environment(path, root):
            within = []
            for folder, folders, files in os.walk(path):
                folders[:] = [each for each in folders if each not in LEFT_OUT]
                within += [Path(folder, file) for file in files]
        apart += within if len(within) <= MANY else [path]
    return [str(path.relative_to(root)) for path in apart]


def _which(whole: State, begins: int, read: Mapping[str, int], written: Mapping[str, int]) -> str:
    """Return from which checkpoint the resumed run went on, where a newer one is there."""
    newest = max(written, key=written.__getitem__)
    which = min(read or written, key=lambda path: (abs(written[path] - begins), -written[path]))
    if max(begins, written[which]) >= written[newest]:
        return ""
    steps = whole.step(written[newest]) - whole.step(begins)
    twice = counted(steps, "step") if steps else f"{written[newest] - begins} of its batches"
    done = f"{twice} {are(steps or written[newest] - begins)} done twice"
    return f"; went on from {which}; {newest} is newer: {done}"


def _pass_restored(whole: State, resumed: State, written: Collection[int]) -> int | None:
    """Return the pass of the whole run with which the resumed one begins.

    It is one before which most parameters are those of the resumed run. Within a window, and after
    steps that were skipped, these are several: of them it is the one that reads the same batches,
    after which as much of the step is left, with equal gradients, and the nearest to a pass after
    which a checkpoint was `written`. Where none is it is that one, or None if there are several.
    Parameters as the whole run began with them are not restored.
    """
    its = resumed.passes[0]
    own, first = its["parameters"], whole.passes[0]["parameters"]
    alike = [
        sum(
            own.get(name) == digest != first.get(name)
            for name, digest in each["parameters"].items()
        )
        for each in whole.passes
    ]
    most = max(alike, default=0)
    if not most:
        return min(*written, len(whole.passes) - 1) if len(written) == 1 else None
    left = resumed.left_of_step(0)

    def unlike(number: int) -> tuple[bool, bool, bool, int]:
        there = whole.passes[number]
        return (
            there["loss"] != its["loss"],
            whole.left_of_step(number) != left,
            there["gradients"] != its["gradients"],
            min(abs(number - each) for each in written),
        )

    return min((number for number, count in enumerate(alike) if count == most), key=unlike)


def _unequal(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return [name for name in left if name in right and left[name] != right[name]]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""  # noqa: PLR2004
    return f"{', '.join(names[:2])}{more}"


def _became(name: str, was: str, now: str) -> str:
    if name.startswith(WEIGHTS):
        return f"the {name}"
    return shortened(f"{name} {was} became {now}", LINE)


def _own_values(
    whole: State, killed: State, resumed: State, begins: int, ends: int
) -> dict[str, tuple[str, str]]:
    """Return what of the program's own is another as the pass `ends` begins, in both runs.

    What differs in the killed run is never the same.
    """
    left, right = whole.passes[ends]["own"], resumed.passes[ends - begins]["own"]
    both = [*zip(whole.passes, killed.passes, strict=False)][-1]
    again, before = (each["own"] for each in both)
    return {
        name: (left[name], right[name])
        for name in _unequal(left, right)
        if again.get(name) == before.get(name)
    }


def _first_kept(whole: State, killed: State, resumed: State, begins: int) -> Divergence | None:
    """Return a difference that training may not show, and evaluation or later training does."""
    both = zip(whole.passes[begins:], resumed.passes, strict=False)
    for place, (left, right) in enumerate(both, start=begins):
        for name in _unequal(left["buffers"], right["buffers"])[:1]:
            what, module = f"buffer {name} differs as the step begins", name.rpartition(".")[0]
            at = 0, whole.step(place), "forward", module, "buffer"
            return Divergence(*at, kind=Kind.VALUES, what=what)
    last = min(len(whole.passes), len(resumed.passes) + begins) - 1
    if last == begins:
        return None  # what is made from the pass before is not yet
    own = _own_values(whole, killed, resumed, begins, last)
    names = [name for name in own if name.startswith(WEIGHTS)]
    names += _unequal(whole.passes[last]["scaler"], resumed.passes[last - begins]["scaler"])
    if not names:
        return None
    what = f"{names[0]}, which training does not show, differs to the end"
    return Divergence(0, whole.step(last), "forward", kind=Kind.VALUES, what=what)


def _lost(
    kind: str, name: str, states: Collection[Any], right: Mapping[str, Any], what: str = ""
) -> NotRestored:
    """Return what became of a state: it was none of `states`, or a line changed it after one was.

    The lines from the opening of a checkpoint to the first batch are known.
    """
    key = name if kind == "generator" else f"{kind} {name}"
    its = [(short(where), state) for each, where, state in right["followed"] if each == key]
    found = [number for number, (_, state) in enumerate(its) if state in states]
    if not found or found[-1] + 1 == len(its):
        return NotRestored(kind, name, what)
    verb = "drawn from" if kind == "generator" else "changed"
    then = f"then {verb} at {its[found[-1] + 1][0]} before the first batch"
    return NotRestored(kind, name, f"{then}: {what}" if what else then, its[found[-1]][0])


READ_LATER: Mapping[str, Collection[str]] = {
    "data": ("gradient", "optimizer", "scheduler", "scaler"),
    "forward": ("gradient", "optimizer", "scheduler"),
    "backward": ("optimizer", "scheduler"),
}
"""Phase of the first step -> the state that nothing has read by then."""


def _not_restored(
    whole: State, resumed: State, begins: int, first: Divergence
) -> Sequence[NotRestored]:
    """Return the state that was lost; of several those that `first` can come from."""
    left, right = whole.passes[begins], resumed.passes[0]
    lost = [
        NotRestored(kind, name)
        for kind in ("parameter", "buffer")
        for name in _unequal(left[f"{kind}s"], right[f"{kind}s"])
    ]
    # Between two steps gradients may be left that the program sets to zero before it reads them.
    if left["within"] or first.phase == "backward":
        names = [n for n, its in left["gradients"].items() if its != right["gradients"].get(n)]
        lost += [NotRestored("gradient", f"of {_few(names)}")] if names else []

    schedulers = _unequal(left["scheduler"], right["scheduler"])
    by_key: dict[str, list[str]] = {}
    for name, value in left["optimizer"].items():
        key, _, of = name.partition(" of ")
        is_set_in_each_step = schedulers and of.startswith("group ")
        if value != right["optimizer"].get(name) and not is_set_in_each_step:
            by_key.setdefault(key, []).append(of)
    lost += [NotRestored("optimizer", key, f"of {_few(its)}") for key, its in by_key.items()]

    both = zip_longest(*(side["batches"][::-1] for side in (left, right)))
    unlike = [
        (batch, other)
        for batch, other in [*both][: len(left["batches"])]
        if not other or batch[3] != other[3]
    ]
    for kind in ("scheduler", "scaler", *["sampler"] * bool(unlike)):
        for name in _unequal(left[kind], right[kind]):
            was, now = left[kind][name], right[kind][name]
            fields = [_became(key, was[key], now[key]) for key in _unequal(was, now)]
            states = [each[kind].get(name) for each in whole.passes[begins - 1 : begins + 1]]
            lost.append(_lost(kind, name, states, right, ", ".join(fields[:3])))

    # By generator, the first step from there on that draws from it.
    later = reversed(whole.passes[begins:])
    draws = {name: each["step"] for each in later for name in each["drew"]}
    # What a backward pass or an optimizer draws is noted with the pass that follows.
    until = first.step + (first.phase in ("backward", "optimizer"))
    unused: list[NotRestored] = []  # by what differs first
    for name, seen in left["generators"].items():
        has = right["generators"].get(name, [])
        if seen[-1:] != has[-1:]:
            found = _lost("generator", name, seen, right)
            # The order of an epoch was drawn before, and is drawn again as the run resumes.
            is_drawn = draws.get(name, until + 1) <= until or name in right["drew"]
            is_known = right["is_followed"] or set(seen).isdisjoint(has)
            if found.restored or (name in draws and is_known):
                (lost if name in draws and is_drawn else unused).append(found)

    for batch, other in reversed(unlike):
        known = {each.kind for each in lost} & {"sampler", "generator"}
        lost += _not_loaded(whole, resumed, batch, other, is_known=bool(known))
    is_first_step = first.step == whole.step(begins)
    unread = READ_LATER.get(first.phase, ()) if is_first_step else ()
    return [each for each in lost if each.kind not in unread] or lost or unused


def _not_loaded(
    whole: State, resumed: State, batch: Any, other: Any, *, is_known: bool
) -> Iterator[NotRestored]:
    """Yield why a loader handed out another batch, where what orders it `is_known` or not."""
    where, epoch, position, _ = batch
    if other is None:
        yield NotRestored("loader", short(where), "it gave no batch")
        return
    was, now = (
        run.fetched.get(each[3], {"batch": each[3]})
        for run, each in ((whole, batch), (resumed, other))
    )
    has_indices = "None" not in now.get("fetched", "None")
    key = "fetched" if has_indices else "batch"  # one without indices is known by its values
    its = [each for one in whole.passes for each in one["batches"] if each[0] == where]
    loaded = [(each, whole.fetched.get(each[3], {"batch": each[3]})) for each in its]
    same = [each[2] for each, how in loaded if each[1] == epoch and how.get(key) == now[key]]
    if same and position not in same:
        if other[2] != position or not is_known:
            what = f"batch {position} of its epoch became batch {same[0]}"
            yield NotRestored("loader", short(where), what)
    elif has_indices and not same:
        if not is_known:
            what = f"batch {position} of its epoch has other samples"
            yield NotRestored("loader", short(where), what)
    elif was.get("in_worker"):
        lives_on = any(each[1] < epoch and how.get("seed") == was["seed"] for each, how in loaded)
        if is_known and not lives_on and was["seed"] != now["seed"]:
            return  # these workers were seeded from what is known
        for name, state in was["drawn"].items():
            if now.get("drawn", {}).get(name, state) != state:
                line = was["drew"].get(name) or now["drew"].get(name, "")
                of = f"{name} of the {'persistent ' if lives_on else ''}workers"
                yield NotRestored("generator", of, f"drawn from at {short(line)}" if line else "")
