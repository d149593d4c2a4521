"""What no seed controls: entropy, the clock, addresses, the order of files, threads.

A table of functions whose results may differ between two runs of one program, and a watch that
notes the first read of each at each line of the program. Calls that a library makes for purposes of
its own are not noted. One that `uuid` or `glob` makes for the program is, by the name of the
function that the program called.

Not seen is what does not go through an attribute that can be replaced:

- a name imported before the watch began (``from os import urandom``), and a method bound before it;
- types written in C: ``datetime.now``, ``numpy.random.RandomState()``, ``SeedSequence()``,
  ``PCG64()``, ``torch.Generator().seed()``;
- the order of a set, and the hash or address by which a container finds its entries;
- what a library draws, what code that torch.compile has compiled does, and other processes.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.callers import address, frames, is_library, line, package
from torchrepro.imports import AfterImport
from torchrepro.messages import WIDE, shown
from torchrepro.seeding.call_listeners import listen, stop_listening
from torchrepro.seeding.loader_worker import in_loader
from torchrepro.seeding.seeding_calls import FUNCTIONS, say_in_first_worker
from torchrepro.seeding.streams import present_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType, FrameType

    from torchrepro.seeding.call_listeners import Listener

    Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]

MANY = 1000
"""Reads above which no further place is noted."""

ENTROPY = "entropy of the operating system"
CLOCK_AND_CARD = "the clock and the network card"
PROCESS = "the number of the process"
FILES = "the order of files"
ADDRESS = "an address"
HASH = "a hash"
CLOCK = "the clock"
THREADS = "the timing of threads"
SUSPECTS = (ENTROPY, CLOCK_AND_CARD, PROCESS, FILES, ADDRESS, HASH, CLOCK, THREADS)
"""What results come from that no seed decides, the surest cause of a difference first: most
programs read the clock, and only to measure."""

GIVEN_SEED = "a seed that the program gives"

_ANY = "*"
_OWN = ("torchrepro", "torch")  # they seed for purposes of their own
_SEED_KEYWORDS = ("seed", "a", "x")


class Source(NamedTuple):
    """A function whose result no seed decides, or which is given a seed."""

    module: str
    attribute: str
    what: str  # where its result comes from, in words
    instead: str  # what to write instead, as one short edit; `{}` is the function that was called
    through: tuple[str, ...] = ()  # modules that call it for their callers; `*` for any library
    applies: Callable[[Arguments], bool] = lambda _: True  # whether a call is such a read
    value: Callable[[Arguments], str | None] = lambda _: None  # the seed, by which runs compare
    known_as: str = ""  # the name to show, where it is not that of the function
    in_sample: str = ""  # `instead` while a sample is loaded, where one seed repeats its numbers

    @property
    def name(self) -> str:
        """The name by which the program knows it."""
        return self.known_as or f"{self.module}.{self.attribute}"

    def edit(self, called: str, *, in_sample: bool) -> str:
        """Return what to write instead of a call of the function that is known as `called`."""
        text = (in_sample and self.in_sample) or self.instead
        return text.format(called)


def _seed(arguments: Arguments, position: int) -> Any:
    args, kwargs = arguments
    if len(args) > position:
        return args[position]
    return next((kwargs[name] for name in _SEED_KEYWORDS if name in kwargs), None)


def _without_seed(position: int) -> Callable[[Arguments], bool]:
    return lambda arguments: _seed(arguments, position) is None


def _text(seed: Any) -> str | None:
    plain = seed.tolist() if hasattr(seed, "tolist") else seed
    if not isinstance(plain, int | float | str | bytes | bytearray | list | tuple):
        return None
    text = shown(plain)
    if len(text) < WIDE:
        return text
    return f"{text} #{blake2b(repr(plain).encode(), digest_size=4).hexdigest()}"


def _given(module: str, attribute: str, position: int, **more: Any) -> Source:
    """Return the row of a seed that the program gives: it is no better than where it comes from."""
    return Source(
        module,
        attribute,
        GIVEN_SEED,
        "give a seed that is the same in every run, such as 1234",
        applies=lambda arguments: _text(_seed(arguments, position)) is not None,
        value=lambda arguments: _text(_seed(arguments, position)),
        **more,
    )


_SAMPLE = "draw from torchrepro.sample_rng()"
_PYTHON = 'random.Random(1234), or torchrepro.stream("name").python()'
_HANDS_ON = ("random", "secrets", "uuid")

UNSEEDED: tuple[Source, ...] = (
    Source(
        "numpy.random",
        "default_rng",
        ENTROPY,
        'pass a seed: numpy.random.default_rng(1234), or torchrepro.stream("name").numpy()',
        applies=_without_seed(0),
        in_sample=_SAMPLE,
    ),
    Source(
        "random",
        "Random.seed",
        ENTROPY,
        f"pass a seed: {_PYTHON}",
        through=("random",),
        applies=_without_seed(1),
        known_as="random.Random",
        in_sample=_SAMPLE,
    ),
    *(
        Source(
            "random",
            f"SystemRandom.{method}",
            ENTROPY,
            f"draw from {_PYTHON}",
            through=_HANDS_ON,
            known_as="random.SystemRandom",
            in_sample=_SAMPLE,
        )
        for method in ("random", "getrandbits", "randbytes")
    ),
    Source(
        *("os", "urandom", ENTROPY, f"draw from {_PYTHON}"), through=_HANDS_ON, in_sample=_SAMPLE
    ),
    Source("secrets", "randbits", ENTROPY, f"draw from {_PYTHON}", in_sample=_SAMPLE),
    Source(
        "uuid",
        "uuid1",
        CLOCK_AND_CARD,
        "number the objects, or derive a name: uuid.uuid5(uuid.NAMESPACE_OID, name)",
    ),
    *(
        Source(module, name, ENTROPY, f"give it a seed: {seeded}(1234)", applies=_without_seed(0))
        for module, name, seeded in (
            ("random", "seed", "random.seed"),
            ("numpy.random", "seed", "numpy.random.seed"),
            ("torch", "seed", "torch.manual_seed"),
        )
    ),
)
"""Draws that no seed decides. They are rare, so watching them costs nothing."""

GIVEN_SEEDS: tuple[Source, ...] = (
    _given("numpy.random", "default_rng", 0, in_sample=_SAMPLE),
    _given(
        *("random", "Random.seed", 1),
        through=("random",),
        known_as="random.Random",
        in_sample=_SAMPLE,
    ),
    *(
        _given(module, attribute, 0, through=(_ANY,))
        for module, attribute in FUNCTIONS
        if (module, attribute) != ("torch", "seed")
    ),
)
"""Seeds that the program gives: from the clock or a process id they are another in every run."""

_NO_CLOCK = "do not compute with the clock"
_LISTS = ("os", "glob", "pathlib", "pathlib._local", "pathlib._abc")
_SORTED = "sort the files: sorted({}(...))"

ENVIRONMENT: tuple[Source, ...] = (
    *(
        Source("time", f"{clock}{unit}", CLOCK, _NO_CLOCK)
        for clock in ("time", "monotonic", "perf_counter")
        for unit in ("", "_ns")
    ),
    Source("os", "getpid", PROCESS, "do not compute with the process id"),
    Source("builtins", "id", ADDRESS, "key by a name or an index, not by id()"),
    Source(
        "builtins",
        "hash",
        HASH,
        "hashlib.blake2b(text.encode()), or set PYTHONHASHSEED",
        applies=lambda arguments: any(map(_hash_varies, arguments[0])),
    ),
    Source("os", "listdir", FILES, _SORTED, _LISTS),
    Source("os", "scandir", FILES, _SORTED, _LISTS),
    Source(
        "threading",
        "Thread.start",
        THREADS,
        "join the thread before its result is used, and add up results in a fixed order",
        through=("concurrent.futures.thread", "multiprocessing.pool", "multiprocessing.dummy"),
    ),
)
"""What the process tells of itself and its surroundings. Programs read some of it all the time."""

WITHOUT_COST = (*UNSEEDED, *GIVEN_SEEDS)
EVERY_SOURCE = (*WITHOUT_COST, *ENVIRONMENT)


def _hash_varies(value: Any) -> bool:
    waiting = [value]
    while waiting:  # a tuple may be nested deeper than Python's own calls
        value = waiting.pop()
        if isinstance(value, tuple | frozenset):
            waiting.extend(value)
            continue
        own: Any = type(value).__hash__
        if isinstance(value, str | bytes) or own is object.__hash__:
            return True
    return False


@dataclass(slots=True)
class SourceRead:
    """A line of the program that has read a source."""

    name: str
    what: str
    where: str  # ``file:line``
    times: int
    step: int  # that was running at the first read; -1 before torch was imported
    record: int  # how many records had been taken by then
    value: str | None  # the seed that was given; None for a read
    instead: str
    in_sample: bool  # whether a loader was loading a sample

    def to_json(self) -> dict[str, Any]:
        """Return the read as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.name}({self.value or ''}) at {self.where}{often}"


class Watch:
    """Notes the first read of each of some sources at each line of the program, until it stops."""

    def __init__(
        self, rows: Sequence[Source], on_first: Callable[[SourceRead], object] = lambda read: None
    ) -> None:
        self.position: Callable[[], tuple[int, int]] = lambda: (-1, 0)
        """Returns the running step and the number of records taken."""
        self._on_first = on_first
        self._reads: dict[tuple[str, bool, str], SourceRead] = {}
        self._listeners = {row: self._listener(row) for row in rows}
        modules = {_awaited(row) for row in rows}
        self._waiting = AfterImport(modules - sys.modules.keys(), self._listen_to)
        self._waiting.watch()
        for module in modules & sys.modules.keys():
            self._listen_to(module)

    def reads(self) -> tuple[SourceRead, ...]:
        """Return what was read up to now, in the order of the first reads."""
        return tuple(self._reads.values())

    def stop(self) -> None:
        """Note nothing more; every function is then the one that it was."""
        self._waiting.unwatch()
        for listener in self._listeners.values():
            stop_listening(listener)

    def _listen_to(self, module: str) -> None:
        for row, listener in self._listeners.items():
            if _awaited(row) == module:
                listen(row.module, row.attribute, listener)

    def _listener(self, row: Source) -> Listener:
        function = f"{row.module}.{row.attribute}"

        def listener(
            name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
        ) -> None:
            if name != function:
                return  # it has a row by another name
            front, arguments = None, (args, kwargs)
            for each in frames(frame):
                if _is_program(each.f_code):
                    if row.applies(arguments):
                        self._note(row, row.value(arguments), front, line(each))
                    return
                # Otherwise it may be code that calls the source for its own caller.
                any_library = row.through == (_ANY,) and package(each) not in _OWN
                if not (any_library or each.f_globals.get("__name__") in row.through):
                    return
                front = each

        return listener

    def _note(self, row: Source, value: str | None, front: FrameType | None, where: str) -> None:
        name = _public_name(row, front)
        key = name, value is None, where
        known = self._reads.get(key)
        if known is not None:
            known.times += 1
        elif len(self._reads) < MANY:
            step, record = self.position()
            self._reads[key] = read = SourceRead(
                name=name,
                what=row.what,
                where=where,
                times=1,
                step=step,
                record=record,
                value=value,
                in_sample=(loading := in_loader() or present_worker() is not None),
                instead=row.edit(name, in_sample=loading),
            )
            self._on_first(read)


_of_program: dict[int, bool] = {}
_seen: list[CodeType] = []  # keeps alive what `_of_program` is about: no address has two meanings


def _is_program(code: CodeType) -> bool:
    """Whether `code` is the program's, and neither a library's nor generated for a class."""
    known = _of_program.get(address(code))
    if known is None:
        file = code.co_filename
        generated = file.startswith("<") and code.co_name.startswith("__")
        known = _of_program[address(code)] = not (generated or is_library(file))
        _seen.append(code)
    return known


def _public_name(row: Source, front: FrameType | None) -> str:
    home = front.f_globals.get("__name__") if front is not None else None
    if front is None or home is None or row.through == (_ANY,):
        return row.name  # generated code may belong to no module
    if home == row.module == "random":
        return row.name
    *path, function = f"{home}.{front.f_code.co_qualname}".split(".")
    parts = [part for part in path if not part.startswith("_")]
    return ".".join(parts if function.startswith("__") else [*parts, function.lstrip("_")])


def _awaited(row: Source) -> str:
    # After whose import the function is there, and torch is complete.
    return "torch" if row.module.startswith("torch.") else row.module


def watch_unseeded() -> Watch:
    """Watch what draws without a seed; in workers of a loader the first of them says it."""

    def tell(read: SourceRead) -> None:
        text = f"drew without a seed, in workers: {read} ({read.instead})"
        say_in_first_worker(f"{read.name} at {read.where}", text)

    return Watch(UNSEEDED, tell)


_of_process: list[Watch] = []


def watch_from_the_start() -> None:
    """Watch every source from now on, for the recording of this process that is to come."""
    _of_process.append(Watch(EVERY_SOURCE))


def watch_for_recording(rows: Sequence[Source]) -> Watch:
    """Return the watch that was begun for the recording of this process, or a new one."""
    return _of_process.pop() if _of_process else Watch(rows)


def row_of_read(name: str, what: str) -> Source | None:
    """Return the row of a read by what a trace says of it; None for one that no row has.

    A trace may come from anybody: what to write instead is taken from the table.
    """
    module, rows = name.partition(".")[0], [row for row in EVERY_SOURCE if row.what == what]
    fits = (
        lambda row: row.name == name,
        lambda row: row.module.partition(".")[0] == module,
        lambda row: module in row.through,
        lambda row: True,
    )
    return next((row for fit in fits for row in rows if fit(row)), None)
