"""Whether a program computes the same whatever number of worker processes loads its data."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torchrepro.profile.load import resolve
from torchrepro.relations.related import Relation, Side
from torchrepro.trace.reader import read_run
from torchrepro.verdict.program_text import module_of
from torchrepro.verdict.render import short
from torchrepro.verdict.value import Advice, Kind, Verdict
from torchrepro.verification.at_start import WORKERS
from torchrepro.verification.perturbations import RunEnvironment

if TYPE_CHECKING:
    from typing import Any

    from torchrepro.verdict.program_text import Module
    from torchrepro.verification.result import Run

NUMBERS = (0, 2)


class Workers(Relation):
    """As it is, and with 0 and with 2 workers in every loader."""

    agreement = "it computes the same with 0 and with 2 workers in every loader"
    takes = frozenset(("rtol", "atol", "ignore"))
    loading = False  # what workers compute to load a batch is not seen either

    def sides(self, plain: Run) -> Iterator[Side]:
        loaders = [
            loader
            for trace in read_run(plain.folder, records=False)
            for loader in trace.meta.get("loaders") or ()
        ]
        if not loaders:
            yield Side("0 workers", None, unknown="it iterates no loader of torch's")
            return
        for number in NUMBERS:
            resolved = self.resolved
            loading = resolved.values.get("dataloader") if resolved else None
            if resolved and (loading or {}).get("num_workers") is not None:
                resolved = resolve(resolved, (f"dataloader.num_workers={number}",))
            environment = RunEnvironment(in_process={WORKERS: number})
            run = self.run(f"workers-{number}", environment, resolved=resolved)
            verdict = self.runner.compare(plain, run)
            if not verdict.same:
                verdict = _explained(verdict, plain, run, loaders)
            yield Side(f"{number} workers", run, verdict)
            if not verdict.same:
                return


def _explained(
    verdict: Verdict, plain: Run, other: Run, loaders: Sequence[Mapping[str, Any]]
) -> Verdict:
    first = verdict.first
    if first is None:
        return verdict
    loader = next((each for each in loaders if each["where"] == first.source), loaders[0])
    files = read_run(plain.folder, records=False)[0].meta.get("modules") or ()
    named = str(loader["dataset"])
    modules = [(file, found) for file in files if (found := module_of(file)) is not None]
    lines = [*_lines(modules, named)]
    iterable = bool(loader.get("iterable"))
    if iterable and not any(line.cause is SPLITS for line in lines):
        classes = (
            f"{file}:{node.lineno}"
            for file, module in modules
            for node in module.nodes
            if isinstance(node, ast.ClassDef) and node.name == named
        )
        at = next(classes, first.source)
        much = (
            f": {other.steps} steps instead of {plain.steps}" if plain.steps < other.steps else ""
        )
        cause = (
            f"The IterableDataset {named} does not split itself by worker ({short(at)}), so each "
            f"worker yields all of it{much}. Split it by torch.utils.data.get_worker_info()."
        )
        return replace(
            verdict, first=replace(first, source=at), advice=Advice(cause=cause), reaches=True
        )
    lines = [line for line in lines if not (iterable and line.cause is SPLITS)]
    if not lines or first.kind not in (Kind.DATA, Kind.ONLY_ONE, Kind.ENDED):
        return verdict
    best = min(lines, key=lambda line: [*CAUSES].index(line.cause))
    more = [f"{line.name} at {short(line.where)}" for line in lines if line is not best][:2]
    also = f" It also calls {' and '.join(more)}." if more else ""
    cause = f"{best.name} at {short(best.where)}: {best.cause}.{also}"
    # The batch differs; where the program reads it is known, and where it is made says more.
    return replace(verdict, first=replace(first, source=best.where), advice=Advice(cause=cause))


UNORDERED = "batches are handed over in the order in which workers finish them"
SPLITS = "the number of the worker that loads a sample has a say in it"
OWN = "a generator of the dataset's own, of which each worker process has a copy"
CAUSES: Mapping[str, tuple[str, ...]] = {
    UNORDERED: (),
    SPLITS: ("get_worker_info",),
    "each worker process has a seed of its own": ("torch.initial_seed",),
    "it tells one worker process from another": ("os.getpid", "current_process", "worker_id"),
    "results are taken in the order in which they are ready": (
        *("as_completed", "imap_unordered", "queue.get"),
    ),
    "the files there, and their order, depend on what other workers have written by then": (
        *("os.listdir", "os.scandir", "glob.glob", "iglob", "iterdir"),
    ),
    OWN: (),
    "numpy's global generator, of which each worker process has one of its own": ("numpy.random.",),
    "Python's global generator, of which each worker process has one of its own": ("random.",),
    "torch's global generator, of which each worker process has one of its own": (
        *("torch.rand", "torch.randn", "torch.randint", "torch.randperm", "torch.rand_like"),
        *("torch.randn_like", "torch.bernoulli", "torch.normal", "torch.multinomial"),
        *("normal_", "uniform_", "random_", "bernoulli_", "exponential_"),
    ),
}
"""Why workers matter, the surest cause first, by what the text of a dataset calls.

Calls are given by the ends of their dotted names; all of a module by its name with a dot.
"""

_GENERATORS = ("default_rng", "RandomState", "random.Random", "torch.Generator", "Generator")


class _Line(NamedTuple):
    cause: str
    name: str
    where: str


def _lines(modules: Sequence[tuple[str, Module]], dataset: str) -> Iterator[_Line]:
    """Yield what the class of a dataset calls, and the functions that it calls, by its text."""
    for file, module in modules:
        defined = {
            node.name: node
            for node in module.nodes
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        reached: list[ast.AST] = [defined[dataset]] if dataset in defined else []
        for node in module.nodes:  # what a loader is given besides: collate_fn, worker_init_fn
            if isinstance(node, ast.Call) and module.name(node.func).endswith("DataLoader"):
                given = {word.arg: word.value for word in node.keywords}
                late = given.get("in_order")
                if isinstance(late, ast.Constant) and late.value is False:
                    yield _Line(UNORDERED, "in_order=False", f"{file}:{node.lineno}")
                reached += [
                    defined[value.id]
                    for value in given.values()
                    if isinstance(value, ast.Name) and value.id in defined
                ]
        for outer in reached:
            reached += [
                defined[node.id]
                for node in ast.walk(outer)
                if isinstance(node, ast.Name)
                and node.id in defined
                and not any(defined[node.id] is one for one in reached)
            ]
        own = {
            ast.unparse(target)
            for node in module.nodes
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and module.name(node.value.func).endswith(_GENERATORS)
            for target in node.targets
        }
        inner = (node for outer in reached for node in ast.walk(outer))
        for node in inner:
            if isinstance(node, ast.Call):
                yield from _calls(file, module, node, own)


def _calls(file: str, module: Module, node: ast.Call, own: Iterable[str]) -> Iterator[_Line]:
    called = module.name(node.func)
    where = f"{file}:{node.lineno}"
    owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    given = [ast.unparse(each.value) for each in node.keywords if each.arg == "generator"]
    if ast.unparse(owner) in own or any(each in own for each in given):
        yield _Line(OWN, ast.unparse(node.func), where)
        return
    if called.endswith(_GENERATORS):
        return
    for cause, names in CAUSES.items():
        if any(
            called.startswith(name) if name.endswith(".") else f".{called}".endswith(f".{name}")
            for name in names
        ):
            yield _Line(cause, called.strip("."), where)
            return
