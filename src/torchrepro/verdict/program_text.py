"""What the text of a program says: lines that may give another result in each run, and edits.

A recording hears calls of functions that can be replaced. What it cannot hear is found in the text:
types written in C, and the order of a set. Only the text is read: nothing of it is run. An edit is
one line of the program as it is and as it should be. It comes from the syntax tree of the line, so
there is none where the line does not have what the edit replaces.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, product
from stat import S_ISREG
from typing import TYPE_CHECKING

from torchrepro.ground.messages import printable
from torchrepro.seeding.nondeterministic_calls import (
    ADDRESS,
    CLOCK,
    CLOCK_AND_CARD,
    ENTROPY,
    FILES,
    FORKED,
    GIVEN_SEED,
    HASH,
    HOST,
    IF_THERE,
    OWN_GENERATOR,
    PROCESS,
    SET_ORDER,
    THREADS,
    UNWRITTEN,
)
from torchrepro.verdict.render import short, source_line
from torchrepro.verdict.value import Edit, SeedSource, UncontrolledRead

if TYPE_CHECKING:
    Replacement = tuple[
        ast.expr | ast.stmt | ast.keyword, str
    ]  # A part of a line, and what takes its place

LARGEST = 1 << 20  # bytes of a file above which it is not read

SEED = "1234"

_CALLS = {
    name: what
    for what, names in {
        CLOCK: "datetime.datetime.now datetime.datetime.utcnow datetime.datetime.today "
        "datetime.date.today time.time time.time_ns time.monotonic time.monotonic_ns "
        "time.perf_counter time.perf_counter_ns time.process_time time.process_time_ns "
        "timeit.default_timer pandas.Timestamp.now",
        ADDRESS: "id",
        THREADS: "concurrent.futures.as_completed asyncio.as_completed",
        UNWRITTEN: "numpy.empty numpy.empty_like torch.empty torch.empty_like torch.empty_strided",
    }.items()
    for name in names.split()
}
_METHODS = {"imap_unordered": THREADS, "new_empty": UNWRITTEN}

# What takes a seed: types that draw one where they are given none, methods that do as well, and
# others, by the last parts of their names.
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
_NO_SOURCE = (GIVEN_SEED, SET_ORDER, THREADS, UNWRITTEN, IF_THERE, FILES, FORKED, HOST)
"""What no seed is made from that differs on one machine."""

_GIVE_BYTES = {"urandom", "token_bytes", "randbytes"}
_DRAWN = {  # functions that draw from the system, and those of `random` that do the same
    "urandom": "randbytes",
    "token_bytes": "randbytes",
    "randbelow": "randrange",
    "choice": "choice",
    "randbits": "getrandbits",
}
_WRITTEN = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}
_POOLS = ("ThreadPoolExecutor", "ProcessPoolExecutor", "Pool", "ThreadPool")
_WORKERS = ("max_workers", "processes")  # how these pools call their number

_MAKES_SET = ("set", "frozenset")
_SET_OPERATORS = ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor
_SET_METHODS = ("union", "intersection", "difference", "symmetric_difference", "copy")
_ORDERED = ("list", "tuple", "enumerate", "iter", "zip", "map", "filter", "sum", "dict.fromkeys")
_ORDERED_METHODS = ("join", "extend", "fromkeys")
TIES = ("sorted", "min", "max")  # with a key, what is equal by it is told apart by its order
_WITHOUT_ORDER = ("sorted", "set", "frozenset", "len", "min", "max", "any", "all")
_VIEWS = ("keys", "items")  # of a dict; an operator between them makes a set


class Module:
    """The lines of a file with the nodes of its syntax tree."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.split("\n")
        self.nodes = list(ast.walk(ast.parse(text)))
        self.of_line: dict[int, list[ast.AST]] = {}  # the nodes that begin on each
        self.imported: dict[str, str] = {}  # what is, by the name that it has in the module
        for node in self.nodes:
            self.of_line.setdefault(getattr(node, "lineno", 0), []).append(node)
            if isinstance(node, ast.Import):
                for each in node.names:
                    first = each.name.partition(".")[0]
                    self.imported[each.asname or first] = each.name if each.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    self.imported[each.asname or each.name] = f"{node.module}.{each.name}"

    def name(self, node: ast.AST) -> str:
        """Return the dotted name of an expression with what its first part is imported as."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        first = self.imported.get(node.id, node.id) if isinstance(node, ast.Name) else ""
        return ".".join([first, *path])


def module_of(file: str, before: float | None = None) -> Module | None:
    """Return a Python file; None for one that is gone, too large, no Python, or changed since."""
    try:
        about = os.stat(file)  # noqa: PTH116 - a text of a trace
        if not (S_ISREG(about.st_mode) and about.st_size <= LARGEST and file.endswith(".py")):
            return None
        if before is not None and about.st_mtime > before:
            return None
        return _parsed(file, about.st_mtime_ns)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


@lru_cache(maxsize=256)
def _parsed(file: str, _changed: int) -> Module:
    with open(file, encoding="utf-8") as source:  # noqa: PTH123 - a text of a trace
        return Module(source.read())


def scan(files: Iterable[str], before: float | None = None) -> tuple[SeedSource, ...]:
    """Return the lines of Python files that may vary, in their order, each with what it calls.

    All that reads a set in order is called ``set``. A file that is gone, too large or no Python has
    none. Neither has one that was changed after `before`, in seconds since 1970: the program that
    ran was another.
    """
    found: list[SeedSource] = []
    for file in dict.fromkeys(files):
        module = module_of(file, before)
        try:
            said = sorted(set(_said(module))) if module is not None else []
        except (RecursionError, MemoryError):
            continue
        for number, what, name in said:
            where = f"{printable(file)}:{number}"
            found.append(SeedSource(printable(name), what, where, is_sure=True))
    return tuple(found)


def _said(module: Module) -> Iterator[tuple[int, str, str]]:
    """Yield the lines of a module that may vary, with what varies and what is called."""
    nodes, sets = module.nodes, _Sets(module)
    for node in nodes:
        if isinstance(node, ast.Call):
            name, method = module.name(node.func), _method(node)
            what = _CALLS.get(name) or _METHODS.get(method)
            if name in _SEEDED or method in _SEEDING_METHODS:
                what = GIVEN_SEED if node.args or node.keywords else ENTROPY
            if what is not None:
                yield node.lineno, what, name
        if any(map(sets.is_set, sets.read_in_order(node))):
            name = module.name(node.func) if isinstance(node, ast.Call) else ""
            yield getattr(node, "lineno", 1), SET_ORDER, name if name in TIES else "set"


class _Sets:
    """Which expressions of a module are sets, and what reads them in their order."""

    def __init__(self, module: Module) -> None:
        self._name = module.name
        self._parents = {
            child: node for node in module.nodes for child in ast.iter_child_nodes(node)
        }
        self._sets: dict[tuple[ast.AST | None, str], list[ast.expr]] = {}  # with their values
        for node in module.nodes:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for each in targets if self.is_set(node.value) else ():
                    self._sets.setdefault((self._scope(each), ast.unparse(each)), []).append(
                        node.value
                    )

    def _scope(self, node: ast.AST) -> ast.AST | None:
        # Where a name or attribute has its value: a function, or for `self.x` a class.
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
            sides = node.left, node.right
            views = (isinstance(each, ast.Call) and _method(each) in _VIEWS for each in sides)
            return any(views) or any(map(self.is_set, sides))
        if isinstance(node, ast.Name | ast.Attribute):
            text = ast.unparse(node)
            return (self._scope(node), text) in self._sets or (None, text) in self._sets
        return isinstance(node, ast.Set | ast.SetComp)

    def made_once(self, node: ast.AST) -> tuple[ast.expr, ast.expr, ast.expr | None] | None:
        """Return the value of a name or attribute that a dict with these keys could be as well.

        With it come what its members are taken from, and what they must not be in. None for a set
        whose order is not all that is read, or with which more is done.
        """
        if not isinstance(node, ast.Name | ast.Attribute):
            return None
        text, scope = ast.unparse(node), self._scope(node)
        values = self._sets.get((scope, text), [])
        for each, around in self._parents.items():
            if isinstance(each, type(node)) and self._scope(each) is scope:
                is_read = isinstance(each.ctx, ast.Load) and ast.unparse(each) == text
                reads = (ast.For, ast.comprehension, ast.Compare)
                called = isinstance(around, ast.Call) and self._name(around.func) in (
                    *_ORDERED,
                    *_WITHOUT_ORDER,
                )
                if is_read and not (isinstance(around, reads) or called):
                    return None
        if len(values) != 1:
            return None
        made, left_out = values[0], None
        if isinstance(made, ast.BinOp) and isinstance(made.op, ast.Sub):
            left_out, made = made.right, made.left
        if isinstance(made, ast.Call) and self._name(made.func) in _MAKES_SET and made.args:
            return values[0], made.args[0], left_out
        return None

    def read_in_order(self, node: ast.AST) -> list[ast.expr]:
        """Return the expressions whose values `node` takes one after the other."""
        if isinstance(node, ast.For | ast.AsyncFor):
            return [node.iter]
        if isinstance(node, ast.Starred | ast.YieldFrom):
            return [node.value]
        if isinstance(node, ast.Assign):
            return [node.value] if isinstance(node.targets[0], ast.Tuple | ast.List) else []
        around = self._parents.get(node)
        if isinstance(around, ast.Call) and self._name(around.func) in _WITHOUT_ORDER:
            return []
        if isinstance(node, ast.Call) and self._name(node.func) in TIES:
            return node.args[:1] if any(each.arg == "key" for each in node.keywords) else []
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp):
            return [each.iter for each in node.generators]
        if isinstance(node, ast.Call):
            if _method(node) == "pop" and not node.args and isinstance(node.func, ast.Attribute):
                return [node.func.value]
            if self._name(node.func) in _ORDERED or _method(node) in _ORDERED_METHODS:
                return node.args
        return []


def _method(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def varying_seeds(
    lines: Sequence[SeedSource], reads: Sequence[UncontrolledRead]
) -> tuple[tuple[SeedSource, SeedSource], ...]:
    """Return the lines of `scan` that seed a generator from what varies, each with that source.

    So are seeds known that no recording hears, as of ``numpy.random.RandomState``.
    """
    heard = [SeedSource(each.name, each.what, each.where, is_sure=True) for each in reads]
    sources = {each.where: each for each in (*lines, *heard) if each.what not in _NO_SOURCE}
    seeds = (each for each in lines if each.what == GIVEN_SEED and each.where in sources)
    return tuple((each, sources[each.where]) for each in seeds)


def with_source(
    seed: UncontrolledRead, reads: Sequence[UncontrolledRead], before: float | None
) -> UncontrolledRead:
    """Return a seed that differs with what it was made from, one of `reads` or of its own line.

    A generator of the program's own is known by the line that draws from it: the line that seeds it
    takes that one's place where its file has one. `before` is as in `scan`.
    """
    reads = [read for read in reads if read.what not in _NO_SOURCE]
    lines = scan([seed.where.rpartition(":")[0]], before)
    if seed.name == OWN_GENERATOR:
        seeded_at = {each.where for each in lines if each.name.endswith((".manual_seed", ".seed"))}
        seeding = [each for each in lines if each.where in seeded_at]
        read_at = {read.where for read in reads}
        likely = [each for each in seeding if each.what == ENTROPY or each.where in read_at]
        places = {each.where for each in likely or seeding}
        seed = replace(seed, where=places.pop()) if len(places) == 1 else seed
    earlier = [read for read in reads if (read.step, read.record) <= (seed.step, seed.record)]
    sure: list[UncontrolledRead | SeedSource] = [
        *[each for each in earlier if "seed" in source_line(each.where).lower()],
        *[each for each in lines if each.where == seed.where and each.what not in _NO_SOURCE],
        *[each for each in earlier if short(each.where) == short(seed.where)],
    ]
    if not sure and not earlier:
        return seed
    found = (sure or earlier)[-1]
    source = SeedSource(found.name, found.what, found.where, is_sure=bool(sure))
    return replace(seed, source=source)


def edit_of(what: str, name: str, where: str, *, is_seed: bool = False) -> Edit | None:
    """Return the edit against a read of `what` by the function `name` at ``file:line``.

    `is_seed` says that what was read there became a seed. None where no edit of this line helps.
    """
    line = _Lines.of(where)
    function = name.rpartition(".")[2]
    if line is None:
        return None
    return line.edited(next(line.replacements(what, function, is_seed=is_seed), None))


def edit_of_sample(name: str, where: str) -> Edit | None:
    """Return the edit that draws from the sample's own generator, where a sample is loaded."""
    line = _Lines.of(where)
    calls = line.calls(name.rpartition(".")[2]) if line else []
    edit = line.edited((calls[0], "torchrepro.sample_rng()")) if line and calls else None
    return edit and replace(edit, after=f"import torchrepro; {edit.after}")


def edits_elsewhere(what: str, files: Iterable[str], steps: int) -> Iterator[Edit]:
    """Yield edits of other lines than those that read `what`, which may help all the same.

    A pool of threads or processes with one of them takes its tasks in their order. A training that
    ends by the clock ends after so many `steps`.
    """
    for file in dict.fromkeys(files):
        if (module := module_of(file)) is not None:
            lines = _Lines(file, module, module.nodes)
            found = lines.with_steps(steps) if what == CLOCK else lines.with_one_worker()
            yield from filter(None, map(lines.edited, found))


class _Lines:
    """Lines of a program with the nodes of the syntax tree that begin on them."""

    def __init__(self, file: str, module: Module, nodes: Sequence[ast.AST]) -> None:
        self._file, self._module, self._nodes = file, module, nodes

    @classmethod
    def of(cls, where: str) -> _Lines | None:
        file, _, number = where.rpartition(":")
        module = module_of(file) if number.isdecimal() else None
        return None if module is None else cls(file, module, module.of_line.get(int(number), []))

    def edited(self, replacement: Replacement | None) -> Edit | None:
        if replacement is None:
            return None
        node, text = replacement
        if node.end_lineno != node.lineno:
            return None
        before = self._module.lines[node.lineno - 1]
        line = before.encode()  # columns are counted in bytes
        new = (line[: node.col_offset] + text.encode() + line[node.end_col_offset :]).decode()
        where = f"{self._file}:{node.lineno}"
        return None if new == before else Edit(where, before.strip(), new.strip())

    def calls(self, *functions: str) -> list[ast.Call]:
        """Return the calls of functions, by the last parts of the names that they come from."""
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        return [call for call in calls if self._called(call) in functions]

    def with_one_worker(self) -> Iterator[Replacement]:
        """Yield the number of workers of each new pool, or the call without one, and what is 1."""
        for call in self.calls(*_POOLS):
            named = [each.value for each in call.keywords if each.arg in _WORKERS]
            size = next(iter([*call.args, *named]), None)
            if size is not None:
                yield size, "1"
            else:
                function = self._source(call.func)
                rest = self._source(call).removeprefix(f"{function}(")
                yield call, f"{function}(1{', ' if call.keywords else ''}{rest}"

    def with_steps(self, steps: int) -> Iterator[Replacement]:
        """Yield the arguments that limit the time of a training, and what limits its steps."""
        for each in self._nodes:
            if isinstance(each, ast.keyword) and each.arg == "max_time":
                yield each, f"max_steps={steps}"

    def _called(self, call: ast.Call) -> str:
        return self._module.name(call.func).rpartition(".")[2]

    def _of_owners(self, *functions: str) -> Iterator[tuple[ast.Call, str, str]]:
        for call in self.calls(*functions):
            if isinstance(call.func, ast.Attribute):
                yield call, self._source(call.func.value), self._called(call)

    def _source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self._module.text, node) or ""

    def replacements(self, what: str, function: str, *, is_seed: bool) -> Iterator[Replacement]:
        """Yield what may take the place of a part of the line, the likeliest first."""
        if what == FILES and function not in {"walk", "fwalk"}:
            inside = {id(node.args[0]) for node in self.calls("sorted") if node.args}
            key = ", key=lambda entry: entry.name" if function == "scandir" else ""
            for call in self.calls(function):
                names = self._names_in_with(call)
                if names is not None:  # sorted() cannot be entered
                    yield from ((each, f"sorted({each.id}{key})") for each in names)
                elif id(call) not in inside:
                    yield call, f"sorted({self._source(call)}{key})"
        elif what == GIVEN_SEED:
            for call in self.calls(*_SEEDING):
                if call.args and not isinstance(call.args[0], ast.Constant | ast.Starred):
                    yield call.args[0], SEED
        elif what == THREADS:  # results in the order of submission
            for call in self.calls("as_completed"):
                if len(call.args) == 1 and not call.keywords:
                    yield call, self._source(call.args[0])
            for call, owner, _ in self._of_owners("imap_unordered"):
                yield call.func, f"{owner}.imap"
            alone = [node.value for node in self._nodes if isinstance(node, ast.Expr)]
            for call, owner, _ in self._of_owners("start"):
                if call in alone:
                    yield call, f"{self._source(call)}; {owner}.join()"
        elif what == FORKED:  # a task's numbers come from its own arguments
            tasks = [node for node in self._module.nodes if isinstance(node, ast.FunctionDef)]
            for call, owner, _ in self._of_owners(function):
                if self._module.name(call.func).startswith("random."):
                    for task, line in product(tasks, self._nodes):
                        if line in task.body and call in ast.walk(line):
                            given = ", ".join(each.arg for each in task.args.args)
                            yield line, f"{owner}.seed(repr([{given}])); {self._source(line)}"
        elif what == UNWRITTEN:
            for call, owner, called in self._of_owners(*_WRITTEN):
                yield call.func, f"{owner}.{_WRITTEN[called]}"
        elif what == SET_ORDER or function == "set":
            yield from self._sets_in_order(is_text=what == HASH)
        elif what == ENTROPY and function in _SEEDING:
            for call in self.calls(function):
                callee = self._source(call.func)
                if callee.endswith("torch.seed"):
                    callee = f"{callee.removesuffix('seed')}manual_seed"
                if not call.args and not call.keywords:
                    yield call, f"{callee}({SEED})"
        elif what in _BECOME_SEEDS:
            yield from self._constants(function, is_seed=is_seed)
            for call, owner, _ in self._of_owners("SystemRandom") if what == ENTROPY else ():
                yield call, f"{owner}.Random({SEED})"
            has_random = what == ENTROPY and "random" in self._module.imported
            for call, _, called in self._of_owners(*_DRAWN) if has_random else ():
                arguments = ", ".join(map(self._source, call.args))
                if call.args:
                    yield call, f"random.Random({SEED}).{_DRAWN[called]}({arguments})"

    def _constants(self, function: str, *, is_seed: bool) -> Iterator[Replacement]:
        # In place of an argument of a seeding call, or of a value that became a seed.
        values = [
            argument
            for call in self.calls(*_SEEDING)
            for argument in [*call.args, *(each.value for each in call.keywords)]
        ]
        kinds = ast.Assign | ast.Return | ast.AnnAssign
        whole = [node.value for node in self._nodes if isinstance(node, kinds) and node.value]
        values += whole if is_seed else []
        for value in values:
            within = set(ast.walk(value))
            for read in filter(within.__contains__, self.calls(function)):
                # Whether the value is made from the read and from nothing else but constants.
                made = set(ast.walk(read))
                for node in within:
                    made.update(ast.walk(node.func) if isinstance(node, ast.Call) else ())
                if not any(isinstance(node, ast.Name) for node in within - made):
                    yield value, SEED
                elif function not in _GIVE_BYTES:
                    yield read, SEED

    def _names_in_with(self, call: ast.Call) -> list[ast.Name] | None:
        # What a `with` statement enters is taken in order by its name; None for any other call.
        for node in self._nodes:
            for item in node.items if isinstance(node, ast.With | ast.AsyncWith) else ():
                if item.context_expr is call:
                    name = item.optional_vars.id if isinstance(item.optional_vars, ast.Name) else ""
                    loops = (each for each in ast.walk(node) if isinstance(each, ast.For))
                    taken = [each.iter for each in loops if isinstance(each.iter, ast.Name)]
                    return [each for each in taken if each.id == name]
        return None

    def _sets_in_order(self, *, is_text: bool) -> Iterator[Replacement]:
        # A dict keeps the order in which it was made; what is text can be sorted.
        sets, pops = _Sets(self._module), self.calls("pop")  # a dict takes a key to pop
        taken = (sets.read_in_order(node) for node in self._nodes if node not in pops)
        for node in chain.from_iterable(taken):
            if isinstance(node, ast.Call) and self._called(node) in _MAKES_SET:
                yield node, f"dict.fromkeys({', '.join(map(self._source, node.args))})"
            elif isinstance(node, ast.Set | ast.SetComp):
                inside = self._source(node)[1:-1]
                inside = f"[{inside}]" if isinstance(node, ast.Set) else inside
                yield node, f"dict.fromkeys({inside})"
            elif is_text and sets.is_set(node):
                yield node, f"sorted({self._source(node)})"
            elif made := sets.made_once(node):
                value, members, left_out = made
                items = self._source(members)
                if left_out is not None:
                    items = f"each for each in {items} if each not in {self._source(left_out)}"
                yield value, f"dict.fromkeys({items})"
