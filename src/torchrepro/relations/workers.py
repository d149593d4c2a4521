"""Whether a program computes the same whatever number of worker processes loads its data."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.profile.load import resolve
from torchrepro.relations.related import Relation, Side
from torchrepro.seeding.uncontrolled import WORKER
from torchrepro.trace.reader import read_run
from torchrepro.verdict.program_text import module_of
from torchrepro.verdict.render import short
from torchrepro.verdict.value import Advice
from torchrepro.verification.at_start import WORKERS
from torchrepro.verification.held_sources import HELD_AT_ONCE, TELL_OF_WORKER
from torchrepro.verification.perturbations import RunEnvironment, holding

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.result import Run

NUMBERS = (0, 2)

OBSERVER = "relations.loading_observer:observe_loading"

MOST = 20  # runs that all trials of a difference take at most


class Workers(Relation):
    """As it is, and with 0 and with 2 workers in every loader."""

    agreement = "it computes the same with 0 and with 2 workers in every loader"
    takes = frozenset(("rtol", "atol", "ignore"))
    loading = False  # what workers compute to load a batch is not seen either

    def sides(self, plain: Run) -> Iterator[Side]:
        loaders = _meta(plain, "loaders")
        if not loaders:
            yield Side("0 workers", None, unknown="it iterates no loader of torch's")
            return
        has_workers = any(each["workers"] for each in loaders)
        as_it_is = _Way(plain, RunEnvironment(), self.resolved, has_workers=has_workers)
        for number in NUMBERS:
            resolved = self.resolved
            loading = resolved.values.get("dataloader") if resolved else None
            if resolved and (loading or {}).get("num_workers") is not None:
                resolved = resolve(resolved, (f"dataloader.num_workers={number}",))
            environment = RunEnvironment(in_process={WORKERS: number})
            run = self.run(f"workers-{number}", environment, resolved=resolved)
            verdict = self.runner.compare(plain, run)
            if verdict.first and run.status == plain.status:
                other = _Way(run, environment, resolved, has_workers=number > 0)
                verdict = _Trials(self, (as_it_is, other)).explained(verdict)
            yield Side(f"{number} workers", run, verdict)
            if not verdict.same:
                return


@dataclass(frozen=True, slots=True)
class _Way:
    """One of two ways to run a program, which differ in their numbers of workers."""

    run: Run
    environment: RunEnvironment
    resolved: ResolvedProfile | None
    has_workers: bool


class _Trial(NamedTuple):
    """One change of both ways, and the cause that is shown where they agree with it."""

    change: str
    cause: str
    where: str = ""
    loader: Mapping[str, Any] = {}  # attributes of every loader
    reset: Sequence[str] = ()  # generators
    held: Mapping[str, Sequence[str]] = {}  # sources, each at some lines


class _Trials:
    """Runs both ways with one thing changed at a time."""

    def __init__(self, relation: Workers, ways: Sequence[_Way]) -> None:
        self._relation = relation
        self._ways = sorted(ways, key=attrgetter("has_workers"))
        self._runs = 0

    def explained(self, verdict: Verdict) -> Verdict:
        """Return the verdict with the cause that a record or a trial has shown, if any has."""
        tried: list[str] = []
        for trial in self._trials():
            if not trial.change or self._agree(trial):
                change = f"with {trial.change}, runs agree" if trial.change else ""
                first = verdict.first and replace(
                    verdict.first, source=trial.where or verdict.first.source
                )
                advice = Advice(cause=trial.cause, tried=change)
                return replace(verdict, first=first, advice=advice, reaches=True)
            tried.append(trial.change)
        cause = f"Not known. Runs differ as before with {'; with '.join(tried)}."
        return replace(verdict, advice=Advice(cause=cause if tried else "Not known."))

    def _agree(self, trial: _Trial) -> bool:
        if self._runs + len(self._ways) > MOST:
            return False
        runs = []
        for way in self._ways:
            if not way.has_workers and trial.loader:
                runs.append(way.run)
                continue
            runs.append(self._run(way, trial))
            if runs[-1].status != way.run.status or bool(runs[-1].steps) != bool(way.run.steps):
                return False
        return self._relation.runner.compare(*runs).same

    def _run(self, way: _Way, trial: _Trial) -> Run:
        self._runs += 1
        told = {OBSERVER: {"loader": trial.loader, "reset": trial.reset}}
        runner = replace(self._relation.runner, limit=20 + 10 * way.run.seconds)
        environment = way.environment | (holding(trial.held) if trial.held else RunEnvironment())
        name = f"trial-{self._runs}"
        return self._relation.run(name, environment, told, way.resolved, runner)

    def _trials(self) -> Iterator[_Trial]:
        """Yield what may be why: what takes no trial first, then the changes that take one run."""
        without, loaded = (
            [*self._relation.noted(self._run(way, _Trial("", "")))] for way in self._ways
        )
        run = self._ways[1].run
        files = _Text([str(file) for file in _meta(run, "modules")])
        for name in _undivided(without, loaded):
            where = files.last(lambda node, name=name: getattr(node, "name", "") == name)  # type: ignore[misc]
            yield _Trial(
                "",
                f"The IterableDataset {name} does not split itself by worker ({short(where)}), so "
                "each worker yields all of it. Split it by torch.utils.data.get_worker_info().",
                where,
            )
        begun = [note for notes in loaded for note in notes if "loader" in note]
        if any(note["loader"]["in_order"] is False for note in begun):
            where = files.last(
                lambda node: isinstance(node, ast.keyword) and node.arg == "in_order"
            )
            what = "batches are handed over in the order in which workers finish them"
            cause = f"in_order=False{_at(where)}: {what}."
            yield _Trial("in_order=True", cause, where, {"in_order": True})
        if any(note["loader"]["persistent_workers"] for note in begun):
            names = _changed(begun, begun) if _fetched(without) == _fetched(loaded) else []
            where = files.assigned(names)
            cause = (
                "The workers live on (persistent_workers=True), and new ones give other results."
            )
            if names:
                cause = (
                    f"{' and '.join(names)} is set{_at(where)} after the persistent workers began."
                )
            anew = {"persistent_workers": False}
            yield _Trial("new workers for each epoch", cause, where, anew)
        for init in dict.fromkeys(its["worker_init_fn"] for its in _meta(run, "loaders")):
            if init:
                name, _, where = init.partition(" at ")
                _, _, path = where.rpartition("-packages/")
                of = f" of {path.partition('/')[0]}" if path else ""
                cause = f"The worker_init_fn of the loader: {name}{of}{_at(where)}."
                yield _Trial("no worker_init_fn", cause, where, {"worker_init_fn": None})
        started = {note["loader"]["start_method"] for note in begun} - {"fork"}
        if started:
            names = _changed(begun, [n for notes in loaded for n in notes if n["in_worker"]])
            where, how = files.assigned(names), " and ".join(sorted(started))
            lack = f"do not have {' and '.join(names)} as the main process has it{_at(where)}"
            cause = f"Workers that begin by {how} {lack if names else 'give other results'}."
            yield _Trial("workers that are forked", cause, where, {"start_method": "fork"})
        draws: dict[str, str] = {}
        for note in chain(*without, *loaded):
            draws = {**note.get("drew", {}), **draws}
        for names in [[name] for name in draws] + [[*draws]] * (len(draws) > 1):
            drawn = [f"{GLOBAL.get(name, name)}{_at(draws[name])}" for name in names]
            cause = f"{' and '.join(drawn)}: each worker process has its own."
            change = "each batch begun with the same state of it"
            yield _Trial(change, f"Draws from {cause}", draws[names[0]], reset=names)
        for name, what, where in self._sources(files):
            change = f"{name}{_at(where)} held the same"
            held = {what: ["/".join(where.split("/")[-2:])]}
            yield _Trial(change, f"{name}{_at(where)}: {what}.", where, held=held)

    def _sources(self, files: _Text) -> Iterator[tuple[str, str, str]]:
        for module, name in TELL_OF_WORKER:
            for where in files.calls(name):
                yield f"{module}.{name}", WORKER, where
        for read in _meta(self._ways[1].run, "sources"):
            if read["in_sample"] and read["what"] in HELD_AT_ONCE:
                yield read["name"], read["what"], read["where"]


GLOBAL = {
    "random": "Python's global generator",
    "numpy.random": "numpy's global generator",
    "torch": "torch's global generator",
}


class _Text:
    """The files of the program, in which lines are found of what is known to be there."""

    def __init__(self, files: Sequence[str]) -> None:
        self._modules = {file: module for file in files if (module := module_of(file))}

    def every(self, fits: Callable[[Any], bool]) -> list[str]:
        return [
            f"{file}:{node.lineno}"
            for file, module in self._modules.items()
            for node in module.nodes
            if fits(node)
        ]

    def last(self, fits: Callable[[Any], bool]) -> str:
        return next(reversed(self.every(fits)), "")

    def calls(self, name: str) -> list[str]:
        return self.every(
            lambda node: (
                isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
            )
        )

    def assigned(self, names: Sequence[str]) -> str:
        """Return the last line that assigns one of these, other than where an object is made."""
        nodes = [node for module in self._modules.values() for node in module.nodes]
        made = {
            inner
            for node in nodes
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            for inner in (ast.walk(node) if node.name == "__init__" else node.body)
            if isinstance(node, ast.ClassDef) or node.name == "__init__"
        }
        words = {name.partition(" of ")[0].partition("[")[0] for name in names}

        def fits(node: Any) -> bool:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            return isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and any(
                node not in made and getattr(each, "attr", getattr(each, "id", "")) in words
                for each in targets
            )

        return self.last(fits)


def _at(where: str) -> str:
    return f" at {short(where)}" if where else ""


def _meta(run: Run, key: str) -> list[Any]:
    """Return the entries of a list in the traces of a run."""
    traces = read_run(run.folder, records=False)
    found = [each for trace in traces for each in trace.meta.get(key) or ()]
    for trace in traces:
        trace.close()
    return found


def _changed(begun: Sequence[Any], later: Sequence[Any]) -> list[str]:
    """Return what code of the program reads and has another value than a loader began with."""
    first: dict[str, Mapping[str, str]] = {}
    found: dict[str, None] = {}
    for note in begun:
        first.setdefault(note["dataset"], note["read"])
    for note in later:
        before, now = first.get(note["dataset"], {}), note.get("read")
        for name in {} if now is None else {**before, **now}:
            if before.get(name) != now.get(name):
                found[name] = None
    return [*found]


def _fetched(notes: Sequence[Sequence[Any]]) -> list[str]:
    return sorted(note["fetched"] for note in chain(*notes) if "fetched" in note)


def _undivided(without: Sequence[Sequence[Any]], loaded: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield datasets of which every worker yields what a program without workers reads."""

    def batches(notes: Sequence[Any], name: str) -> list[str]:
        is_item = ("None", "[None")
        return [
            note["value"]
            for note in notes
            if note["dataset"] == name and note.get("fetched", "").startswith(is_item)
        ]

    for name in dict.fromkeys(note["dataset"] for note in chain(*loaded)):
        whole = batches([*chain(*without)], name)
        each = [found for notes in loaded if (found := batches(notes, name))]
        if len(each) > 1 and all(found == whole[: len(found)] for found in each):
            yield name
