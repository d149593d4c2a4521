"""Where a value came from, and how far apart two kept tensors are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.trace.format import INPUT, OUTPUT, Record, Site
from torchrepro.verdict.columns import MAIN
from torchrepro.verdict.value import Distance, Element

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torchrepro.trace.reader import Trace


_RECORD = "select id, thread, site, argument, inputs, outputs, step from record"


@dataclass(frozen=True, slots=True)
class Seen:
    """A record in the words of its trace."""

    trace: Trace
    record: Record
    step: int

    @property
    def site(self) -> Site:
        """Where the program made it."""
        return self.trace.sites[self.record.site]

    @property
    def argument(self) -> str:
        """The arguments that are not tensors."""
        return self.trace.arguments[self.record.argument]

    @property
    def thread(self) -> str:
        """The name of the thread it ran on."""
        return self.trace.threads.get(self.record.thread, str(self.record.thread))

    @property
    def inputs(self) -> list[bytes]:
        """The fingerprint of each input."""
        return pieces(self.record.inputs, INPUT)

    @property
    def outputs(self) -> list[bytes]:
        """The fingerprint of each output."""
        return pieces(self.record.outputs, OUTPUT)


def pieces(text: bytes, length: int) -> list[bytes]:
    """Return fingerprints that are stored one after the other."""
    return [text[start : start + length] for start in range(0, len(text), length)]


def seen(trace: Trace, record: int) -> Seen:
    """Return a record by its id."""
    *row, step = trace.connection.execute(f"{_RECORD} where id = ?", (record,)).fetchone()
    return Seen(trace, Record(*row), step)


def last_written(
    trace: Trace, before: int, values: Iterable[bytes], after: int = 0
) -> Mapping[bytes, Seen]:
    """Return for each value the last record between two others that wrote it, where there is one.

    Reads backward and stops as soon as all are found; a value that nothing wrote costs a pass
    over all that lies between.
    """
    missing = set(values)
    found: dict[bytes, Seen] = {}
    if not missing:
        return found
    test = " or ".join(["instr(outputs, ?)"] * len(missing))
    rows = trace.connection.execute(
        f"{_RECORD} where id < ? and id > ? and ({test}) order by id desc",
        (before, after, *missing),
    )
    for *row, step in rows:
        one = Seen(trace, Record(*row), step)
        written = missing & {output[:INPUT] for output in one.outputs}
        found |= dict.fromkeys(written, one)
        missing -= written
        if not missing:
            break
    return found


def in_step_before(this: Seen) -> Seen | None:
    """Return the record that was the same op, the same time round, in the step before.

    There is none on threads that do not keep step.
    """
    trace, key = this.trace, this.site.key
    earlier = [step for step in trace.steps if step < this.step]
    if not earlier or this.record.thread != MAIN:
        return None
    number = _alike(trace, this.step, key).index(this.record.id)
    then = _alike(trace, earlier[-1], key)
    return seen(trace, then[number]) if number < len(then) else None


def _alike(trace: Trace, step: int, key: tuple[str, str, str]) -> list[int]:
    row = trace.steps[step]
    rows = trace.connection.execute(
        "select id, site from record where id >= ? and id < ? and thread = ? order by id",
        (row.first, row.first + row.records, MAIN),
    )
    sites = {number for number, site in trace.sites.items() if site.key == key}
    return [number for number, site in rows if site in sites]


if TYPE_CHECKING:
    Tensors = Mapping[str, tuple[str, tuple[int, ...], bytes]]

SHOWN = 5
"""Elements that a verdict shows."""

LOW = 0b0111_1111
"""A byte without its sign."""


def differences(left: Seen, right: Seen) -> tuple[tuple[Element, ...], tuple[Distance, ...]]:
    """Return the first elements that differ in what was kept of two records, and distances."""
    mine, theirs = _kept(left), _kept(right)
    elements: list[Element] = []
    distances: list[Distance] = []
    for name in [name for name in mine if name in theirs]:
        one, other = (Values.of(*kept[name]) for kept in (mine, theirs))
        if one is None or other is None or one.shape != other.shape:
            continue
        if one.numbers.tobytes() != other.numbers.tobytes():
            distances.append(_distance(name, one, other))
            elements += _elements(name, one, other, SHOWN - len(elements))
    return tuple(elements), tuple(distances)


@dataclass(frozen=True)
class Values:
    """A tensor as it was kept, in numbers of double precision."""

    shape: tuple[int, ...]
    numbers: Any

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...], data: bytes) -> Values | None:
        """Return a kept tensor; None for a type whose values are not known here."""
        decode = DECODERS.get(dtype)
        return None if decode is None else cls(shape, decode(data))


def _plain(name: str) -> Callable[[bytes], Any]:
    return lambda data: import_module("numpy").frombuffer(data, name)


def _bfloat16(data: bytes) -> Any:
    """Return bfloat16 as float32, of which it is the upper half."""
    numpy = import_module("numpy")
    return (numpy.frombuffer(data, "uint16").astype("uint32") << 16).view("float32")


def _float8_e5m2(data: bytes) -> Any:
    """Return float8 as float16, of which it is the upper half."""
    numpy = import_module("numpy")
    return (numpy.frombuffer(data, "uint8").astype("uint16") << 8).view("float16")


def _float8_e4m3fn(data: bytes) -> Any:
    """Return float8 with 4 bits of exponent, biased by 7, and no infinity.

    https://arxiv.org/abs/2209.05433
    """
    numpy = import_module("numpy")
    code = numpy.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = numpy.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    size[code & LOW == LOW] = numpy.nan
    return numpy.where(code & ~LOW, -size, size)[numpy.frombuffer(data, "uint8")]


DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **{
        name: _plain(name)
        for name in (
            *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
    "bfloat16": _bfloat16,
    "float8_e5m2": _float8_e5m2,
    "float8_e4m3fn": _float8_e4m3fn,
}
"""How to read the memory of a tensor, by the name of its type."""


def _kept(one: Seen) -> Tensors:
    return {
        f"{role} {position}": (dtype, tuple(map(int, re.findall(r"\d+", shape))), data)
        for role, position, dtype, shape, data in one.trace.tensors(one.record.id)
    }


def _elements(name: str, left: Values, right: Values, most: int) -> Iterable[Element]:
    numpy = import_module("numpy")
    places = numpy.flatnonzero(_unequal(left.numbers, right.numbers))[: max(most, 0)]
    for place in places.tolist():
        index: Sequence[Any] = numpy.unravel_index(place, left.shape) if left.shape else ()
        yield Element(
            name,
            tuple(map(int, index)),
            str(left.numbers[place].item()),
            str(right.numbers[place].item()),
        )


def _unequal(left: Any, right: Any) -> Any:
    """Return where two arrays have other bits, or other values if they are of other types."""
    numpy = import_module("numpy")
    if left.dtype != right.dtype:
        return (left != right) & ~((left != left) & (right != right))  # noqa: PLR0124 - NaN
    size = left.dtype.itemsize
    one, other = (numpy.ascontiguousarray(each).view("uint8") for each in (left, right))
    return (one.reshape(-1, size) != other.reshape(-1, size)).any(axis=1)


def _distance(name: str, left: Values, right: Values) -> Distance:
    numpy = import_module("numpy")
    wide = "complex128" if "c" in (left.numbers.dtype.kind, right.numbers.dtype.kind) else "float64"
    one, other = (each.numbers.astype(wide) for each in (left, right))
    finite = numpy.isfinite(one) & numpy.isfinite(other)
    one, other = one[finite], other[finite]
    if not one.size:
        return Distance(name, None, None, None)
    apart = numpy.abs(one - other)
    scale = numpy.abs(other)
    relative = apart[scale > 0] / scale[scale > 0]
    lengths = float(numpy.linalg.norm(one) * numpy.linalg.norm(other))
    return Distance(
        name,
        float(apart.max()),
        float(relative.max()) if relative.size else None,
        float(numpy.vdot(other, one).real / lengths) if lengths else None,
    )
