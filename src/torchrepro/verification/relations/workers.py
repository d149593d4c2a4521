"""Whether a program computes the same whatever number of worker processes loads its data."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.profile.load import resolve
from torchrepro.seeding.nondeterministic_calls import WORKER
from torchrepro.trace.reader import read_run
from torchrepro.verdict.program_text import module_of
from torchrepro.verdict.render import short
from torchrepro.verdict.value import Advice
from torchrepro.verification.at_start import WORKERS
from torchrepro.verification.perturbations import RunEnvironment, pinning
from torchrepro.verification.pinned_sources import IDENTIFY_WORKER, PINNED_TOGETHER
from torchrepro.verification.relations.variants import Relation, Variant

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Verdict
    from torchrepro.verification.result import Run

NUMBERS = (0, 2)

OBSERVER = "verification.relations.loading_observer:observe_loading"

MOST = 20  # runs that all trials of a difference take at most


class Workers(Relation):
    """As it is, and with 0 and with 2 workers in every loader."""

    agreement = "it computes the same with 0 and with 2 workers in every loader"
    takes = frozenset(("rtol", "atol", "ignore"))
    loading = False  # what workers compute to load a batch is not seen either

    def sides(self, plain: Run) -> Iterator[Variant]:
        loaders = _meta(plain, "loaders")
        if not loaders:
            yield Variant("0 workers", None, unknown="it iterates no loader of torch's")
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
            yield Variant(f"{number} workers", run, verdict)
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

    change: str  # empty where records show the cause
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
        """Return the verdict with the cause that records or a trial have shown, if any has."""
        tried: list[str] = []
        for trial in self._trials():
            if trial.change and self._runs + len(self._ways) > MOST:
                break
            if not trial.change or self._agree(trial):
                change = f"with {trial.change}, runs agree" if trial.change else ""
                first = verdict.first
                if first and trial.where:
                    first = replace(first, source=trial.where)
                advice = Advice(cause=trial.cause, tried=change)
                return replace(verdict, first=first, advice=advice, reaches=True)
            tried.append(trial.change)
        differ = f" Runs do not agree with {'; nor with '.join(tried)}." if tried else ""
        return replace(verdict, advice=Advice(cause=f"Not known.{differ}"))

    def _agree(self, trial: _Trial) -> bool:
        runs = []
        for way in self._ways:
            # A loader without workers has no use for its other attributes.
            changes = way.has_workers or not trial.loader
            runs.append(self._run(way, trial) if changes else way.run)
            if runs[-1].status != way.run.status or bool(runs[-1].steps) != bool(way.run.steps):
                return False
        return self._relation.runner.compare(*runs).same

    def _run(self, way: _Way, trial: _Trial) -> Run:
        self._runs += 1
        told = {OBSERVER: {"loader": trial.loader, "reset": trial.reset}}
        runner = replace(self._relation.runner, limit=20 + 10 * way.run.seconds)
        environment = way.environment | (pinning(trial.held) if trial.held else RunEnvironment())
        name = f"trial-{self._runs}"
        return self._relation.run(name, environment, told, way.resolved, runner)

    def _trials(self) -> Iterator[_Trial]:
        """Yield what may be the cause, at first what takes no run or one."""
        # What each process of both ways has noted.
        without, loaded = (
            self._relation.noted(self._run(way, _Trial("", ""))) for way in self._ways
        )
        run = self._ways[1].run
        files = _meta(run, "modules")
        for name in _undivided(without, loaded):
            where = _last_line(files, lambda node, name=name: getattr(node, "name", "") == name)  # type: ignore[misc]
            cause = (
                f"The IterableDataset {name} does not split itself by worker ({short(where)}), so "
                "each worker yields all of it. Split it by torch.utils.data.get_worker_info()."
            )
            yield _Trial("", cause, where)
        begun = [note for note in chain(*loaded) if "loader" in note]
        if any(note["loader"]["in_order"] is False for note in begun):
            where = _last_line(files, lambda node: getattr(node, "arg", "") == "in_order")
            what = "batches are handed over in the order in which workers finish them"
            cause = f"in_order=False{_at(where)}: {what}."
            yield _Trial("in_order=True", cause, where, {"in_order": True})
        if any(note["loader"]["persistent_workers"] for note in begun):
            drawn_alike = _indices(without) == _indices(loaded)
            names = _changed(begun, begun) if drawn_alike else []
            lines = [begun[-1]["set"].get(name, "") for name in names]
            where = next(filter(None, lines), "")
            each = [f"{name}{_at(line)}" for name, line in zip(names, lines, strict=True)]
            cause = f"{' and '.join(each)}: set after the persistent workers began."
            if not names:
                cause = (
                    "The workers live on (persistent_workers=True); new ones give other results."
                )
            anew = {"persistent_workers": False}
            yield _Trial("new workers for each epoch", cause, where, anew)
        inits = dict.fromkeys(
            filter(None, (its["worker_init_fn"] for its in _meta(run, "loaders")))
        )
        if inits:
            each = []
            for name, _, line in (init.partition(" at ") for init in inits):
                _, is_package, path = line.rpartition("-packages/")
                of = f" of {path.partition('/')[0]}" if is_package else ""
                each.append(f"{name}{of}{_at(line)}")
            cause, where = (
                f"worker_init_fn: {' and '.join(each)}.",
                next(iter(inits)).partition(" at ")[2],
            )
            yield _Trial("no worker_init_fn", cause, where, {"worker_init_fn": None})
        started = {note["loader"]["start_method"] for note in begun} - {"fork"}
        if started:
            of_workers = [note for note in chain(*loaded) if note["in_worker"]]
            names = _changed(begun, of_workers)
            lack = f"have another value of {' and '.join(names)} than the main process"
            how = " and ".join(sorted(started))
            cause = f"Workers that begin by {how} {lack if names else 'give other results'}."
            yield _Trial("workers that are forked", cause, loader={"start_method": "fork"})
        draws: dict[str, str] = {}
        for note in chain(*loaded, *without):
            draws |= note.get("drew", {})
        for drawn in [[name] for name in draws] + [[*draws]] * (len(draws) > 1):
            from_all = " and ".join(f"{GLOBAL.get(name, name)}{_at(draws[name])}" for name in drawn)
            cause = f"Draws from {from_all}: each worker process has its own."
            change = f"the same state of {' and '.join(drawn)} as each batch begins"
            yield _Trial(change, cause, draws[drawn[0]], reset=drawn)
        reads = [
            (".".join(function), WORKER, where)
            for function in IDENTIFY_WORKER
            for where in _lines(files, lambda node, own=function[1]: _calls(node, own))  # type: ignore[misc]
        ]
        reads += [
            (read["name"], read["what"], read["where"])
            for read in _meta(run, "sources")
            if read["in_sample"] and read["what"] in PINNED_TOGETHER
        ]
        for name, what, where in reads:
            cause = f"{what[:1].upper()}{what[1:]}: {name}{_at(where)}."
            held = {what: ["/".join(where.split("/")[-2:])]}
            yield _Trial(f"{name}{_at(where)} held the same", cause, where, held=held)


GLOBAL = {
    "random": "Python's global generator",
    "numpy.random": "numpy's global generator",
    "torch": "torch's global generator",
}


def _at(where: str) -> str:
    return f" at {short(where)}" if where else ""


def _calls(node: Any, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name


def _lines(files: Sequence[str], fits: Callable[[Any], bool]) -> list[str]:
    nodes = [(file, node) for file in files for node in getattr(module_of(file), "nodes", ())]
    return [f"{file}:{node.lineno}" for file, node in nodes if fits(node)]


def _last_line(files: Sequence[str], fits: Callable[[Any], bool]) -> str:
    return next(reversed(_lines(files, fits)), "")


def _meta(run: Run, key: str) -> list[Any]:
    """Return the entries of a list in the traces of a run."""
    traces = read_run(run.folder, records=False)
    for trace in traces:
        trace.close()
    return [each for trace in traces for each in trace.meta.get(key) or ()]


def _changed(begun: Sequence[Any], later: Sequence[Any]) -> list[str]:
    """Return the names of what has another value than as its loader first began."""
    first = {note["dataset"]: note["read"] for note in reversed(begun)}
    names: dict[str, None] = {}
    for note in later:
        one, other = first.get(note["dataset"], {}), note.get("read", {})
        unequal = (name for name in {**one, **other} if other and one.get(name) != other.get(name))
        names |= dict.fromkeys(name for name in unequal if "[" not in name)
    return [*names]


def _indices(notes: Sequence[Sequence[Any]]) -> list[str]:
    return sorted(note["fetched"] for note in chain(*notes) if "fetched" in note)


def _undivided(without: Sequence[Sequence[Any]], loaded: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Yield datasets without indices of which every worker yields what is read without workers."""

    def batches(notes: Sequence[Any], name: str) -> list[str]:
        its = [note for note in notes if note["dataset"] == name and "fetched" in note]
        return [note["batch"] for note in its if note["fetched"].startswith(("None", "[None"))]

    for name in dict.fromkeys(note["dataset"] for note in chain(*loaded)):
        whole = batches([*chain(*without)], name)
        each = [found for notes in loaded if (found := batches(notes, name))]
        if len(each) > 1 and all(found == whole[: len(found)] for found in each):
            yield name
