"""In which elements two kept tensors differ, and how far apart they are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from torchrepro.verdict.value import Distance, Element

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

KeptTensor = tuple[str, int, str, str, bytes]
"""``input`` or ``output``, its position, dtype, shape and memory."""

SHOWN = 5
"""Elements that a divergence has."""

LOW = 0b0111_1111
"""A byte without its sign."""


def differences(
    left: Iterable[KeptTensor], right: Iterable[KeptTensor]
) -> tuple[tuple[Element, ...], tuple[Distance, ...]]:
    """Return the first elements in which the kept tensors of two records differ, and distances."""
    mine, theirs = (
        {f"{role} {at}": Values.of(dtype, shape, data) for role, at, dtype, shape, data in kept}
        for kept in (left, right)
    )
    elements: list[Element] = []
    distances: list[Distance] = []
    for name, one in mine.items():
        other = theirs.get(name)
        if one is None or other is None or one.shape != other.shape:
            continue
        if one.numbers.tobytes() != other.numbers.tobytes():
            distance, unequal = _difference(name, one, other)
            distances.append(distance)
            elements += islice(unequal, SHOWN - len(elements))
    return tuple(elements), tuple(distances)


@dataclass(frozen=True)
class Values:
    """A kept tensor as an array of numpy."""

    dtype: str
    shape: tuple[int, ...]
    numbers: Any
    codes: Any
    """The memory of each number as an integer: its sign and its magnitude; None if it has none."""

    @classmethod
    def of(cls, dtype: str, shape: str, data: bytes) -> Values | None:
        """Return a kept tensor; None for a type that has no decoder."""
        code = SIGNED_MAGNITUDES.get(dtype)
        codes = None if code is None else np.frombuffer(data, code)
        sizes = tuple(map(int, re.findall(r"\d+", shape)))
        decode = DECODERS.get(dtype)
        return None if decode is None else cls(dtype, sizes, decode(data), codes)


def _float8_e4m3fn(data: bytes) -> Any:
    """Return float8 with 4 bits of exponent, biased by 7, and no infinity.

    https://arxiv.org/abs/2209.05433
    """
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10.0), mantissa * 2.0**-9)
    size[code & LOW == LOW] = np.nan
    return np.where(code & ~LOW, -size, size)[np.frombuffer(data, "uint8")]


DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **{
        name: partial(np.frombuffer, dtype=name)
        for name in (
            *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
            *("float16", "float32", "float64", "complex64", "complex128"),
        )
    },
    # These are the upper half of a float32, and of a float16.
    "bfloat16": lambda data: (np.frombuffer(data, "u2").astype("u4") << 16).view("float32"),
    "float8_e5m2": lambda data: (np.frombuffer(data, "u1").astype("u2") << 8).view("float16"),
    "float8_e4m3fn": _float8_e4m3fn,
}
"""How the memory of a tensor is decoded, by the name of its type."""

SIGNED_MAGNITUDES: Mapping[str, str] = {
    "float64": "uint64",
    "float32": "uint32",
    "float16": "uint16",
    "bfloat16": "uint16",
    "float8_e5m2": "uint8",
    "float8_e4m3fn": "uint8",
}
"""Integers as wide as a type of which the next larger magnitude is the next larger integer."""


def _unequal(left: Any, right: Any) -> Any:
    """Return where two arrays have other bits, or other values if they are of other types."""
    if left.dtype != right.dtype:
        return (left != right) & ~((left != left) & (right != right))  # noqa: PLR0124 - NaN
    size = left.dtype.itemsize
    one, other = (np.ascontiguousarray(each).view("uint8") for each in (left, right))
    return (one.reshape(-1, size) != other.reshape(-1, size)).any(axis=1)


def _ulps(left: Values, right: Values) -> Any:
    """Return how many numbers of their type lie between each two.

    None for two types, and for a type whose numbers have no such order.
    """
    if left.dtype != right.dtype or left.codes is None:
        return None
    sign = np.uint64(1 << 8 * left.codes.itemsize - 1)
    one, other = (each.codes.astype("uint64") for each in (left, right))
    larger, smaller = (find(one & ~sign, other & ~sign) for find in (np.maximum, np.minimum))
    return np.where((one ^ other) & sign, larger + smaller, larger - smaller)


def _difference(name: str, left: Values, right: Values) -> tuple[Distance, Iterator[Element]]:
    """Return how far two tensors are apart, and the elements in which they differ."""
    wide = "complex128" if "c" in (left.numbers.dtype.kind, right.numbers.dtype.kind) else "float64"
    unequal, ulps = _unequal(left.numbers, right.numbers), _ulps(left, right)
    finite = np.isfinite(left.numbers) & np.isfinite(right.numbers)
    elements = (
        Element(
            name,
            tuple(map(int, np.unravel_index(place, left.shape) if left.shape else ())),
            str(left.numbers[place].item()),
            str(right.numbers[place].item()),
            int(ulps[place]) if ulps is not None and finite[place] else None,
        )
        for place in np.flatnonzero(unequal).tolist()
    )
    total = int(unequal.sum()), left.numbers.size
    one, other = (each.numbers.astype(wide)[finite] for each in (left, right))
    if not one.size:
        return Distance(name, None, None, None, None, *total), elements
    apart, scale = np.abs(one - other), np.abs(other)
    relative = apart[scale > 0] / scale[scale > 0]
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    distance = Distance(
        name,
        float(apart.max()),
        float(relative.max()) if relative.size else None,
        float(np.vdot(other, one).real / lengths) if lengths else None,
        None if ulps is None else int(ulps[finite].max()),
        *total,
    )
    return distance, elements
