"""Checks whether a program computes the same with and without workers in its loaders."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.profile.load import resolve
from torchrepro.seeding.nondeterministic_calls import WORKER
from torchrepro.verdict.diagnosis import PAGES
from torchrepro.verdict.program_text import module_of
from torchrepro.verdict.render import short
from torchrepro.verdict.value import Advice
from torchrepro.verification.at_start import WORKERS
from torchrepro.verification.perturbations import NO_CHANGE, RunEnvironment, pinning
from torchrepro.verification.pinned_sources import IDENTIFY_WORKER, PINNED_TOGETHER
from torchrepro.verification.relations.variants import Relation, Variant
from torchrepro.verification.runner import rows_of

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.result import Run

NUMBERS = (0, 2)

OBSERVER = "verification.relations.loading_observer:observe_loading"

MOST = 20  # the limit of runs for all trials of one difference


class Workers(Relation):
    """The relation between a program and its variants with 0 and with 2 workers in each loader."""

    agreement = "it computes the same with 0 and with 2 workers in every loader"
    takes = frozenset(("rtol", "atol", "ignore"))
    loading = False  # ops that load batches are not recorded, as in workers

    def variants(self, plain: Run) -> Iterator[Variant]:
        loaders = rows_of(plain, "loaders")
        if not loaders:
            yield Variant("0 workers", None, unknown="it iterates no torch DataLoader")
            return
        has_workers = any(loader["workers"] for loader in loaders)
        as_it_is = _Setup(plain, NO_CHANGE, self.resolved, has_workers=has_workers)
        for number in NUMBERS:
            resolved = self.resolved
            loading = resolved.values.get("dataloader") if resolved else None
            if resolved and (loading or {}).get("num_workers") is not None:
                resolved = resolve(resolved, (f"dataloader.num_workers={number}",))
            environment = RunEnvironment(in_process={WORKERS: number})
            run = self.run(f"workers-{number}", environment, resolved=resolved)
            verdict = self.runner.compare(plain, run)
            if verdict.first and run.status == plain.status:
                changed = _Setup(run, environment, resolved, has_workers=number > 0)
                verdict = _Trials(self, (as_it_is, changed)).explained(verdict)
            yield Variant(f"{number} workers", run, verdict)
            if not verdict.same:
                return


@dataclass(frozen=True, slots=True)
class _Setup:
    """A run of the program with its settings. Two setups differ in the number of workers."""

    run: Run
    environment: RunEnvironment
    resolved: ResolvedProfile | None
    has_workers: bool


class _Trial(NamedTuple):
    """A change to both setups, and the cause to report if their runs agree with the change."""

    change: str  # empty if the notes already show the cause, so that no run is needed
    cause: str
    line: str = ""
    loader: Mapping[str, Any] = {}  # attributes of every loader
    reset: Sequence[str] = ()  # generators that start each batch in one fixed state
    pins: Mapping[str, Sequence[str]] = {}  # source -> program lines


class _Trials:
    """Looks for the cause of a difference, by runs of both setups with one change at a time."""

    def __init__(self, relation: Workers, setups: Sequence[_Setup]) -> None:
        self._relation = relation
        self._setups = sorted(setups, key=attrgetter("has_workers"))
        self._runs = 0

    def explained(self, verdict: Verdict) -> Verdict:
        """Return `verdict` with the cause that a trial shows, or else with ``Not known``."""
        tried: list[str] = []
        for trial in self._trials():
            if trial.change and self._runs + len(self._setups) > MOST:
                break
            if not trial.change or self._agree(trial):
                change = f"with {trial.change}, runs agree" if trial.change else ""
                first = verdict.first
                if first and trial.line:
                    first = replace(first, source=trial.line)
                advice = Advice(trial.cause, tried=change, cause_id=PAGES[WORKER])
                return replace(verdict, first=first, advice=advice, reaches=True)
            tried.append(trial.change)
        differ = f" Runs do not agree with {'; nor with '.join(tried)}." if tried else ""
        advice = Advice(f"Not known.{differ}", cause_id=PAGES[WORKER])
        return replace(verdict, advice=advice)

    def _agree(self, trial: _Trial) -> bool:
        runs = []
        for setup in self._setups:
            # The trial's loader attributes have no effect on a loader without workers.
            has_effect = setup.has_workers or not trial.loader
            run = self._run(setup, trial) if has_effect else setup.run
            if run.status != setup.run.status or bool(run.steps) != bool(setup.run.steps):
                return False
            runs.append(run)
        return self._relation.runner.compare(*runs).same

    def _run(self, setup: _Setup, trial: _Trial) -> Run:
        self._runs += 1
        observers = {OBSERVER: {"loader": trial.loader, "reset": trial.reset}}
        runner = replace(self._relation.runner, limit=20 + 10 * setup.run.seconds)
        pins = pinning(trial.pins) if trial.pins else NO_CHANGE
        name, environment = f"trial-{self._runs}", setup.environment | pins
        return self._relation.run(name, environment, observers, setup.resolved, runner)

    def _trials(self) -> Iterator[_Trial]:
        """Yield the possible causes. The first causes take the fewest runs to test."""
        # One list of notes for each process, without workers and with workers.
        without, loaded = (
            self._relation.notes_of(self._run(setup, _Trial("", ""))) for setup in self._setups
        )
        run = self._setups[1].run
        files = rows_of(run, "modules")
        for name in _undivided(without, loaded):
            line = _last_line(files, lambda node, name=name: getattr(node, "name", "") == name)  # type: ignore[misc]
            cause = (
                f"The IterableDataset {name} does not split itself by worker ({short(line)}), so "
                "each worker yields all of it. Split it by torch.utils.data.get_worker_info()."
            )
            yield _Trial("", cause, line)
        begun = [note for note in chain(*loaded) if "loader" in note]
        if any(note["loader"]["in_order"] is False for note in begun):
            line = _last_line(files, lambda node: getattr(node, "arg", "") == "in_order")
            what = "batches are handed over in the order in which workers finish them"
            cause = f"in_order=False{_at(line)}: {what}."
            yield _Trial("in_order=True", cause, line, {"in_order": True})
        if any(note["loader"]["persistent_workers"] for note in begun):
            has_equal_indices = _indices(without) == _indices(loaded)
            names = _changed(begun, begun) if has_equal_indices else []
            lines = [begun[-1]["set"].get(name, "") for name in names]
            line = next(filter(None, lines), "")
            attributes = [f"{name}{_at(line)}" for name, line in zip(names, lines, strict=True)]
            cause = f"{' and '.join(attributes)}: set after the persistent workers began."
            if not names:
                cause = "persistent_workers=True: new workers for each epoch give other results."
            not_persistent = {"persistent_workers": False}
            yield _Trial("new workers for each epoch", cause, line, not_persistent)
        init_functions = (loader["worker_init_fn"] for loader in rows_of(run, "loaders"))
        inits = dict.fromkeys(filter(None, init_functions))
        if inits:
            described = []
            for name, _, line in (init.partition(" at ") for init in inits):
                _, is_package, path = line.rpartition("-packages/")
                package = f" of {path.partition('/')[0]}" if is_package else ""
                described.append(f"{name}{package}{_at(line)}")
            cause = f"worker_init_fn: {' and '.join(described)}."
            line = next(iter(inits)).partition(" at ")[2]
            yield _Trial("no worker_init_fn", cause, line, {"worker_init_fn": None})
        started = {note["loader"]["start_method"] for note in begun} - {"fork"}
        if started:
            of_workers = [note for note in chain(*loaded) if note["in_worker"]]
            names = _changed(begun, of_workers)
            effect = f"have another value of {' and '.join(names)} than the main process"
            methods = " and ".join(sorted(started))
            cause = f"Workers started by {methods} {effect if names else 'give other results'}."
            yield _Trial("forked workers", cause, loader={"start_method": "fork"})
        draws: dict[str, str] = {}
        for note in chain(*loaded, *without):
            draws |= note.get("drew", {})
        for drawn in [[name] for name in draws] + [[*draws]] * (len(draws) > 1):
            from_all = " and ".join(f"{GLOBAL.get(name, name)}{_at(draws[name])}" for name in drawn)
            cause = f"Draws from {from_all}: each worker process has its own."
            change = f"the same state of {' and '.join(drawn)} as each batch begins"
            yield _Trial(change, cause, draws[drawn[0]], reset=drawn)
        reads = [
            (".".join(function), WORKER, line)
            for function in IDENTIFY_WORKER
            for line in _lines(files, lambda node, name=function[1]: _calls(node, name))  # type: ignore[misc]
        ]
        reads += [
            (read["name"], read["what"], read["where"])
            for read in rows_of(run, "sources")
            if read["in_sample"] and read["what"] in PINNED_TOGETHER
        ]
        for name, source, line in reads:
            cause = f"{source[:1].upper()}{source[1:]}: {name}{_at(line)}."
            pins = {source: ["/".join(line.split("/")[-2:])]}
            yield _Trial(f"{name}{_at(line)} pinned", cause, line, pins=pins)


GLOBAL = {
    "random": "Python's global generator",
    "numpy.random": "numpy's global generator",
    "torch": "torch's global generator",
}


def _at(line: str) -> str:
    return f" at {short(line)}" if line else ""


def _calls(node: Any, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name


def _lines(files: Sequence[str], fits: Callable[[Any], bool]) -> list[str]:
    nodes: list[tuple[str, Any]] = [(file, n) for file in files for n in module_of(file).nodes]
    return [f"{file}:{node.lineno}" for file, node in nodes if fits(node)]


def _last_line(files: Sequence[str], fits: Callable[[Any], bool]) -> str:
    return next(reversed(_lines(files, fits)), "")


def _changed(begun: Sequence[Any], later: Sequence[Any]) -> list[str]:
    """Return the names of values that changed after the first loader of a dataset began."""
    first = {note["dataset"]: note["read"] for note in reversed(begun)}
    changed: dict[str, None] = {}
    for note in later:
        before, after = first.get(note["dataset"], {}), note.get("read", {})
        names = {**before, **after} if after else {}
        unequal = (name for name in names if before.get(name) != after.get(name))
        changed |= dict.fromkeys(name for name in unequal if "[" not in name)
    return [*changed]


def _indices(notes: Sequence[Sequence[Any]]) -> list[str]:
    return sorted(note["fetched"] for note in chain(*notes) if "fetched" in note)


def _undivided(without: Sequence[Sequence[Any]], loaded: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield iterable datasets that every worker loads from the start, so that batches repeat."""

    def batches(notes: Sequence[Any], name: str) -> list[str]:
        fetched = [note for note in notes if note["dataset"] == name and "fetched" in note]
        return [note["batch"] for note in fetched if note["fetched"].startswith(("None", "[None"))]

    for name in dict.fromkeys(note["dataset"] for note in chain(*loaded)):
        whole = batches([*chain(*without)], name)
        by_worker = [batches(notes, name) for notes in loaded]
        shares = [share for share in by_worker if share]
        if len(shares) > 1 and all(share == whole[: len(share)] for share in shares):
            yield name
