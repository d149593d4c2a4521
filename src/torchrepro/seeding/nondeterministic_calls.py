"""Tables of functions that are sources of nondeterminism, and of functions that take a seed.

A source, such as the clock, returns results that may differ between two runs of one program.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.messages import WIDE, shown

if TYPE_CHECKING:
    Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]

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
    applies: Callable[[Arguments], bool] = lambda _: True  # whether a call counts as a read
    value: Callable[[Arguments], str | None] = lambda _: None  # the explicit seed
    known_as: str = ""  # the name to show, if it is not the name of the function
    in_sample: str = ""  # `instead` in a sample, where a constant seed repeats the draws
    by_libraries: bool = False  # whether a call that a library makes counts, see FOR_THEMSELVES

    @property
    def name(self) -> str:
        return self.known_as or f"{self.module}.{self.attribute}"

    def edit(self, called: str, *, in_sample: bool) -> str:
        """Return the suggested fix for a call of the function whose public name is `called`."""
        packages = {module.partition(".")[0] for module in (self.module, *self.through)}
        if self.by_libraries and called.partition(".")[0] not in packages:
            return f"give {called} a seed, as its documentation says"
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


def _given(module: str, attribute: str, position: int, **options: Any) -> Source:
    """Return the row of a function that takes a seed; the seed itself may come from the clock."""
    return Source(
        module,
        attribute,
        EXPLICIT_SEED,
        "give a seed that is the same in every run, such as 1234",
        applies=lambda arguments: _text(_seed(arguments, position)) is not None,
        value=lambda arguments: _text(_seed(arguments, position)),
        **options,
    )


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
        applies=_without_seed(0),
        by_libraries=True,
    ),
    _drawn(
        *("random", "Random.seed", f"pass a seed: {_PYTHON}", ("random",)),
        applies=_without_seed(1),
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
        Source(module, name, ENTROPY, f"give it a seed: {seeded}(1234)", applies=_without_seed(0))
        for module, name, seeded in (
            ("random", "seed", "random.seed"),
            ("numpy.random", "seed", "numpy.random.seed"),
            ("torch", "seed", "torch.manual_seed"),
        )
    ),
)
"""Draws from the operating system. They are rare, so watching them costs nothing."""

GIVEN_SEEDS: tuple[Source, ...] = (
    _given("numpy.random", "default_rng", 0, in_sample=_SAMPLE, by_libraries=True),
    _given(
        *("random", "Random.seed", 1),
        through=("random",),
        known_as="random.Random",
        in_sample=_SAMPLE,
        by_libraries=True,
    ),
    *(
        _given(module, attribute, 0, through=(ANY,))
        for module, attribute in FUNCTIONS
        if (module, attribute) != ("torch", "seed")
    ),
)
"""Explicit seeds of the program: if they come from the clock or a process id, they vary."""

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
        Source("time", name, CLOCK, _NO_CLOCK, applies=lambda arguments: len(arguments[0]) == 0)
        for name in ("localtime", "gmtime", "ctime")
    ),
    Source("time", "strftime", CLOCK, _NO_CLOCK, applies=lambda arguments: len(arguments[0]) <= 1),
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
    module, rows = name.partition(".")[0], [row for row in every if row.what == source]
    fits = (  # the most exact one first
        lambda row: row.name == name,
        lambda row: row.module.partition(".")[0] == module,
        lambda row: module in row.through,
        lambda row: True,
    )
    return next((row for fit in fits for row in rows if fit(row)), None)
