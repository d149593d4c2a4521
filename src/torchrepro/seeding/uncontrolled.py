"""What no seed controls: entropy, the clock, addresses, the order of files, threads.

A table of functions whose results may differ between two runs of one program, and a watch that
notes the first read of each at each line of the program. Calls that a library makes for purposes of
its own are not noted. One that `uuid` or `glob` makes for the program is, by the name of the
function that the program called. Forked children tell what they read, and what they draw where
chance decides which numbers they get.

Not seen is what does not go through an attribute that can be replaced:

- a name imported before the watch began (``from os import urandom``), and a method bound before it;
- types written in C: ``datetime.now``, ``torch.Generator().seed()``; those of numpy, as
  ``SeedSequence()``, are known by the text of the line alone;
- the order of a set, and the hash or address by which a container finds its entries;
- what a library draws, what code that torch.compile has compiled does, and processes that are
  neither forked nor recorded.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.callers import address, call_text, frames, is_library, line, package
from torchrepro.imports import AfterImport
from torchrepro.messages import WIDE, shown
from torchrepro.patching import patch
from torchrepro.seeding.call_listeners import Change, Listener, listen, put_by_name, stop_listening
from torchrepro.seeding.child_notes import ChildNotes
from torchrepro.seeding.file_uses import FileUses
from torchrepro.seeding.loader_worker import in_loader
from torchrepro.seeding.seeding_calls import FUNCTIONS, say_in_first_worker
from torchrepro.seeding.streams import present_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType, FrameType

    Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]

MANY = 1000  # reads above which no further place is noted

ENTROPY = "entropy of the operating system"
CLOCK_AND_CARD = "the clock and the network card"
PROCESS = "the number of the process"
FILES = "the order of files"
ADDRESS = "an address"
HASH = "a hash"
CLOCK = "the clock"
THREADS = "the timing of threads"
FORKED = "random numbers in a child process"
IF_THERE = "a file if it is there"
SET_ORDER = "the order of a set"
HOST = "the name of the machine"
UNWRITTEN = "memory that nothing had written"
SUSPECTS = (
    *(ENTROPY, FORKED, CLOCK_AND_CARD, PROCESS, FILES, ADDRESS, HASH),
    *(SET_ORDER, CLOCK, THREADS),
)
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
        for clock in ("time", "monotonic", "perf_counter", "process_time", "clock_gettime")
        for unit in ("", "_ns")
    ),
    *(
        Source("time", name, CLOCK, _NO_CLOCK, applies=lambda its: len(its[0]) == 0)
        for name in ("localtime", "gmtime", "ctime")
    ),
    Source("time", "strftime", CLOCK, _NO_CLOCK, applies=lambda its: len(its[0]) <= 1),
    *(
        Source(module, "Timer.time_elapsed", CLOCK, "give max_steps, not max_time", (_ANY,))
        for module in ("lightning.pytorch.callbacks.timer", "pytorch_lightning.callbacks.timer")
    ),
    *(
        Source("os", name, PROCESS, "do not compute with the process id")
        for name in ("getpid", "getppid")
    ),
    *(
        Source(module, name, HOST, "do not compute with the name of the machine")
        for module, name in (("socket", "gethostname"), ("platform", "node"), ("os", "uname"))
    ),
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
        through=(
            *("concurrent.futures.thread", "concurrent.futures._base"),
            *("multiprocessing.pool", "multiprocessing.dummy"),
        ),
    ),
)
"""What the process tells of itself and its surroundings. Programs read some of it all the time."""

_EACH_TASK = "give each task a generator: random.Random(index), or default_rng([1234, index])"

FORKED_DRAWS: tuple[Source, ...] = tuple(
    Source(module, name, FORKED, _EACH_TASK, through=(_ANY,))
    for module, names in {
        "random": "random uniform randint randrange choice choices sample shuffle gauss triangular "
        "getrandbits randbytes normalvariate betavariate expovariate gammavariate lognormvariate",
        "numpy.random": "rand randn randint random random_sample choice shuffle permutation "
        "uniform normal standard_normal beta binomial poisson exponential gamma laplace",
        "torch": "rand randn randint randperm normal bernoulli multinomial rand_like randn_like",
    }.items()
    for name in names.split()
)
"""Draws from a global generator, which are listened to in forked children alone."""

_IF_THERE = Source(
    *("builtins", "open", IF_THERE),
    "remove the file before a run, or name it by all that it is made from",
)

_MADE_BY_NUMPY = {
    name: Source(
        *("numpy.random", "randbits", ENTROPY, "pass a seed: {}(1234)"),
        known_as=f"numpy.random.{name}",
        in_sample=_SAMPLE,
    )
    for name in ["SeedSequence", "RandomState", "PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]
}
"""Types that draw from the system where no seed is given, none of which can be replaced."""

_WITHOUT_SEED = re.compile(
    rf"(?:.*\.)?({'|'.join(_MADE_BY_NUMPY)})\(\s*(?:(?:seed|entropy)\s*=\s*)?(?:None)?\s*\)"
)

EVERY_SOURCE = (*UNSEEDED, *GIVEN_SEEDS, *ENVIRONMENT)
WITHOUT_COST = tuple(row for row in EVERY_SOURCE if row.what not in (ADDRESS, HASH))
"""Those that libraries do not call all the time."""


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
    """Notes the first read of each of some sources at each line of the program, until it stops.

    With a `folder`, that of a recording, forked children tell there what they read, and the
    program's files are noted as well.
    """

    def __init__(
        self,
        rows: Sequence[Source],
        on_first: Callable[[SourceRead], object] = lambda read: None,
        folder: str | None = None,
    ) -> None:
        self.position: Callable[[], tuple[int, int]] = lambda: (-1, 0)
        """Returns the running step and the number of records taken."""
        self._on_first = on_first
        self._reads: dict[tuple[str, bool, str], SourceRead] = {}
        self._seeds: dict[tuple[str, bool, str], set[str]] = {}  # given at one line by children
        self._seeded: set[str] = set()  # modules whose generators a forked child seeds
        self._undo = ExitStack()
        self._listeners = {row: self._listener(row) for row in rows}
        self._waiting = AfterImport(map(_awaited, rows), self._listen_to)
        self._waiting.watch_all()
        self._told = ChildNotes(folder) if folder is not None else None
        self.files = FileUses(self._told) if self._told is not None else None
        """The files that the program used; None without a folder."""
        if self._told is not None:
            _of_recordings.append(self)
            if self._told.is_spawned:
                self.begin_in_child()

    def reads(self) -> tuple[SourceRead, ...]:
        """Return what was read up to now, in the order of the first reads.

        What children have told comes last. What several of them gave as a seed is one text.
        """
        for note in self._told.take() if self._told is not None else ():
            kind = note.pop("kind", "")
            with suppress(TypeError, ValueError, LookupError):
                if kind == "read":
                    self._add_told(SourceRead(**note))
                elif self.files is not None:
                    self.files.add_told(note)
        for key, values in self._seeds.items():
            first, *others = sorted(values)
            digest = blake2b(repr([first, *others]).encode(), digest_size=4).hexdigest()
            together = f"{first} and {len(others)} more #{digest}" if others else first
            self._reads[key].value = together if len(values) <= _FEW_SEEDS else ""
        files = [
            SourceRead(
                *(os.path.basename(each.path), IF_THERE, each.read, 1, -1, 0, None),  # noqa: PTH119 - a text
                *(_IF_THERE.instead, False),
            )
            for each in (self.files.if_there() if self.files is not None else ())
        ]
        return (*self._reads.values(), *files)

    def stop(self) -> None:
        """Note nothing more; every function is then the one that it was."""
        self._waiting.unwatch()
        self._undo.close()
        for listener in self._listeners.values():
            stop_listening(listener)
        if self.files is not None:
            self.files.stop()
            _of_recordings.remove(self)

    def begin_in_child(self) -> None:
        """Listen to draws as well, in a child that has just begun."""
        self._reads = {key: read for key, read in self._reads.items() if read.value is None}
        self._seeded.clear()
        more = {row: self._listener(row) for row in FORKED_DRAWS if row not in self._listeners}
        self._listeners |= more
        for row, listener in more.items():
            if row.module in sys.modules:  # others once they are imported: a fork imports nothing
                listen(row.module, row.attribute, listener)
        put_by_name(more.values(), lambda file: not is_library(file))

    def _listen_to(self, module: str) -> None:
        if module == "numpy.random" and any(row.what == ENTROPY for row in self._listeners):
            self._listen_to_types_of_numpy()
        for row, listener in self._listeners.items():
            if _awaited(row) == module:
                listen(row.module, row.attribute, listener)

    def _listen_to_types_of_numpy(self) -> None:
        # They draw from the system also where they are given a seed: what they draw is theirs then.
        module: Any = sys.modules.get("numpy.random.bit_generator")
        original = getattr(module, "randbits", None)
        if original is None:
            return

        def randbits(size: int) -> Any:
            drawn = original(size)
            caller = next(each for each in frames() if each.f_globals["__name__"] != __name__)
            if not _is_program(caller.f_code):
                return drawn
            made = _WITHOUT_SEED.fullmatch(call_text(caller))
            row = _MADE_BY_NUMPY[made[1]] if made else None
            change = row and self.heard(row, ((size,), {}), None, line(caller))
            return change(drawn) if change else drawn

        patch(self._undo, module, "randbits", randbits, original)

    def _listener(self, row: Source) -> Listener:
        function = f"{row.module}.{row.attribute}"
        generator = row.module.removesuffix(".random")
        seeds = row.what == GIVEN_SEED and (row.module, row.attribute) in FUNCTIONS

        def listener(
            name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
        ) -> Change | None:
            ours = package(frame) == "torchrepro"  # a profile seeds every child alike
            if seeds and self._in_child and not ours and _in_task(frame) is not False:
                self._seeded.add(generator)
            if name != function:
                return None  # it has a row by another name
            front, arguments = None, (args, kwargs)
            if row.what == FORKED and not self._chance_decides(generator, frame, listener):
                return None
            for each in frames(frame):
                if _is_program(each.f_code):
                    if row.applies(arguments):
                        if row.what == FORKED:
                            stop_listening(listener)  # the first line says it, and draws are many
                        return self.heard(row, arguments, front, line(each))
                    return None
                # Otherwise it may be code that calls the source for its own caller.
                any_library = row.through == (_ANY,) and package(each) not in _OWN
                if not (any_library or each.f_globals.get("__name__") in row.through):
                    return None
                front = each
            return None

        return listener

    @property
    def _in_child(self) -> bool:
        return self._told is not None and self._told.in_child

    def _chance_decides(self, generator: str, frame: FrameType, listener: Listener) -> bool:
        # Which numbers a child draws: Python has seeded its `random` anew where it was forked, and
        # which of a pool's workers takes which task is a matter of timing. A loader decides by the
        # sample.
        if generator in self._seeded:
            return False
        seeded_anew: tuple[str, ...] = ("random",)
        if self._told is not None and self._told.is_spawned:  # a profile seeds all that it starts
            seeded_anew = () if os.environ.get("TORCHREPRO_PROFILE") else ("random", "numpy")
        by_chance = generator in seeded_anew or _in_task(frame) is not None
        if present_worker() is None and by_chance:
            return True
        stop_listening(listener)
        return False

    def heard(
        self, row: Source, arguments: Arguments, front: FrameType | None, where: str
    ) -> Change | None:
        """Note a call that a line of the program made, through `front` if a library made it."""
        name, value = _public_name(row, front), row.value(arguments)
        key = name, value is None, where
        known = self._reads.get(key)
        if known is not None and not (self._in_child and value is not None):
            known.times += 1
        elif len(self._reads) < MANY:
            step, record = self.position()
            read = SourceRead(
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
            self._reads[key] = read
            # A child tells every seed that is given at a line, up to some.
            given = self._seeds.setdefault(key, set()) if self._in_child and value else set()
            if self._told is None or not self._in_child:
                self._on_first(read)
            elif value not in given and len(given) <= _FEW_SEEDS:
                given.add(value or "")
                self._told.tell("read", **read.to_json())
        return None

    def _add_told(self, read: SourceRead) -> None:
        texts = read.name, read.what, read.where, read.instead, read.value or ""
        if {str} != set(map(type, texts)) or {int} != set(map(type, (read.step, read.record))):
            raise TypeError(read)
        key = read.name, read.value is None, read.where
        if key not in self._reads and len(self._reads) >= MANY:
            return
        known = self._reads.setdefault(key, read)
        if known is not read:
            known.times += 1
        if read.value is not None:
            self._seeds.setdefault(key, {known.value or ""}).add(read.value)


_FEW_SEEDS = 100
"""Seeds that a child tells of a line. Those of more than that are not compared."""

_POOLS = {
    ("multiprocessing.pool", "worker"): "task",
    ("concurrent.futures.process", "_process_worker"): "call_item",
}
"""Functions that run the tasks of a pool, and the variable that holds one."""


def _in_task(frame: FrameType) -> bool | None:
    """Whether a worker of a pool runs a task, and not its initializer; None outside of a pool."""
    for each in frames(frame):
        task = _POOLS.get((each.f_globals.get("__name__", ""), each.f_code.co_name))
        if task is not None:
            return each.f_locals.get(task) is not None
    return None


_of_recordings: list[Watch] = []


def _begin_in_child() -> None:
    for watch in _of_recordings:
        watch.begin_in_child()


os.register_at_fork(after_in_child=_begin_in_child)


_of_program: dict[int, bool] = {}
_seen: list[CodeType] = []  # keeps alive what `_of_program` is about: no address has two meanings


def _is_program(code: CodeType) -> bool:
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
    said = "drew without a seed, in workers: {0} ({0.instead})"
    return Watch(
        UNSEEDED,
        lambda read: say_in_first_worker(f"{read.name} at {read.where}", said.format(read)),
    )


_of_process: list[Watch] = []


def watch_from_the_start(folder: str, *, in_detail: bool) -> None:
    """Watch sources from now on, for the recording of this process in `folder` that is to come."""
    _of_process.append(Watch(EVERY_SOURCE if in_detail else WITHOUT_COST, folder=folder))


def watch_for_recording(folder: str, *, in_detail: bool) -> Watch:
    """Return the watch that was begun for the recording of this process, or a new one."""
    if not _of_process:
        watch_from_the_start(folder, in_detail=in_detail)
    return _of_process.pop()


OWN_GENERATOR = "torch.Generator.manual_seed"
"""The name of a seed that is known from a generator of the program's own, by a line that draws."""


def seed_of_generator(where: str, step: int, record: int, seed: str) -> SourceRead:
    """Return the seed of a generator from which a line draws, as a seed that the program gives."""
    row = row_of_read(OWN_GENERATOR, GIVEN_SEED)
    first = 1, step, record, seed, row.instead if row is not None else ""
    return SourceRead(OWN_GENERATOR, GIVEN_SEED, where, *first, in_sample=False)


def row_of_read(name: str, what: str) -> Source | None:
    """Return the row of a read by what a trace says of it; None for one that no row has.

    A trace may come from anybody: what to write instead is taken from the table.
    """
    every = (*EVERY_SOURCE, *_MADE_BY_NUMPY.values(), *FORKED_DRAWS, _IF_THERE)
    module, rows = name.partition(".")[0], [row for row in every if row.what == what]
    fits = (
        lambda row: row.name == name,
        lambda row: row.module.partition(".")[0] == module,
        lambda row: module in row.through,
        lambda row: True,
    )
    return next((row for fit in fits for row in rows if fit(row)), None)
