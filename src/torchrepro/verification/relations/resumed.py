"""Checks whether a killed and resumed run continues exactly as the whole, uninterrupted run.

Each run has a new copy of the repository, so that it finds no checkpoint of another run. The notes
of the whole and of the resumed run show which part of the state was not restored.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.errors import TraceError, shortened
from torchrepro.ground.errors import size as in_units
from torchrepro.lock import repository
from torchrepro.lock.file_notes import SKIPPED_FOLDERS
from torchrepro.lock.repository import FAILED, CopyError, file_state, is_of_environment
from torchrepro.verdict.diagnosis import OWN_STATE, PAGES
from torchrepro.verdict.first_line import Origins
from torchrepro.verdict.render import LINE, are, counted, short
from torchrepro.verdict.resumed_comparison import compare_from
from torchrepro.verdict.value import Advice, Divergence, Kind
from torchrepro.verification.copies import MANY, Copy, temporary_folder
from torchrepro.verification.relations.variants import NotRestored, Relation, Variant

if TYPE_CHECKING:
    from torchrepro.verdict.value import LineOfOrigin
    from torchrepro.verification.result import Run

LARGE = 1 << 26  # bytes of a file above which it is linked, not copied

MOST = 4 << 30  # bytes of all copied files above which the relation is refused

BUDGET = 1 << 30  # bytes of ignored files that are copied, not linked, for the first run

WEIGHTS = "weights "  # prefix of the names of weights that are not trained
NAME_ONE = "name its files: --checkpoint GLOB"
RESUME_SO = (
    'name the command that resumes: --resume-command "python train.py --resume {checkpoint}"'
)


class State(NamedTuple):
    """The notes of a run: passes of the process with most passes, checkpoints of all processes."""

    passes: Sequence[Mapping[str, Any]]
    """The state at the start of each backward pass, and of each step without a backward pass."""
    saves: Sequence[Mapping[str, Any]]
    """The checkpoints, each with the number of passes after which it was written."""
    settled: Sequence[int]
    """The counts of passes after which a checkpoint was written that was then completed."""
    killed: int  # the number of passes after which the run was killed; 0 if it was not
    opened: frozenset[str]  # the checkpoints that the run opened before its first pass
    fetched: Mapping[str, Mapping[str, Any]]
    """How a process loaded each batch, by the digest of the batch."""

    @property
    def written(self) -> dict[str, int]:
        """Each checkpoint file, with the number of passes after which it was last written."""
        return {path: save["saved"] for save in self.saves for path in save["files"]}

    def batches(self, number: int) -> list[str]:
        return [digest for *_, digest in self.passes[number]["batches"]]

    def step(self, number: int) -> int:
        return int(self.passes[number]["step"])

    def left_of_step(self, number: int) -> int:
        """Return how many passes remain in the step of a pass, including this pass."""
        step = self.step(number)
        return sum(noted["step"] == step for noted in self.passes[number:])

    def position(self, number: int) -> str:
        """Return a phrase that says where a pass begins, such as ``after step 4``."""
        step, within = self.step(number), self.passes[number]["within"]
        if within:
            return f"within step {step}, after {within} of its batches"
        return f"after step {step - 1}"


class Resumed(Relation):
    """The relation between the whole run and a run that is killed and then resumed."""

    agreement = "resumed from its checkpoints, it continues as the whole run does"
    takes = frozenset(("checkpoint", "resume_command"))

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._root = (repository.repository_root(Path.cwd()) or Path.cwd()).resolve()
        self._recordings = self.runner.folder.resolve()
        self._before = self._users_files()
        self._written: frozenset[str] = frozenset()  # results of the run, absent in later copies
        self._updated: frozenset[str] = frozenset()  # data that runs update, copied for each

    def plain(self, name: str) -> Run:
        if self.copies:
            return self._run(name, self._copy())
        copy = self._copy(all_files=True)
        run = self._run(name, copy)
        # Ignored files that the run wrote are results, such as checkpoints. Links are excluded,
        # because `Copy.strayed` reports a write through a link.
        self._written = frozenset(
            path
            for path in _ignored(self._root)
            if not (copy.tree / path).is_symlink()
            and file_state(copy.tree / path) != file_state(self._root / path)
        )
        if not self._written:
            return run
        without_results = self._run(f"{name}-anew", self._copy())
        if run.status or not without_results.status:
            return without_results
        # The program fails without these files: they are data that it updates, not results.
        self._updated, self._written = self._written, frozenset()
        return self._run(f"{name}-with-all", self._copy())

    def variants(self, plain: Run) -> Iterator[Variant]:
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
                unknown = "it saves too late: no batch follows; save earlier, or train longer"
        if unknown:
            yield Variant("resumed", None, unknown=unknown)
            return
        for number, saved in enumerate(sorted({usable[0], usable[-1]}), start=1):
            yield self._resumed(plain, whole, number, saved)

    def _resumed(self, plain: Run, whole: State, number: int, saved: int) -> Variant:
        name = f"resumed {whole.position(saved)}"
        copy = self._copy()
        killed = self._run(f"killed-{number}", copy, kill=saved)
        before = self._state(killed)
        if not before.killed:
            reason = f"the run that was to be killed failed: see {killed.log}"
            if killed.status == plain.status:
                reason = "it ended before a checkpoint was complete"
            return Variant(name, killed, unknown=reason)
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
            unknown = f"it did not resume, it started from scratch; {RESUME_SO}"
        if unknown:
            return Variant(name, run, unknown=unknown)
        written = before.written
        read = {path: number for path, number in written.items() if path in after.opened}
        begins = _pass_restored(whole, after, {*(read or written).values()})
        files = ", ".join(sorted(written)[:4])
        if begins is None:
            reason = f"no parameter has its value from any of {files}"
            return Variant(name, run, unknown=f"{reason}; {RESUME_SO}")
        name = f"resumed {whole.position(begins)}"
        note = f"killed {whole.position(before.killed)}, its checkpoints being {files}"
        note += _older_checkpoint(whole, begins, read, written)
        losses = whole.passes[begins]["losses"]
        verdict = compare_from(plain.folder, run.folder, whole.step(begins), losses)
        own_values = _own_values(whole, before, after, begins, begins)
        if verdict.same and (first := _first_hidden(whole, before, after, begins)):
            verdict = replace(verdict, same=False, first=first)
        if verdict.same or verdict.first is None:
            return Variant(name, run, verdict, note=note)
        lost = tuple(_not_restored(whole, after, begins, verdict.first))
        if not lost:
            cause = "All known state was restored: what differs is state that the program keeps"
            changes = [_changed(value, *both) for value, both in own_values.items()]
            cause += f" itself: {_few(changes)}." if changes else " itself."
            origin = self._line(whole, number, begins, saved, verdict.first)
            advice = Advice(cause, cause_id=PAGES[OWN_STATE])
            verdict = replace(verdict, advice=advice, origin=origin)
        else:
            cause = f"The resumed run begins with another state of the {lost[0].kind}."
            verdict = replace(verdict, advice=Advice(cause, cause_id=PAGES[lost[0].kind]))
        return Variant(name, run, verdict, not_restored=lost, note=note)

    def _line(
        self, whole: State, number: int, begins: int, saved: int, first: Divergence
    ) -> LineOfOrigin | None:
        """Run again to follow program lines, and return the line where the difference began.

        Returns None if a run resumed within a step, because then lines cannot be matched.
        """
        step = whole.step(begins)
        if not first.source or whole.passes[begins]["within"]:
            return None
        last, copy = first.step + 1, self._copy()
        source = self.with_users_paths(first.source).replace(str(self._root), str(copy.tree), 1)
        plain = self._run(f"followed-{number}", copy, follow=(max(step - 1, 0), last))
        copy = self._copy()
        killed = self._state(self._run(f"killed-to-follow-{number}", copy, kill=saved))
        command = self._resume_command(copy, killed) if killed.killed else []
        name = f"resumed-and-followed-{number}"
        resumed = self._run(name, copy, command=command, follow=(0, max(last - step, 0)))
        origins = Origins(plain.folder, resumed.folder, first.rank, step)
        return origins.of(replace(first, source=source))

    def _state(self, run: Run) -> State:
        by_process = self.notes_of(run)
        passes = ([note for note in notes if "step" in note] for notes in by_process)
        every = [*chain(*by_process)]
        return State(
            max(passes, key=len, default=[]),
            [note for note in every if "saved" in note],
            [note["settled"] for note in every if "settled" in note],
            max((note["killed"] for note in every if "killed" in note), default=0),
            frozenset(note["opened"] for note in every if "opened" in note),
            {note["batch"]: note for note in every if "fetched" in note},
        )

    def _run(
        self,
        name: str,
        copy: Copy,
        kill: int | None = None,
        command: Sequence[str] = (),
        follow: tuple[int, int] | None = None,  # the steps whose lines are followed
    ) -> Run:
        checkpoints = {"tree": str(copy.tree), "pattern": self.checkpoint, "kill": kill}
        observers: dict[str, Any] | None = {
            "verification.relations.state_observer:note_state": checkpoints,
            "verification.relations.loading_observer:observe_loading": {},
        }
        request = self.runner.request
        if follow is not None:
            request, observers = replace(request, steps=follow, detail=True), None
        runner = replace(self.runner, command=command or self.runner.command, request=request)
        with copy.entered(runner) as runner_in_copy:
            run = self.run(name, observers=observers, runner=runner_in_copy)
        now = self._users_files()
        changed = [path for path in now if self._before.get(path) != now[path]]
        strayed = copy.strayed()
        if changed and not strayed:
            strayed = f"{changed[0]} in your own folder was changed during the run"
        if strayed and not self.strayed:
            self.strayed = f"{strayed}; write to a path in the folder where the command starts"
        return run

    def _users_files(self) -> dict[str, tuple[int, int]]:
        files = (
            path for path in repository.walked(self._root) if self._recordings not in path.parents
        )
        return {str(path.relative_to(self._root)): file_state(path) for path in islice(files, MANY)}

    def _copy(self, *, all_files: bool = False) -> Copy:
        """Make a copy of the repository for one run.

        With `all_files`, as for the first run, ignored files are copied, because the run may write
        to them. Later copies contain links to ignored files that the first run did not write.
        """
        root = self._root
        temporary = self.open.enter_context(temporary_folder())
        copy = Copy.of(root, Path.cwd().resolve(), temporary, self._recordings)
        self.copies[str(copy.tree)] = str(root)

        def not_recorded(names: Iterable[str]) -> list[str]:
            return [name for name in names if self._recordings not in (root / name).parents]

        names, ignored = not_recorded(repository.files_now(root)), not_recorded(_ignored(root))
        sizes = {name: file_state(root / name)[1] for name in (*names, *ignored)}
        large = [name for name in names if sizes[name] > LARGE]
        copied = ({*names} - {*large}) | self._updated
        if sum(sizes[name] for name in copied) > MOST:
            todo = "start it in a repository of git that ignores its data, or in a smaller folder"
            what = f"more than {in_units(MOST)} would have to be copied for each run"
            raise TraceError.about(what, found=str(root), todo=todo)
        kept = [name for name in ignored if name not in self._written]
        if all_files:
            budget = BUDGET
            for name in sorted(kept, key=lambda name: -file_state(root / name)[0]):
                path = root / name
                is_file = not path.is_dir() and not path.is_symlink()
                if is_file and sizes[name] <= min(LARGE, budget):
                    copied.add(name)
                    budget -= sizes[name]
        try:
            repository.write_files(root, sorted(copied), copy.tree)
        except CopyError as error:
            raise TraceError.about(str(error), found=str(root)) from None
        copy.link([*large, *kept])
        return copy

    def _resume_command(self, copy: Copy, killed: State) -> list[str]:
        if not self.resume_command:
            return []
        files = [copy.tree / path for path in killed.saves[-1]["files"]]
        folders = {file.parent for file in files}
        is_one_file = len(files) == 1 or folders & {copy.tree, copy.start}
        newest = max(files, key=lambda file: file_state(file)[0]) if is_one_file else min(folders)
        words = shlex.split(self.resume_command)
        return [word.replace("{checkpoint}", str(newest)) for word in words]


def _ignored(root: Path) -> list[str]:
    """Return the paths of the files and folders below `root` that git ignores.

    A folder is replaced by the files in it, so that a run writes new files into the copy.
    Exceptions are virtual environments, and folders of more than `MANY` files.
    """
    try:
        words = ("ls-files", "-z", "-oi", "--exclude-standard", "--directory")
        paths = [
            folder / name
            for folder in repository.repositories(root)
            for name in repository.names_by_git(folder, *words)
        ]
    except FAILED:
        paths = [path for path in root.iterdir() if path.is_dir() and is_of_environment(path, root)]
    expanded: list[Path] = []
    for path in paths:
        if path.name == "__pycache__":
            continue
        contents = [path]
        if path.is_dir() and not path.is_symlink() and not is_of_environment(path, root):
            contents = []
            for folder, folders, files in os.walk(path):
                folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
                contents += [Path(folder, file) for file in files]
        expanded += contents if len(contents) <= MANY else [path]
    return [str(path.relative_to(root)) for path in expanded]


def _older_checkpoint(
    whole: State, begins: int, read: Mapping[str, int], written: Mapping[str, int]
) -> str:
    """Return a note with the checkpoint that a run resumed from, if there is a newer one."""
    newest = max(written, key=written.__getitem__)
    used = min(read or written, key=lambda path: (abs(written[path] - begins), -written[path]))
    if max(begins, written[used]) >= written[newest]:
        return ""
    steps = whole.step(written[newest]) - whole.step(begins)
    twice = counted(steps, "step") if steps else f"{written[newest] - begins} of its batches"
    done = f"{twice} {are(steps or written[newest] - begins)} done twice"
    return f"; resumed from {used}; {newest} is newer: {done}"


def _pass_restored(whole: State, resumed: State, written: Collection[int]) -> int | None:
    """Return the number of the pass of the whole run where the resumed run begins.

    At this pass, most parameters of both runs are equal. Parameters with their initial values do
    not count. Several passes can qualify while gradients accumulate, and after skipped steps. Four
    criteria decide between them, in this order: an equal loss, as many passes left in the step,
    equal gradients, and the shortest distance to a number in `written`. If no pass qualifies,
    returns the only number in `written`, or None if there are several.
    """
    restored = resumed.passes[0]
    parameters, initial = restored["parameters"], whole.passes[0]["parameters"]

    def equal_parameters(noted: Mapping[str, Any]) -> int:
        both = noted["parameters"].items()
        return sum(parameters.get(name) == digest != initial.get(name) for name, digest in both)

    equal = [equal_parameters(noted) for noted in whole.passes]
    most = max(equal, default=0)
    if not most:
        return min(*written, len(whole.passes) - 1) if len(written) == 1 else None
    left = resumed.left_of_step(0)

    def difference(number: int) -> tuple[bool, bool, bool, int]:
        noted = whole.passes[number]
        return (
            noted["loss"] != restored["loss"],
            whole.left_of_step(number) != left,
            noted["gradients"] != restored["gradients"],
            min(abs(number - saved) for saved in written),
        )

    return min((number for number, count in enumerate(equal) if count == most), key=difference)


def _unequal(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    return [name for name in left if name in right and left[name] != right[name]]


def _few(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 2} more" if len(names) > 2 else ""  # noqa: PLR2004
    return f"{', '.join(names[:2])}{rest}"


def _changed(name: str, before: str, after: str) -> str:
    if name.startswith(WEIGHTS):
        return f"the {name}"
    return shortened(f"{name} {before} became {after}", LINE)


def _own_values(
    whole: State, killed: State, resumed: State, begins: int, ends: int
) -> dict[str, tuple[str, str]]:
    """Return the program's own values that differ between both runs as pass `ends` begins.

    Ignores values that vary from run to run: the whole and the killed run differ in these too.
    """
    left, right = whole.passes[ends]["own"], resumed.passes[ends - begins]["own"]
    *_, (of_whole, of_killed) = zip(whole.passes, killed.passes, strict=False)
    return {
        name: (left[name], right[name])
        for name in _unequal(left, right)
        if of_whole["own"].get(name) == of_killed["own"].get(name)
    }


def _first_hidden(whole: State, killed: State, resumed: State, begins: int) -> Divergence | None:
    """Return the first difference that only evaluation or later steps would show."""
    both = zip(whole.passes[begins:], resumed.passes, strict=False)
    for number, (left, right) in enumerate(both, start=begins):
        for name in _unequal(left["buffers"], right["buffers"])[:1]:
            what, module = f"buffer {name} differs as the step begins", name.rpartition(".")[0]
            at = 0, whole.step(number), "forward", module, "buffer"
            return Divergence(*at, kind=Kind.VALUES, what=what)
    last = min(len(whole.passes), len(resumed.passes) + begins) - 1
    if last == begins:
        return None  # some values only exist after the first pass
    own_values = _own_values(whole, killed, resumed, begins, last)
    names = [name for name in own_values if name.startswith(WEIGHTS)]
    names += _unequal(whole.passes[last]["scaler"], resumed.passes[last - begins]["scaler"])
    if not names:
        return None
    what = f"{names[0]}, which training does not show, still differs at the end"
    return Divergence(0, whole.step(last), "forward", kind=Kind.VALUES, what=what)


def _lost(
    kind: str, name: str, states: Collection[Any], right: Mapping[str, Any], what: str = ""
) -> NotRestored:
    """Return how a state was lost.

    Either it was never restored to one of `states`, or a later line changed it again. Lines are
    only known from the opening of a checkpoint to the first batch.
    """
    key = name if kind == "generator" else f"{kind} {name}"
    followed = [
        (short(line), state) for changed, line, state in right["followed"] if changed == key
    ]
    restored = [number for number, (_, state) in enumerate(followed) if state in states]
    if not restored or restored[-1] + 1 == len(followed):
        return NotRestored(kind, name, what)
    verb = "drawn from" if kind == "generator" else "changed"
    then = f"then {verb} at {followed[restored[-1] + 1][0]} before the first batch"
    return NotRestored(kind, name, f"{then}: {what}" if what else then, followed[restored[-1]][0])


READ_LATER: Mapping[str, Collection[str]] = {
    "data": ("gradient", "optimizer", "scheduler", "scaler"),
    "forward": ("gradient", "optimizer", "scheduler"),
    "backward": ("optimizer", "scheduler"),
}
"""Phase of the first step -> the kinds of state that are only read after that phase."""


def _not_restored(
    whole: State, resumed: State, begins: int, first: Divergence
) -> Sequence[NotRestored]:
    """Return the state that was not restored, preferably only state that can cause `first`."""
    left, right = whole.passes[begins], resumed.passes[0]
    lost = [
        NotRestored(kind, name)
        for kind in ("parameter", "buffer")
        for name in _unequal(left[f"{kind}s"], right[f"{kind}s"])
    ]
    # Gradients left from the previous step do not count if the program zeroes them before use.
    if left["within"] or first.phase == "backward":
        after = right["gradients"]
        names = [name for name, digest in left["gradients"].items() if digest != after.get(name)]
        lost += [NotRestored("gradient", f"of {_few(names)}")] if names else []

    schedulers = _unequal(left["scheduler"], right["scheduler"])
    by_key: dict[str, list[str]] = {}
    for name, value in left["optimizer"].items():
        key, _, owner = name.partition(" of ")
        is_set_in_each_step = schedulers and owner.startswith("group ")
        if value != right["optimizer"].get(name) and not is_set_in_each_step:
            by_key.setdefault(key, []).append(owner)
    lost += [NotRestored("optimizer", key, f"of {_few(names)}") for key, names in by_key.items()]

    # Counted backwards from the pass: the resumed run may have loaded fewer batches before.
    pairs = [*zip_longest(left["batches"][::-1], right["batches"][::-1])][: len(left["batches"])]
    unlike = [(expected, got) for expected, got in pairs if not got or expected[3] != got[3]]
    for kind in ("scheduler", "scaler", *["sampler"] * bool(unlike)):
        for name in _unequal(left[kind], right[kind]):
            before, after = left[kind][name], right[kind][name]
            fields = [_changed(key, before[key], after[key]) for key in _unequal(before, after)]
            states = [noted[kind].get(name) for noted in whole.passes[begins - 1 : begins + 1]]
            lost.append(_lost(kind, name, states, right, ", ".join(fields[:3])))

    # Generator -> the first step from `begins` on that draws from this generator.
    later = reversed(whole.passes[begins:])
    draws = {name: noted["step"] for noted in later for name in noted["drew"]}
    # Draws of a backward pass or an optimizer are noted with the pass that follows.
    until = first.step + (first.phase in ("backward", "optimizer"))
    unused: list[NotRestored] = []  # generators not drawn from before `first`
    for name, states in left["generators"].items():
        after = right["generators"].get(name, [])
        if states[-1:] != after[-1:]:
            generator = _lost("generator", name, states, right)
            # The order of an epoch is drawn before `begins`. The resumed run draws it again.
            is_drawn = draws.get(name, until + 1) <= until or name in right["drew"]
            is_known = right["is_followed"] or set(states).isdisjoint(after)
            if generator.restored or (name in draws and is_known):
                (lost if name in draws and is_drawn else unused).append(generator)

    for expected, got in reversed(unlike):
        known = {state.kind for state in lost} & {"sampler", "generator"}
        lost += _not_loaded(whole, resumed, expected, got, is_known=bool(known))
    is_first_step = first.step == whole.step(begins)
    unread = READ_LATER.get(first.phase, ()) if is_first_step else ()
    return [state for state in lost if state.kind not in unread] or lost or unused


def _not_loaded(
    whole: State, resumed: State, expected: Any, got: Any, *, is_known: bool
) -> Iterator[NotRestored]:
    """Yield the reasons why a loader returned another batch.

    `is_known` is true if lost state already explains the order of the batches.
    """
    line, epoch, position, _ = expected
    if got is None:
        yield NotRestored("loader", short(line), "it returned no batch")
        return

    def loading(run: State, batch: Any) -> Mapping[str, Any]:
        return run.fetched.get(batch[3], {"batch": batch[3]})

    before, after = loading(whole, expected), loading(resumed, got)
    has_indices = "None" not in after.get("fetched", "None")
    key = "fetched" if has_indices else "batch"  # without indices, batches are compared
    of_loader = [
        (batch, loading(whole, batch))
        for noted in whole.passes
        for batch in noted["batches"]
        if batch[0] == line
    ]
    in_epoch = [(batch, loaded) for batch, loaded in of_loader if batch[1] == epoch]
    same = [batch[2] for batch, loaded in in_epoch if loaded.get(key) == after[key]]
    is_moved = bool(same) and position not in same
    if is_moved or (has_indices and not same):
        if not is_known or (is_moved and got[2] != position):
            became = f"became batch {same[0]}" if is_moved else "has other samples"
            what = f"batch {position} of its epoch {became}"
            yield NotRestored("loader", short(line), what)
    elif before.get("in_worker"):
        lives_on = any(
            batch[1] < epoch and loaded.get("seed") == before["seed"] for batch, loaded in of_loader
        )
        if is_known and not lives_on and before["seed"] != after["seed"]:
            return  # the lost state that is already known has seeded these workers
        for name, state in before["drawn"].items():
            if after.get("drawn", {}).get(name, state) != state:
                drawn_at = before["drew"].get(name) or after["drew"].get(name, "")
                owner = f"{name} of the {'persistent ' if lives_on else ''}workers"
                what = f"drawn from at {short(drawn_at)}" if drawn_at else ""
                yield NotRestored("generator", owner, what)
