"""Tables of functions that are sources of nondeterminism, and of functions that take a seed.

A source, such as the clock, returns results that may differ between two runs of one program.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.callers import frames, is_library, line, package
from torchrepro.ground.errors import WIDE, shown
from torchrepro.seeding.call_records import ObservedCall

if TYPE_CHECKING:
    from torchrepro.seeding.observed_calls import Call

ENTROPY = "entropy of the operating system"
CLOCK_AND_CARD = "the clock and the network card"
PROCESS = "the number of the process"
FILES = "the order of files"
ADDRESS = "an address"
HASH = "a hash"
CLOCK = "the clock"
THREADS = "the timing of threads"
FORKED = "random numbers in a child process"
EXISTING_FILE = "a file if it is there"
SET_ORDER = "the order of a set"
HOST = "the name of the machine"
UNINITIALIZED_MEMORY = "memory that nothing had written"
WORKER = "the worker that loads a sample"
SUSPECTS = (
    *(ENTROPY, FORKED, CLOCK_AND_CARD, PROCESS, FILES, ADDRESS, HASH),
    *(SET_ORDER, CLOCK, THREADS),
)
"""Sources of nondeterminism, the most probable cause of a difference first: the clock comes late,
because most programs read it only to measure."""

EXPLICIT_SEED = "a seed that the program gives"
OWN_GENERATOR = "torch.Generator.manual_seed"
"""The name of a seed that is read from the program's own generator at a line that draws from it."""

FUNCTIONS = (
    *(("random", "seed"), ("numpy.random", "seed")),
    *((module, name) for module in ("torch", "torch.random") for name in ("manual_seed", "seed")),
    *(
        (f"torch.{device}", name)
        for device in ("cuda", "npu", "xpu")
        for name in ("manual_seed", "manual_seed_all")
    ),
    ("torch.mps", "manual_seed"),
)
"""Every function that seeds a global generator: module, name."""

OWN = ("torchrepro", "torch")
"""Packages whose calls are not calls of the program."""

ANY = "*"
_SEED_KEYWORDS = ("seed", "a", "x")


class Source(NamedTuple):
    """A function that is a source of nondeterminism, or that takes a seed."""

    module: str
    attribute: str
    what: str  # the source in words, such as `CLOCK`
    instead: str  # a short suggested fix; `{}` is the function that was called
    through: tuple[str, ...] = ()  # modules that call it for the program; `*` for any library
    varies: Callable[[Call], bool] = lambda _: True  # whether the result of a call may vary
    seed_at: int | None = None  # the position of the seed, if the function takes a seed
    known_as: str = ""  # the name to show, if it is not the name of the function
    in_sample: str = ""  # `instead` in a sample, where a constant seed repeats the draws
    by_libraries: bool = False  # whether a call that a library makes counts, see FOR_THEMSELVES

    @property
    def name(self) -> str:
        return self.known_as or f"{self.module}.{self.attribute}"

    def value(self, call: Call) -> str | None:
        """Return the explicit seed as text; None if the row is about calls without a seed."""
        return _text(self._seed(call)) if self.what == EXPLICIT_SEED else None

    def applies(self, call: Call) -> bool:
        """Return whether a call counts as a read, or passes a seed that can be compared."""
        if self.what == EXPLICIT_SEED:
            return self.value(call) is not None
        return self.varies(call) and self._seed(call) is None

    def _seed(self, call: Call) -> Any:
        return None if self.seed_at is None else call.argument(self.seed_at, *_SEED_KEYWORDS)

    def reader(self, frame: FrameType) -> tuple[FrameType | None, str] | None:
        """Return how the program calls the function: the library's frame, and the program's line.

        The frame is None if the line itself makes the call. Returns None if a library makes the
        call for itself, and not for the program. `through` and `by_libraries` define which
        libraries call the function for the program.
        """
        front, in_library = None, False
        for caller in frames(frame):
            code = caller.f_code
            if _is_program(code.co_filename, code.co_name):
                return front, line(caller)
            name = package(caller)
            if name not in FOR_THEMSELVES and self.by_libraries:
                if code.co_name == "<module>":
                    return None  # the library is being imported
                in_library = True
                if front is None or "<locals>" not in code.co_qualname:
                    front = caller  # the outermost frame except for decorators of the library
            elif caller.f_globals.get("__name__") in self.through:
                front = caller
            elif not in_library and (self.through != (ANY,) or name in OWN):
                return None
        return None

    def public_name(self, front: FrameType | None) -> str:
        """Return the function to show: of the library with the frame `front`, or this function."""
        home = front.f_globals.get("__name__") if front is not None else None
        if front is None or home is None or self.through == (ANY,):
            return self.name  # generated code may belong to no module
        if home == self.module == "random":
            return self.name
        *path, function = f"{home}.{front.f_code.co_qualname}".split(".")
        parts = [part for part in path if not part.startswith("_")]
        return ".".join(parts if function.startswith("__") else [*parts, function.lstrip("_")])

    @property
    def awaited(self) -> str:
        """The module to wait for before calls are observed: for a part of torch, all of torch."""
        return "torch" if self.module.startswith("torch.") else self.module

    def edit(self, called: str, *, in_sample: bool) -> str:
        """Return the suggested fix for a call of the function whose public name is `called`."""
        packages = {module.partition(".")[0] for module in (self.module, *self.through)}
        if self.by_libraries and called.partition(".")[0] not in packages:
            return f"give {called} a seed, as its documentation says"
        text = (in_sample and self.in_sample) or self.instead
        return text.format(called)


@cache
def _is_program(file: str, function: str) -> bool:
    is_generated = file.startswith("<") and function.startswith("__")
    return not is_generated and not is_library(file)


def _text(seed: Any) -> str | None:
    plain = seed.tolist() if hasattr(seed, "tolist") else seed
    if not isinstance(plain, int | float | str | bytes | bytearray | list | tuple):
        return None
    text = shown(plain)
    if len(text) < WIDE:
        return text
    return f"{text} #{blake2b(repr(plain).encode(), digest_size=4).hexdigest()}"


FOR_THEMSELVES = sys.stdlib_module_names | {
    *("numpy", "torch", "torchrepro", "hydra", "omegaconf", "hypothesis", "pytest", "accelerate"),
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "ray", "dask"),
    *("aim", "clearml", "comet_ml", "mlflow", "neptune", "tensorboard", "tensorboardX", "wandb"),
    *("rich", "tqdm", "joblib", "submitit", "distributed", "IPython", "tenacity", "sentry_sdk"),
    *("aiohttp", "filelock", "fsspec", "httpx", "huggingface_hub", "requests", "urllib3"),
    *("boto3", "botocore", "google", "grpc", "kubernetes"),
}
"""Packages that use random numbers only for themselves: for names of files, waits and retries."""

_SAMPLE = "draw from torchrepro.sample_rng()"
_PYTHON = 'random.Random(1234), or torchrepro.stream("name").python()'
_HANDS_ON = ("random", "secrets", "uuid")


def _drawn(
    module: str, attribute: str, instead: str, through: tuple[str, ...] = (), **options: Any
) -> Source:
    return Source(module, attribute, ENTROPY, instead, through, in_sample=_SAMPLE, **options)


UNSEEDED: tuple[Source, ...] = (
    _drawn(
        *("numpy.random", "default_rng"),
        'pass a seed: numpy.random.default_rng(1234), or torchrepro.stream("name").numpy()',
        seed_at=0,
        by_libraries=True,
    ),
    _drawn(
        *("random", "Random.seed", f"pass a seed: {_PYTHON}", ("random",)),
        seed_at=1,
        known_as="random.Random",
        by_libraries=True,
    ),
    *(
        _drawn(
            *("random", f"SystemRandom.{method}", f"draw from {_PYTHON}", _HANDS_ON),
            known_as="random.SystemRandom",
        )
        for method in ("random", "getrandbits", "randbytes")
    ),
    _drawn("os", "urandom", f"draw from {_PYTHON}", _HANDS_ON),
    _drawn("secrets", "randbits", f"draw from {_PYTHON}"),
    Source(
        "uuid",
        "uuid1",
        CLOCK_AND_CARD,
        "number the objects, or derive a name: uuid.uuid5(uuid.NAMESPACE_OID, name)",
    ),
    *(
        Source(module, name, ENTROPY, f"give it a seed: {seeded}(1234)", seed_at=0)
        for module, name, seeded in (
            ("random", "seed", "random.seed"),
            ("numpy.random", "seed", "numpy.random.seed"),
            ("torch", "seed", "torch.manual_seed"),
        )
    ),
)
"""Draws from the operating system. They are rare, so watching them costs nothing."""

_SAME_SEED = "give a seed that is the same in every run, such as 1234"

GIVEN_SEEDS: tuple[Source, ...] = (
    *(row._replace(what=EXPLICIT_SEED, instead=_SAME_SEED) for row in UNSEEDED if row.by_libraries),
    *(
        Source(module, name, EXPLICIT_SEED, _SAME_SEED, through=(ANY,), seed_at=0)
        for module, name in FUNCTIONS
        if (module, name) != ("torch", "seed")
    ),
)
"""Explicit seeds of the program: if they come from the clock or a process id, they vary."""


def seed_of_generator(where: str, step: int, record: int, seed: str) -> ObservedCall:
    """Return the record of a line that draws from a generator with the explicit seed `seed`."""
    return ObservedCall(OWN_GENERATOR, EXPLICIT_SEED, where, _SAME_SEED, step, record, value=seed)


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
        Source("time", name, CLOCK, _NO_CLOCK, varies=lambda call: len(call.args) == 0)
        for name in ("localtime", "gmtime", "ctime")
    ),
    Source("time", "strftime", CLOCK, _NO_CLOCK, varies=lambda call: len(call.args) <= 1),
    *(
        Source(module, "Timer.time_elapsed", CLOCK, "give max_steps, not max_time", (ANY,))
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
        varies=lambda call: any(map(_hash_varies, call.args)),
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
"""Facts about the process and its environment. Programs read some of them all the time."""

_EACH_TASK = "give each task a generator: random.Random(index), or default_rng([1234, index])"

FORKED_DRAWS: tuple[Source, ...] = tuple(
    Source(module, name, FORKED, _EACH_TASK, through=(ANY,))
    for module, names in {
        "random": "random uniform randint randrange choice choices sample shuffle gauss triangular "
        "getrandbits randbytes normalvariate betavariate expovariate gammavariate lognormvariate",
        "numpy.random": "rand randn randint random random_sample choice shuffle permutation "
        "uniform normal standard_normal beta binomial poisson exponential gamma laplace",
        "torch": "rand randn randint randperm normal bernoulli multinomial rand_like randn_like",
    }.items()
    for name in names.split()
)
"""Draws from a global generator, which are observed in forked children only."""

FILE_IF_THERE = Source(
    *("builtins", "open", EXISTING_FILE),
    "remove the file before a run, or name it by all that it is made from",
)

MADE_BY_NUMPY = {
    name: _drawn(
        *("numpy.random", "randbits", "pass a seed: {}(1234)"),
        known_as=f"numpy.random.{name}",
        by_libraries=True,
    )
    for name in ["SeedSequence", "RandomState", "PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]
}
"""Types that draw from the operating system without a seed. They cannot be replaced."""

WITHOUT_SEED = re.compile(
    rf"(?:.*\.)?({'|'.join(MADE_BY_NUMPY)})\(\s*(?:(?:seed|entropy)\s*=\s*)?(?:None)?\s*\)"
)

EVERY_SOURCE = (*UNSEEDED, *GIVEN_SEEDS, *ENVIRONMENT)
CHEAP_SOURCES = tuple(row for row in EVERY_SOURCE if row.what not in (ADDRESS, HASH))
"""Sources that libraries do not call all the time."""


def _hash_varies(value: Any) -> bool:
    waiting = [value]
    while waiting:  # recursion would fail on a deeply nested tuple
        value = waiting.pop()
        if isinstance(value, tuple | frozenset):
            waiting.extend(value)
            continue
        type_hash: Any = type(value).__hash__
        if isinstance(value, str | bytes) or type_hash is object.__hash__:
            return True
    return False


def row_of_read(name: str, source: str) -> Source | None:
    """Return the row of a read in a trace, by its name and source; None for an unknown source.

    The suggested fix is taken from the row, because the trace may come from an untrusted person.
    """
    every = (*EVERY_SOURCE, *MADE_BY_NUMPY.values(), *FORKED_DRAWS, FILE_IF_THERE)
    first = name.partition(".")[0]

    def mismatches(row: Source) -> tuple[bool, bool, bool]:
        is_of_package = row.module.partition(".")[0] == first
        return row.name != name, not is_of_package, first not in row.through

    return min((row for row in every if row.what == source), key=mismatches, default=None)
