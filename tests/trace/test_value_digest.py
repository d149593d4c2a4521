"""Digests depend on values only, and computing one runs no code of the program."""

import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import io
import itertools
import json
import os
import pathlib
import queue
import random
import struct
import subprocess
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from torchrepro.trace import value_digest
from torchrepro.trace.value_digest import MISSING, NOTHING, OPAQUE, PARTLY, digest_of, field_of

for library in ("pandas", "polars", "pyarrow", "PIL.Image", "scipy.sparse"):
    with suppress(ImportError):  # first here, since some set a variable of the process
        import_module(library)


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


@dataclass
class Fields:
    first: Any = 1
    second: Any = field(default_factory=lambda: [1])


@dataclass(slots=True)
class Slots:
    first: Any = 1
    second: Any = None


class Words(list):
    pass


class Pair(tuple):
    __slots__ = ()


class Named(np.ndarray):
    pass


Point = collections.namedtuple("Point", "x y")


class WithLock:
    def __init__(self, number: int = 1) -> None:
        self.lock = threading.Lock()
        self.number = number
        self.again = self


def builtin_values() -> list[Any]:
    """Return values of Python's own types and of classes of a program, all of them different."""
    shared = [1, 2]
    words = Words("ab")
    words.name = "w"
    ordered = collections.OrderedDict(a=1, b=2)
    moved = collections.OrderedDict(a=1, b=2)
    moved.move_to_end("a")
    when = dt.datetime(2024, 1, 2, 3, 4, 5, 6)
    ring: list[Any] = []
    ring.append(ring)
    seeded = random.Random(1)
    seeded.gauss(0, 1)
    return [
        *(None, True, False, 0, 1, 2**31, -(2**31), 2**64, 0.0, -0.0, 1.0, float("inf"), 1j),
        *("", "a", "ä\ud800", b"", b"a", bytearray(b"a"), "1", b"1"),
        *([], [0], [0, 1], [1, 0], [[0], 1], [0, [1]], (), (0,), (0, 1), [shared, shared]),
        *({}, {1: 2}, {2: 1}, {1: 2, 3: 4}, {3: 4, 1: 2}, {"a": {"b": [1]}}, set(), {1}, {1, 2}),
        *(frozenset(), frozenset({1}), range(3), range(3, 4), slice(3), slice(1, 3), ring, [ring]),
        *(Color.RED, Color.BLUE, when, when.replace(fold=1), when.replace(tzinfo=dt.UTC)),
        *(when.date(), when.time(), dt.timedelta(1), dt.timedelta(0, 1)),
        *(dt.timezone(dt.timedelta(hours=1)), pathlib.PurePosixPath("a"), pathlib.Path("a/b")),
        *(decimal.Decimal("1.0"), decimal.Decimal("1.00"), fractions.Fraction(1, 3)),
        *(uuid.UUID(int=1), uuid.UUID(int=2), collections.deque([1]), collections.deque([1, 2])),
        *(ordered, moved, collections.defaultdict(list, {9: 1}), collections.Counter("abab")),
        *(collections.Counter("baba"), Point(1, 2), Point(2, 1), Pair((0,)), words, Words("ab")),
        *(Fields(), Fields(2), Fields(second=[2]), Slots(), Slots(2), Slots(Slots()), WithLock()),
        *(WithLock(2), [WithLock(2), threading.Lock()], types.SimpleNamespace(a=1)),
        *(random.Random(1), random.Random(2), seeded, io.BytesIO(b"a"), io.StringIO("a")),
        *({1: 2}.keys(), {1: 2}.items(), collections.UserDict(a=1)),
    ]


def array_values() -> list[Any]:
    """Return arrays, tensors and their generators, all of them different."""
    used = np.random.default_rng(0)
    used.random()
    mixed = np.zeros(2, [("a", "i1"), ("b", "f8")])
    mixed["b"] = [1, 2]
    grid = np.arange(6.0).reshape(2, 3)
    return [
        *(np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.datetime64("2024-01-01")),
        *(np.zeros(0), np.zeros((0, 1)), np.zeros(1), np.zeros(1, "f4"), np.zeros(1, ">f4")),
        *(np.array(0.0), np.array([-0.0]), np.array([1]), np.array(["a"]), np.array([b"a"])),
        *(grid, grid.T, grid[::-1], grid[:, ::2], grid.reshape(3, 2), mixed, mixed[0]),
        *(
            np.array([1, "a"], object),
            np.array(["1", "a"], object),
            np.dtype("f4"),
            grid.view(Named),
        ),
        *(np.ma.masked_array([1, 2], [0, 1]), np.ma.masked_array([1, 2], [1, 0])),
        *(np.array(["2024"], "M8[Y]"), np.array(["2024"], "M8[D]"), np.array([1j])),
        *(np.random.default_rng(0), used, np.random.RandomState(0), np.random.PCG64(5)),
        *(torch.zeros(1), torch.zeros(1, 1), torch.zeros(1).half(), torch.zeros(1).bfloat16()),
        *(torch.zeros(0), torch.tensor(0.0), torch.tensor([-0.0]), torch.ones(2, 2).to_sparse()),
        *(torch.arange(6), torch.arange(6)[::2], torch.arange(6).view(2, 3).t(), torch.eye(2)),
        *(torch.tensor([1j]).conj(), torch.tensor([1j]), torch.eye(2).to_sparse_csr()),
        *(torch.Generator().manual_seed(0), torch.Generator().manual_seed(1), torch.Size([1])),
        *(torch.float32, torch.device("cpu"), torch.nn.Parameter(torch.full((2,), 7.0))),
        *(torch.eye(2).max(0), TensorDataset(torch.ones(1)), DataLoader([1, 2])),
    ]


def pandas_values() -> list[Any]:
    """Return frames of pandas and their parts, all of them different."""
    pd = pytest.importorskip("pandas")
    return [
        *(pd.Series([1, 2]), pd.Series([2, 1]), pd.Series([1, 2], name="a"), pd.Series([1.0, 2.0])),
        *(pd.Series([1, 2], index=[1, 0]), pd.Series([3, 4]), pd.Series(["a", None])),
        *(pd.Series(["a", "b"], dtype="category"), pd.Series(["b", "a"], dtype="category")),
        *(pd.Series([1, None], dtype="Int64"), pd.Series(pd.date_range("2024", periods=2))),
        *(pd.Series(pd.date_range("2024", periods=2, tz="UTC")), pd.Series([1, "a"], dtype=object)),
        *(pd.DataFrame({"a": [1], "b": ["x"]}), pd.DataFrame({"b": ["x"], "a": [1]})),
        *(pd.DataFrame({"a": [1], "b": ["y"]}), pd.DataFrame({"a": [1]}, index=[1])),
        *(pd.Index([1, 2, 3]), pd.RangeIndex(4), pd.MultiIndex.from_tuples([(1, "a"), (2, "b")])),
        *(pd.MultiIndex.from_tuples([(2, "a"), (1, "b")]), pd.Timestamp("2024"), pd.Timedelta(1)),
    ]


def polars_values() -> list[Any]:
    """Return frames of polars and their columns, all of them different."""
    pl = pytest.importorskip("polars")
    return [
        *(pl.Series([1, 2]), pl.Series([2, 1]), pl.Series("a", [1, 2]), pl.Series([1, None])),
        *(pl.Series([1.0, 2.0]), pl.Series(["a", None]), pl.Series([[1], [2, 3]])),
        *(pl.Series([dt.date(2024, 1, 1)]), pl.Series(["a"], dtype=pl.Categorical)),
        *(pl.DataFrame({"a": [1], "b": ["x"]}), pl.DataFrame({"b": ["x"], "a": [1]})),
        *(pl.DataFrame({"a": [1], "b": ["y"]}), pl.DataFrame({"a": [1, 2]})),
    ]


def arrow_values() -> list[Any]:
    """Return tables of Arrow and their columns, all of them different."""
    pa = pytest.importorskip("pyarrow")
    return [
        *(
            pa.array([1, 2]),
            pa.array([2, 1]),
            pa.array([1, None]),
            pa.array([1.0]),
            pa.array(["a"]),
        ),
        *(
            pa.array([1], pa.timestamp("ns")),
            pa.array([1], pa.timestamp("us")),
            pa.array([[1], []]),
        ),
        *(pa.chunked_array([[3], [4]]), pa.table({"a": [1]}), pa.table({"b": [1]})),
        *(pa.table({"a": [2]}), pa.table({"a": ["x"], "b": [1]})),
    ]


def other_values() -> list[Any]:
    """Return images and sparse matrices, all of them different."""
    image = pytest.importorskip("PIL.Image")
    sparse = pytest.importorskip("scipy.sparse")
    return [
        *(image.new("L", (2, 1)), image.new("L", (1, 2)), image.new("L", (2, 1), 1)),
        *(image.new("RGB", (2, 1)), image.new("P", (2, 1))),
        *(sparse.csr_matrix(np.eye(2)), sparse.csc_matrix(np.eye(2)), sparse.csr_array(np.eye(2))),
        *(sparse.csr_matrix(np.eye(3)), sparse.coo_matrix(np.eye(2)), sparse.lil_matrix(np.eye(2))),
    ]


MAKERS = (builtin_values, array_values, pandas_values, polars_values, arrow_values, other_values)
each_maker = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


@each_maker
def test_different_values_have_different_digests(make):
    """Values that differ in a bit, an order, a type or a shape have different digests."""
    values = make()
    by_digest = collections.defaultdict(list)

    for value in values:
        by_digest[digest_of(value)].append(value)

    assert [same for same in by_digest.values() if len(same) > 1] == []
    assert {len(digest) for digest in by_digest} <= {8, 8 + len(PARTLY)}


@each_maker
def test_equal_values_have_the_same_digest(make):
    """A digest depends on the value, not on the object."""
    assert [*map(digest_of, make())] == [*map(digest_of, make())]


PROGRAM = """
import sys, json
sys.path[:0] = json.loads(sys.argv[1])
for name in sys.argv[2].split():
    __import__(name)
import importlib.util
spec = importlib.util.spec_from_file_location("tests.trace.test_value_digest", sys.argv[3])
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
hole = [object() for _ in range(int(sys.argv[4]))]
print(json.dumps([[module.digest_of(value).hex() for value in getattr(module, name)()]
                  for name in sys.argv[5].split()]))
"""


@pytest.mark.slow
def test_digests_are_equal_in_processes_with_other_hashes_addresses_and_imports():
    """No digest depends on `PYTHONHASHSEED`, on where objects lie, or on what was loaded first."""
    names = "builtin_values array_values pandas_values polars_values arrow_values other_values"
    for library in ("pandas", "polars", "pyarrow", "PIL", "scipy"):
        pytest.importorskip(library)

    def digests(seed: str, first: str, hole: str) -> list[list[str]]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(sys.path), first, __file__, hole, names],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    one = digests("1", "pandas torch", "0")
    other = digests("2", "pyarrow scipy.sparse numpy.ma polars", "12345")

    assert one == other
    assert one[0] == [digest_of(value).hex() for value in builtin_values()]


# Values without a digest, and code.

no_digest = [
    *(object(), iter([]), (x for x in ()), itertools.count(), threading.Lock(), threading.Thread()),
    *(queue.Queue(), weakref.ref(Color), torch.nn.Linear(1, 1), memoryview(b"a")),
    *(torch.optim.SGD([torch.ones(1)]), torch.ones(1, device="meta"), random.SystemRandom()),
    *([threading.Lock()], type("Empty", (), {})(), np.longdouble(1), threading.Event(), sys.stdin),
]
code = [
    *(len, digest_of, int, Color, sys, [].append, str.join, functools.partial(len), np.add),
    *(torch.add, property(), lambda: 0, WithLock().__init__, Ellipsis, type("M", (type,), {})),
]


@pytest.mark.parametrize("value", no_digest, ids=lambda value: type(value).__name__)
def test_a_value_that_depends_on_the_process_is_opaque(value):
    """Handles, iterators, threads and modules of torch have no digest."""
    assert digest_of(value) == OPAQUE


@pytest.mark.parametrize("value", code, ids=lambda value: type(value).__name__)
def test_code_has_the_digest_nothing(value):
    """Functions, classes and modules never count as different."""
    assert digest_of(value) == NOTHING


class Layout(struct.Struct):
    """A class with memory that is not in its fields."""

    number = 1

    def __init__(self, _: str) -> None:
        self.number = 2


def test_a_class_with_memory_in_c_is_opaque():
    """Its fields are only a part of its value."""
    assert digest_of(Layout("i")) == digest_of(struct.Struct("i")) == OPAQUE


def test_a_lazy_frame_is_opaque():
    """A frame that would start to compute is not read."""
    pl = pytest.importorskip("polars")

    assert digest_of(pl.DataFrame({"a": [1]}).lazy()) == OPAQUE


def test_an_opaque_field_is_ignored():
    """The digest of an object depends on its other fields."""
    assert digest_of(WithLock()) == digest_of(WithLock()) != digest_of(WithLock(2))


def test_fields_are_read_up_to_a_depth():
    """An object within three others is ignored."""

    def nested(depth: int, value: int) -> Fields:
        return Fields(nested(depth - 1, value) if depth else value, None)

    assert digest_of(nested(2, 1)) != digest_of(nested(2, 2))
    assert digest_of(nested(3, 1)) == digest_of(nested(3, 2)) != OPAQUE


def test_a_value_beyond_the_limits_is_opaque(monkeypatch):
    """The numbers of elements and bytes that are read are limited."""
    monkeypatch.setattr(value_digest, "SIZE", 1000)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]

    beyond = [
        *(list(range(1_000_001)), [()] * 50_001, dict.fromkeys(range(500_001)), "a" * 50_000),
        *(b"a" * 1001, ["a" * 501, "b" * 501], bytearray(1001), np.zeros(1001, "i1")),
        *(torch.zeros(1001, dtype=torch.int8), np.broadcast_to(np.zeros(1), (10**9,)), deep),
    ]

    assert [digest_of(value) for value in beyond] == [OPAQUE] * len(beyond)
    assert OPAQUE not in [digest_of([0] * 1_000_000), digest_of(b"a" * 1000)]


def test_a_column_of_text_may_have_more_elements_than_a_container():
    """A column of a data frame has its own, higher limit."""
    pd = pytest.importorskip("pandas")
    words = [str(number) for number in range(20_000)]

    for dtype in ("str", object):
        frame = pd.DataFrame({"a": pd.Series(words, dtype=dtype), "b": range(20_000)})
        other = frame.copy()
        other.loc[19_999, "a"] = "x"
        assert digest_of(frame) == digest_of(frame.copy()) != digest_of(other)
        assert OPAQUE not in (digest_of(frame), digest_of(other))


# Values that are made up.

plain = (
    some.none() | some.booleans() | some.integers() | some.floats() | some.text() | some.binary()
)
trees = some.recursive(
    plain,
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.tuples(inner, inner)
        | some.dictionaries(some.text() | some.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def exact(value: Any) -> Any:
    """Return what distinguishes values: types, bits and order."""
    if isinstance(value, dict):
        return "dict", [exact(each) for each in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [exact(each) for each in value]
    bits = value.hex() if isinstance(value, float) else value
    return type(value).__name__, np.float64(value).tobytes() if bits == "nan" else bits


@given(trees, trees)
def test_digests_are_equal_if_and_only_if_values_are(first, second):
    """Two trees of numbers, text and containers have equal digests if they are identical."""
    assert (digest_of(first) == digest_of(second)) == (exact(first) == exact(second))


@given(some.binary(min_size=1, max_size=64), some.integers(0, 511))
def test_every_bit_of_an_array_changes_its_digest(data, bit):
    """One different bit gives another digest, in arrays, tensors and their views."""
    one = np.frombuffer(data, np.uint8).copy()
    other = one.copy()
    other[bit // 8 % len(one)] ^= 1 << bit % 8

    for view in (lambda a: a, lambda a: a[::-1], torch.from_numpy, lambda a: np.stack([a, a]).T):
        assert digest_of(view(one)) == digest_of(view(one.copy())) != digest_of(view(other))


# It runs no code of the program, and changes nothing.

SPECIAL = {
    *(name for kind in (object, int, str, dict, list, set, type, np.ndarray) for name in dir(kind)),
    *("__getattr__", "__del__", "__get__", "__set__", "__fspath__", "__index__"),
    *("__bool__", "__bytes__", "__complex__", "__float__", "__missing__", "__dataframe__"),
    *("__tensor_flatten__", "__torch_function__", "__torch_dispatch__", "__arrow_c_stream__"),
    *("__call__", "__copy__", "__deepcopy__", "__length_hint__", "collect", "numpy", "columns"),
}
STORED = {
    name
    for name, member in vars(type).items()
    if type(member) in (types.GetSetDescriptorType, types.MemberDescriptorType)
    and name != "__abstractmethods__"  # which `abc` assigns
}
"""Attributes of a class that only a metaclass can override."""


class Hostile:
    """A value; after `armed`, calls of any method or property of its classes are noted."""

    def __init__(
        self,
        name: str,
        *bases: type,
        arguments: Sequence[Any] = (),
        hides_dict: bool = False,
        **members: Any,
    ):
        self.calls: list[str] = []
        self.armed = False
        of_type = {name: property(self.noting(f"type.{name}", name)) for name in STORED}
        meta = type("Meta", (type(bases[0]) if bases else type,), of_type | {"__qualname__": "M"})
        members["__class__"] = property(self.noting("__class__"))
        if hides_dict:
            members["__dict__"] = property(self.noting("__dict__"))
        made = meta(name, bases, {"plain": 1, **members})
        self.value = made.__new__(made, *arguments)
        with suppress(AttributeError):  # there is a `__dict__` that nothing can reach
            object.__setattr__(self.value, "field", 1)
        for each in SPECIAL - STORED - {"__class__"}:
            type.__setattr__(made, each, self.noting(each))
            type.__setattr__(meta, each, self.noting(f"type.{each}"))

    def noting(self, name: str, stored: str = "") -> Any:
        """Return a method that notes its call, and fails."""

        def method(*arguments: Any, **_: Any) -> Any:
            if self.armed:
                self.calls.append(name)
                raise AssertionError(name)
            return vars(type)[stored].__get__(arguments[0]) if stored else None

        return method


def hostile_values() -> dict[str, Hostile]:
    """Return values of classes of a program, by their base class."""
    bases: list[tuple[Any, ...]] = [
        *((int, 1), (float, 1.5), (complex, 1j), (str, "a"), (bytes, b"a"), (tuple, [1]), (list,)),
        *((dict,), (set,), (frozenset, [1]), (bytearray,), (collections.deque,), (io.StringIO,)),
        *((collections.OrderedDict,), (collections.defaultdict,), (collections.Counter,)),
        *((dt.datetime, 2024, 1, 1), (dt.timedelta, 1), (fractions.Fraction,), (random.Random, 1)),
        *((decimal.Decimal, 1), (types.ModuleType, "a"), (Fields,), (np.ndarray, (2,), np.uint8)),
        *((torch.Tensor,), (threading.Thread,), (ValueError,), (pathlib.PosixPath, "a")),
    ]
    pandas = sys.modules.get("pandas")
    bases += [(pandas.DataFrame,)] if pandas else []
    found = {"object": Hostile("H"), "slots": Hostile("S", __slots__=("field", "empty"))}
    for base, *arguments in bases:
        found[base.__name__] = Hostile("H", base, arguments=arguments)
        hidden = f"{base.__name__}, with a property `__dict__`"
        found[hidden] = Hostile("H", base, arguments=arguments, hides_dict=True)
    return found


def test_digests_and_fields_run_no_code_of_a_class():
    """No method, property or metaclass of a value is called to read it."""
    pytest.importorskip("pandas")
    values = hostile_values()

    for hostile in values.values():
        hostile.armed = True
    for hostile in values.values():
        enclosing = (hostile.value, [hostile.value], {"a": hostile.value}, Fields(hostile.value))
        [*map(digest_of, (*enclosing, type(hostile.value)))]
        for name in ("plain", "field", "empty", "shape", "missing", "__dict__", "__class__"):
            field_of(hostile.value, name)
            field_of(type(hostile.value), name)
    read = [name for name, each in values.items() if len(digest_of(each.value)) == 8]

    calls = {name: hostile.calls for name, hostile in values.items() if hostile.calls}
    for hostile in values.values():
        hostile.armed = False
    assert calls == {}
    assert len(read) >= 20, "most values are opaque: nothing of them was read"


def test_hostile_keys_are_not_hashed_again():
    """The keys of a dict, a set and an OrderedDict are read without their `__hash__`."""
    armed: list[int] = []

    class Key(str):
        def __hash__(self) -> int:
            assert not armed
            return str.__hash__(self)

        __eq__ = __hash__  # type: ignore[assignment]

    key = Key("a")
    containers = [{key: 1}, {key}, collections.OrderedDict({key: 1}), types.SimpleNamespace()]
    containers[3].__dict__[key] = 1
    armed.append(1)

    digests = [digest_of(each) for each in containers]

    assert digests[2] == OPAQUE
    assert len({*digests}) == 4


class Heard(TorchDispatchMode):
    """Notes every op."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_mode_observes_the_digest_of_a_tensor():
    """A recording of ops does not see the ops of a digest."""
    values = array_values()

    with Heard() as heard:
        digests = [digest_of(value) for value in values]

    assert heard.ops == []
    assert digests == [digest_of(value) for value in values]


def test_the_digest_of_a_file_does_not_change_its_position_or_buffer(tmp_path):
    """The digest of a file depends on its name and position, and does not change the file."""
    path = tmp_path / "text"
    path.write_bytes(b"one\ntwo\n" * 10_000)

    with path.open() as text, path.open("rb") as data, (tmp_path / "new").open("wb") as out:
        out.write(b"not flushed")
        before = [digest_of(file) for file in (text, data, out)]
        again = [digest_of(file) for file in (text, data, out)]
        lines = [next(text), text.readline(), data.readline()]
        written = (tmp_path / "new").read_bytes()
        out.write(b"!")
        after = [digest_of(file) for file in (text, data, out)]

    assert before == again
    assert OPAQUE not in before
    assert not {*before} & {*after}
    assert (lines, written) == (["one\n", "two\n", b"one\n"], b"")
    assert digest_of(text) == OPAQUE  # closed


def test_generators_draw_the_same_after_a_digest():
    """The state of a generator is read without a draw."""
    makers = (
        *(lambda: random.Random(1), lambda: np.random.default_rng(1)),
        lambda: np.random.RandomState(1),
    )

    for make in makers:
        read, unread = make(), make()
        before = digest_of(read)
        numbers = read.random(), unread.random()
        assert numbers[0] == numbers[1]
        assert digest_of(read) == digest_of(unread) != before


def test_a_library_is_known_only_by_its_own_class():
    """A class that calls itself `numpy.ndarray` is one of the program."""
    fake = type("ndarray", (), {"__module__": "numpy"})()
    fake.number = 1

    assert digest_of(fake) == digest_of(fake) != OPAQUE


@pytest.mark.slow
def test_no_library_is_imported_to_read_a_value():
    """Libraries that the program has not loaded are not imported."""
    program = (
        "import sys; from torchrepro.trace.value_digest import digest_of\n"
        "class A: x = 1\n"
        "for value in (1, [1], {'a': A()}, {1}, print): digest_of(value)\n"
        "print({'numpy', 'torch', 'pandas', 'polars', 'pyarrow', 'PIL'} & {*sys.modules})"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert done.stdout == "set()\n"


def test_an_interrupt_during_a_digest_is_raised(monkeypatch):
    """Ctrl-C during the digest of a value raises in the program."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(value_digest, "xxh3_64_digest", interrupted)

    with pytest.raises(KeyboardInterrupt):
        digest_of([1])


# Fields.


class WithFields:
    shared = 5
    hidden = 6

    def __init__(self) -> None:
        self.own = 1
        self.method = 2  # in front of the function of the class

    def method(self) -> None:
        """Return nothing."""

    @property
    def computed(self) -> int:
        raise AssertionError


class WithGetattr(WithFields):
    def __getattr__(self, name: str) -> int:
        if name == "none":
            return 8
        raise AttributeError(name)


class WithGetattribute(WithFields):
    def __getattribute__(self, name: str) -> int:
        raise AssertionError


@pytest.mark.parametrize(
    ("value", "name", "expected"),
    [
        *((WithFields(), "own", 1), (WithFields(), "shared", 5), (WithFields(), "method", 2)),
        *((WithFields(), "computed", MISSING), (WithFields(), "none", MISSING)),
        *((WithGetattr(), "own", 1), (WithGetattr(), "none", MISSING)),
        *((WithFields, "shared", 5), (WithFields, "method", MISSING), (WithFields, "x", MISSING)),
        *((Slots(7), "first", 7), (Slots.__new__(Slots), "first", MISSING)),
        *((sys, "maxsize", sys.maxsize), (sys, "none", MISSING), (torch.eye(2), "grad", MISSING)),
        *((Fields(3), "first", 3), (Fields, "first", 1), (Point(1, 2), "x", MISSING)),
    ],
)
def test_a_field_is_read_only_if_no_code_runs(value, name, expected):
    """Fields of modules, instances, slots and classes are read; computed ones are missing."""
    assert field_of(value, name) is expected or field_of(value, name) == expected


def test_a_class_that_replaces_attribute_access_has_no_fields():
    """Reading a field would run the code of the class."""
    assert field_of(object.__new__(WithGetattribute), "shared") is MISSING
