"""Static search of a program's source: lines whose results may vary, and suggested edits.

A recording only observes calls of functions that it can wrap. It cannot wrap types written in C, or
observe the order of a set. This module finds uses of both in the source, which it parses but never
runs.
An edit is one line of the program before and after the change. It replaces an expression that the
syntax tree of the line contains. A line without such an expression has no edit.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from math import inf
from stat import S_ISREG
from typing import TYPE_CHECKING

from torchrepro.ground.errors import printable
from torchrepro.seeding.call_records import ObservedCall
from torchrepro.seeding.nondeterministic_calls import (
    ADDRESS,
    CLOCK,
    CLOCK_AND_CARD,
    ENTROPY,
    EXPLICIT_SEED,
    FILES,
    FORKED,
    HASH,
    OWN_GENERATOR,
    PROCESS,
    SET_ORDER,
    THREADS,
    UNINITIALIZED_MEMORY,
    WORKER,
)
from torchrepro.verdict.render import short, source_line
from torchrepro.verdict.value import Edit, NondeterministicRead

if TYPE_CHECKING:
    Node = ast.expr | ast.stmt | ast.keyword
    Replacement = tuple[Node, str]  # a node of a line, its new source

LARGEST = 1 << 20  # bytes; larger files are not read

SEED = "1234"

_CALLS = {
    name: cause
    for cause, names in {
        CLOCK: "datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today "
        "datetime.date.today time.time time.time_ns time.monotonic time.monotonic_ns "
        "time.perf_counter time.perf_counter_ns time.process_time time.process_time_ns "
        "timeit.default_timer pandas.Timestamp.now",
        ADDRESS: "id",
        THREADS: "concurrent.futures.as_completed asyncio.as_completed",
        UNINITIALIZED_MEMORY: (
            "numpy.empty numpy.empty_like torch.empty torch.empty_like torch.empty_strided"
        ),
    }.items()
    for name in names.split()
}
_METHODS = {"imap_unordered": THREADS, "new_empty": UNINITIALIZED_MEMORY}

# `_SEEDED` and `_SEEDING_METHODS` draw entropy if they are called without a seed. `_SEEDING` has
# all functions that take a seed, by the last component of their names.
_SEEDED = {
    *("numpy.random.RandomState", "numpy.random.SeedSequence", "numpy.random.default_rng"),
    *("numpy.random.PCG64", "numpy.random.PCG64DXSM", "numpy.random.MT19937"),
    *("numpy.random.Philox", "numpy.random.SFC64", "random.Random"),
}
_SEEDING_METHODS = ("seed", "manual_seed", "manual_seed_all")
_SEEDING = {
    *(*_SEEDING_METHODS, "seed_all", "seed_everything", "set_seed"),
    *("default_rng", "Random", "RandomState", "SeedSequence", "Generator", "PCG64", "Philox"),
}
_BECOME_SEEDS = {CLOCK, CLOCK_AND_CARD, ENTROPY, PROCESS, ADDRESS, HASH}
_SOURCES_OF_SEEDS = {*_BECOME_SEEDS, WORKER}
"""Causes that can explain a differing seed in two runs on one machine."""

_GIVE_BYTES = {"urandom", "token_bytes", "randbytes"}
_DRAWN = {  # functions that draw from the system, with their equivalents in `random`
    "urandom": "randbytes",
    "token_bytes": "randbytes",
    "randbelow": "randrange",
    "choice": "choice",
    "randbits": "getrandbits",
}
_WRITTEN = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}
_POOLS = ("ThreadPoolExecutor", "ProcessPoolExecutor", "Pool", "ThreadPool")
_WORKERS = ("max_workers", "processes")  # the parameters of these pools for their size

_MAKES_SET = ("set", "frozenset")
_SET_OPERATORS = ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor
_SET_METHODS = ("union", "intersection", "difference", "symmetric_difference", "copy")
_ORDERED = ("list", "tuple", "enumerate", "iter", "zip", "map", "filter", "sum", "dict.fromkeys")
_ORDERED_METHODS = ("join", "extend", "fromkeys")
TIES = ("sorted", "min", "max")  # with a key, ties are broken by the order of the input
_WITHOUT_ORDER = ("sorted", "set", "frozenset", "len", "min", "max", "any", "all")
_VIEWS = ("keys", "items")  # views of a dict; an operator between two views makes a set


class Module:
    """A parsed file: its lines, and the nodes of its syntax tree."""

    def __init__(self, file: str = "", text: str = "") -> None:
        self.file, self.text = file, text
        self.lines = text.split("\n")
        self.nodes = list(ast.walk(ast.parse(text)))
        self.of_line: dict[int, list[ast.AST]] = {}  # the nodes that begin on each line
        self.imported: dict[str, str] = {}  # local name -> full dotted name
        for node in self.nodes:
            self.of_line.setdefault(getattr(node, "lineno", 0), []).append(node)
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.partition(".")[0]
                    self.imported[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"

    def name(self, node: ast.AST) -> str:
        """Return the full dotted name of an expression: ``numpy.empty`` for ``np.empty``."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        first = self.imported.get(node.id, node.id) if isinstance(node, ast.Name) else ""
        return ".".join([first, *path])

    def called(self, call: ast.Call) -> str:
        """Return the last part of the full name of a called function."""
        return self.name(call.func).rpartition(".")[2]

    def edit(self, node: Node, text: str, start: int | None = None) -> Edit | None:
        """Return an edit that puts `text` in place of the source from `start` to a node's end.

        By default, `start` is the column of the node. Returns None if the edit changes nothing, or
        if the file is not valid Python after it.
        """
        line = node.end_lineno or node.lineno
        before = self.lines[line - 1]
        code = before.encode()  # columns are counted in bytes
        begin = code[: node.col_offset if start is None else start]
        after = (begin + text.encode() + code[node.end_col_offset :]).decode()
        try:
            ast.parse("\n".join([*self.lines[: line - 1], after, *self.lines[line:]]))
        except SyntaxError:
            return None
        edit = Edit(f"{self.file}:{line}", before.strip(), after.strip())
        return edit if after != before else None


def module_of(file: str, before: float | None = None) -> Module:
    """Return the parsed file. A missing, large or damaged file counts as empty.

    So does a file that is not Python, or newer than `before`.
    """
    try:
        status = os.stat(file)  # noqa: PTH116 - a path from a trace, which may be no valid path
        is_python = S_ISREG(status.st_mode) and file.endswith(".py")
        if is_python and status.st_size <= LARGEST and status.st_mtime <= (before or inf):
            return _parsed(file, status.st_mtime_ns)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        pass
    return Module()


@lru_cache(maxsize=256)
def _parsed(file: str, _changed: int) -> Module:
    with open(file, encoding="utf-8") as source:  # noqa: PTH123 - a path from a trace
        return Module(file, source.read())


def scan(files: Iterable[str], before: float | None = None) -> tuple[ObservedCall, ...]:
    """Return the lines of files whose results may vary between runs, in the order of the files.

    Each line has the name of the function that it calls, or ``set`` if it iterates over a set.
    Missing files, large files and files in other languages are skipped. A file that changed after
    the time `before` (in seconds since 1970) is skipped, because the run used an earlier version.
    """
    sources: list[ObservedCall] = []
    for file in dict.fromkeys(files):
        try:
            calls = sorted(set(_varying_calls(module_of(file, before))))
        except (RecursionError, MemoryError):
            continue
        for number, cause, name in calls:
            location = f"{printable(file)}:{number}"
            sources.append(ObservedCall(printable(name), cause, location))
    return tuple(sources)


def _varying_calls(module: Module) -> Iterator[tuple[int, str, str]]:
    """Yield line number, cause and function of each call or iteration whose result may vary."""
    nodes, sets = module.nodes, _Sets(module)
    for node in nodes:
        if isinstance(node, ast.Call):
            name, method = module.name(node.func), _method(node)
            cause = _CALLS.get(name) or _METHODS.get(method)
            if name in _SEEDED or method in _SEEDING_METHODS:
                cause = EXPLICIT_SEED if node.args or node.keywords else ENTROPY
            if cause is not None:
                yield node.lineno, cause, name
        if any(map(sets.is_set, sets.iterated_by(node))):
            name = module.name(node.func) if isinstance(node, ast.Call) else ""
            yield getattr(node, "lineno", 1), SET_ORDER, name if name in TIES else "set"


class _Sets:
    """Finds the expressions of a module that are sets, and the nodes that iterate them."""

    def __init__(self, module: Module) -> None:
        self._name = module.name
        self._parents = {
            child: node for node in module.nodes for child in ast.iter_child_nodes(node)
        }
        self._sets: dict[tuple[ast.AST | None, str], list[ast.expr]] = {}  # (scope, name) -> values
        for node in module.nodes:
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            if not (node.value and self.is_set(node.value)):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = self._scope(target), ast.unparse(target)
                self._sets.setdefault(name, []).append(node.value)

    def _scope(self, node: ast.AST) -> ast.AST | None:
        """Return the function of a local name, or the class of an attribute like ``self.x``."""
        function = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda
        kinds = (ast.ClassDef,) if isinstance(node, ast.Attribute) else function
        at: ast.AST | None = node
        while at is not None and not isinstance(at, kinds):
            at = self._parents.get(at)
        return at

    def is_set(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _SET_METHODS:
                return self.is_set(node.func.value)
            return self._name(node.func) in _MAKES_SET
        if isinstance(node, ast.BinOp) and isinstance(node.op, _SET_OPERATORS):
            operands = node.left, node.right
            are_views = (
                isinstance(operand, ast.Call) and _method(operand) in _VIEWS for operand in operands
            )
            return any(are_views) or any(map(self.is_set, operands))
        if isinstance(node, ast.Name | ast.Attribute):
            text = ast.unparse(node)
            return (self._scope(node), text) in self._sets or (None, text) in self._sets
        return isinstance(node, ast.Set | ast.SetComp)

    def made_once(self, node: ast.AST) -> tuple[ast.expr, ast.expr, ast.expr | None] | None:
        """Return how a set is created, if a dict with the same keys could replace it.

        Returns the assigned expression, the iterable of the members, and the set subtracted from
        the members (or None). Returns None if the set is assigned more than once, or used for
        anything other than iteration and membership tests.
        """
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        text, scope = ast.unparse(node), self._scope(node)
        values = self._sets.get((scope, text), [])
        for child, parent in self._parents.items():
            if isinstance(child, type(node)) and self._scope(child) is scope:
                is_read = isinstance(child.ctx, ast.Load) and ast.unparse(child) == text
                reads = (ast.For, ast.comprehension, ast.Compare)
                called = isinstance(parent, ast.Call) and self._name(parent.func) in (
                    *_ORDERED,
                    *_WITHOUT_ORDER,
                )
                if is_read and not (isinstance(parent, reads) or called):
                    return None
        if len(values) != 1:
            return None
        iterable, excluded = values[0], None
        if isinstance(iterable, ast.BinOp) and isinstance(iterable.op, ast.Sub):
            excluded, iterable = iterable.right, iterable.left
        if (
            isinstance(iterable, ast.Call)
            and self._name(iterable.func) in _MAKES_SET
            and iterable.args
        ):
            return values[0], iterable.args[0], excluded
        return None

    def iterated_by(self, node: ast.AST) -> list[ast.expr]:
        """Return the expressions that `node` iterates over, if the order affects the result."""
        if isinstance(node, ast.For | ast.AsyncFor):
            return [node.iter]
        if isinstance(node, ast.Starred | ast.YieldFrom):
            return [node.value]
        if isinstance(node, ast.Assign):
            return [node.value] if isinstance(node.targets[0], ast.Tuple | ast.List) else []
        parent = self._parents.get(node)
        if isinstance(parent, ast.Call) and self._name(parent.func) in _WITHOUT_ORDER:
            return []
        if isinstance(node, ast.Call) and self._name(node.func) in TIES:
            return node.args[:1] if any(keyword.arg == "key" for keyword in node.keywords) else []
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            return [generator.iter for generator in node.generators]
        if isinstance(node, ast.Call):
            if _method(node) == "pop" and not node.args and isinstance(node.func, ast.Attribute):
                return [node.func.value]
            if self._name(node.func) in _ORDERED or _method(node) in _ORDERED_METHODS:
                return node.args
        return []


def _method(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def varying_seeds(
    lines: Sequence[ObservedCall], reads: Sequence[NondeterministicRead]
) -> tuple[tuple[ObservedCall, ObservedCall], ...]:
    """Return each line of `scan` that seeds a generator from a varying source, with the source.

    A recording does not observe some seeds, such as the seed of a ``numpy.random.RandomState``.
    """
    heard = [ObservedCall(read.name, read.what, read.where) for read in reads]
    sources = {line.where: line for line in (*lines, *heard) if line.what in _SOURCES_OF_SEEDS}
    seeds = (line for line in lines if line.what == EXPLICIT_SEED and line.where in sources)
    return tuple((line, sources[line.where]) for line in seeds)


def with_source(
    seed: NondeterministicRead, reads: Sequence[NondeterministicRead], before: float | None
) -> NondeterministicRead:
    """Return a differing seed with its likely source: one of `reads`, or a call on the seed's line.

    A generator that the program creates is only known by a line that draws from it. This line is
    replaced by the line that seeds the generator, if the file has only one such line.
    `before` is as in `scan`.
    """
    reads = [read for read in reads if read.what in _SOURCES_OF_SEEDS]
    lines = scan([seed.where.rpartition(":")[0]], before)
    if seed.name == OWN_GENERATOR:
        seeded_at = {line.where for line in lines if line.name.endswith((".manual_seed", ".seed"))}
        seeding = [line for line in lines if line.where in seeded_at]
        read_at = {read.where for read in reads}
        likely = [line for line in seeding if line.what == ENTROPY or line.where in read_at]
        candidates = {line.where for line in likely or seeding}
        seed = replace(seed, where=candidates.pop()) if len(candidates) == 1 else seed
    earlier = [read for read in reads if (read.step, read.record) <= (seed.step, seed.record)]
    sure: list[ObservedCall] = [
        *[read for read in earlier if "seed" in source_line(read.where).lower()],
        *[line for line in lines if line.where == seed.where and line.what in _SOURCES_OF_SEEDS],
        *[read for read in earlier if short(read.where) == short(seed.where)],
    ]
    if not sure and not earlier:
        return seed
    origin = (sure or earlier)[-1]
    source = ObservedCall(origin.name, origin.what, origin.where, is_sure=bool(sure))
    return replace(seed, source=source)


def edit_of(cause: str, name: str, location: str, *, is_seed: bool = False) -> Edit | None:
    """Return an edit of the line at `location`, where the program reads `cause` by calling `name`.

    `is_seed` is true if the result became a seed. Returns None if no edit of the line helps.
    """
    line = _Lines.of(location)
    replacements = line.replacements(cause, name.rpartition(".")[2], is_seed=is_seed)
    return next(map(line.edited, replacements), None)


def edit_of_sample(name: str, location: str) -> Edit | None:
    """Return an edit of a line that loads a sample: it uses `torchrepro.sample_rng()` instead."""
    line = _Lines.of(location)
    calls = ((call, "torchrepro.sample_rng()") for call in line.calls(name.rpartition(".")[2]))
    edit = next(map(line.edited, calls), None)
    return edit and replace(edit, after=f"import torchrepro; {edit.after}")


def edits_of_other_lines(cause: str, files: Iterable[str], steps: int) -> Iterator[Edit]:
    """Yield edits that may remove the effect of `cause`, on lines that do not read it.

    If `cause` is the clock, a time limit of a training becomes a limit of `steps`. For any other
    cause, a pool of threads or processes gets a single worker, which runs its tasks in order.
    """
    for file in dict.fromkeys(files):
        module = module_of(file)
        lines = _Lines(module, module.nodes)
        replacements = lines.with_steps(steps) if cause == CLOCK else lines.with_one_worker()
        yield from filter(None, map(lines.edited, replacements))


class _Lines:
    """One or more lines of a file, with the nodes of the syntax tree that begin on them."""

    def __init__(self, module: Module, nodes: Sequence[ast.AST]) -> None:
        self._module, self._nodes = module, nodes

    @classmethod
    def of(cls, location: str) -> _Lines:
        file, _, number = location.rpartition(":")
        module = module_of(file)
        return cls(module, module.of_line.get(int(number), []) if number.isdecimal() else [])

    def edited(self, replacement: Replacement) -> Edit | None:
        node, text = replacement
        return self._module.edit(node, text) if node.end_lineno == node.lineno else None

    def calls(self, *functions: str) -> list[ast.Call]:
        """Return the calls of functions, named in `functions` by the last part of the full name."""
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        return [call for call in calls if self._module.called(call) in functions]

    def with_one_worker(self) -> Iterator[Replacement]:
        """Yield replacements that set the number of workers of each new pool to 1."""
        for call in self.calls(*_POOLS):
            named = [keyword.value for keyword in call.keywords if keyword.arg in _WORKERS]
            size = next(iter([*call.args, *named]), None)
            if size is not None:
                yield size, "1"
            else:
                function = self._source(call.func)
                rest = self._source(call).removeprefix(f"{function}(")
                yield call, f"{function}(1{', ' if call.keywords else ''}{rest}"

    def with_steps(self, steps: int) -> Iterator[Replacement]:
        """Yield replacements for a training's time limit (``max_time``): a limit of steps."""
        for argument in self._nodes:
            if isinstance(argument, ast.keyword) and argument.arg == "max_time":
                yield argument, f"max_steps={steps}"

    def _of_owners(self, *functions: str) -> Iterator[tuple[ast.Call, str, str]]:
        for call in self.calls(*functions):
            if isinstance(call.func, ast.Attribute):
                yield call, self._source(call.func.value), self._module.called(call)

    def _source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self._module.text, node) or ""

    def replacements(self, cause: str, function: str, *, is_seed: bool) -> Iterator[Replacement]:
        """Yield replacements of expressions in the line, the likeliest fix first."""
        if cause == FILES and function not in {"walk", "fwalk"}:
            inside = {id(node.args[0]) for node in self.calls("sorted") if node.args}
            key = ", key=lambda entry: entry.name" if function == "scandir" else ""
            for call in self.calls(function):
                loops = self._loops_over_entered(call)
                if loops is not None:  # a ``with`` statement cannot enter sorted()
                    yield from ((iterated, f"sorted({iterated.id}{key})") for iterated in loops)
                elif id(call) not in inside:
                    yield call, f"sorted({self._source(call)}{key})"
        elif cause == EXPLICIT_SEED:
            for call in self.calls(*_SEEDING):
                if call.args and not isinstance(call.args[0], ast.Constant | ast.Starred):
                    yield call.args[0], SEED
        elif cause == THREADS:  # results in the order of submission
            for call in self.calls("as_completed"):
                if len(call.args) == 1 and not call.keywords:
                    yield call, self._source(call.args[0])
            for call, owner, _ in self._of_owners("imap_unordered"):
                yield call.func, f"{owner}.imap"
            alone = [node.value for node in self._nodes if isinstance(node, ast.Expr)]
            for call, owner, _ in self._of_owners("start"):
                if call in alone:
                    yield call, f"{self._source(call)}; {owner}.join()"
        elif cause == FORKED:  # seed the generator in each task from the task's arguments
            tasks = [node for node in self._module.nodes if isinstance(node, ast.FunctionDef)]
            for call, owner, _ in self._of_owners(function):
                if self._module.name(call.func).startswith("random."):
                    for task, line in product(tasks, self._nodes):
                        if line in task.body and call in ast.walk(line):
                            parameters = ", ".join(parameter.arg for parameter in task.args.args)
                            yield line, f"{owner}.seed(repr([{parameters}])); {self._source(line)}"
        elif cause == UNINITIALIZED_MEMORY:
            for call, owner, called in self._of_owners(*_WRITTEN):
                yield call.func, f"{owner}.{_WRITTEN[called]}"
        elif cause == SET_ORDER or function == "set":
            yield from self._sets_in_order(is_text=cause == HASH)
        elif cause == ENTROPY and function in _SEEDING:
            for call in self.calls(function):
                callee = self._source(call.func)
                if callee.endswith("torch.seed"):
                    callee = f"{callee.removesuffix('seed')}manual_seed"
                if not call.args and not call.keywords:
                    yield call, f"{callee}({SEED})"
        elif cause in _BECOME_SEEDS:
            yield from self._constants(function, is_seed=is_seed)
            if cause != ENTROPY:
                return
            for call, owner, _ in self._of_owners("SystemRandom"):
                yield call, f"{owner}.Random({SEED})"
            if "random" not in self._module.imported:
                return
            for call, _, called in self._of_owners(*_DRAWN):
                arguments = ", ".join(map(self._source, call.args))
                if call.args:
                    yield call, f"random.Random({SEED}).{_DRAWN[called]}({arguments})"

    def _constants(self, function: str, *, is_seed: bool) -> Iterator[Replacement]:
        """Yield constants to replace arguments of a seeding call, or a value that became a seed."""
        values = [
            argument
            for call in self.calls(*_SEEDING)
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]
        ]
        with_value = ast.Assign | ast.Return | ast.AnnAssign
        whole = [node.value for node in self._nodes if isinstance(node, with_value) and node.value]
        values += whole if is_seed else []
        for value in values:
            within = set(ast.walk(value))
            for read in filter(within.__contains__, self.calls(function)):
                # The whole value becomes a constant if the read is its only variable input.
                made = set(ast.walk(read))
                for call in within:
                    if isinstance(call, ast.Call):
                        made.update(ast.walk(call.func))
                if not any(isinstance(node, ast.Name) for node in within - made):
                    yield value, SEED
                elif function not in _GIVE_BYTES:
                    yield read, SEED

    def _loops_over_entered(self, call: ast.Call) -> list[ast.Name] | None:
        """Return the uses of `name` by loops in ``with call as name``, or None without ``with``."""
        for node in self._nodes:
            for context in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
                if context.context_expr is call:
                    bound = context.optional_vars
                    name = bound.id if isinstance(bound, ast.Name) else ""
                    iterated = [at.iter for at in ast.walk(node) if isinstance(at, ast.For)]
                    return [at for at in iterated if isinstance(at, ast.Name) and at.id == name]
        return None

    def _sets_in_order(self, *, is_text: bool) -> Iterator[Replacement]:
        # A dict keeps insertion order. Sets of texts can be sorted, sets of other values maybe not.
        sets, pops = _Sets(self._module), self.calls("pop")  # no fix, because dict.pop needs a key
        iterables = (sets.iterated_by(node) for node in self._nodes if node not in pops)
        for node in chain.from_iterable(iterables):
            if isinstance(node, ast.Call) and self._module.called(node) in _MAKES_SET:
                yield node, f"dict.fromkeys({', '.join(map(self._source, node.args))})"
            elif isinstance(node, ast.Set | ast.SetComp):
                inside = self._source(node)[1:-1]
                inside = f"[{inside}]" if isinstance(node, ast.Set) else inside
                yield node, f"dict.fromkeys({inside})"
            elif is_text and sets.is_set(node):
                yield node, f"sorted({self._source(node)})"
            elif made := sets.made_once(node):
                value, members, excluded = made
                items = self._source(members)
                if excluded is not None:
                    items = f"each for each in {items} if each not in {self._source(excluded)}"
                yield value, f"dict.fromkeys({items})"
