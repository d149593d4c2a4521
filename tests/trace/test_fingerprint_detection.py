"""Every change of a bit or of its position changes a fingerprint, in every dtype and layout."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from torchrepro.trace.device_fingerprint import (
    NARROW,
    PendingDigest,
    device_fingerprint,
    fetch,
    sums,
)
from torchrepro.trace.fingerprint import fingerprint, memory_of, pieces, unobserved

Words = NDArray[np.unsignedinteger]

TRIALS, FEW = 50, 10
SIDE = 16
ZERO = 53
"""Where each square of words has a zero."""

BITS = {
    name: bits
    for bits, names in {
        1: "bool",
        8: "int8 uint8 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
        " float4_e2m1fn_x2",
        16: "float16 bfloat16 complex32 int16 uint16",
        32: "float32 complex64 int32 uint32",
        64: "float64 complex128 int64 uint64",
    }.items()
    for name in names.split()
    if hasattr(torch, name)  # an older torch lacks some
}
"""The dtypes, with the bits of the words that their memory consists of."""


def _random(bits: int, rng: np.random.Generator) -> Words:
    if bits <= 8:
        found = rng.integers(0, 1 << bits, SIDE * SIDE, np.uint8)
    else:
        size = bits // 8
        found = rng.standard_normal(SIDE * SIDE).astype(f"f{size}").view(f"u{size}")
    found[ZERO] = 0
    return found


def _flip(words: Words, rng: np.random.Generator, places: int, bit: int) -> None:
    words[rng.choice(words.size, places, replace=False)] ^= words.dtype.type(1 << bit)


def _flip_all(words: Words, bit: int) -> None:
    words ^= words.dtype.type(1 << bit)


def _swap(words: Words, rng: np.random.Generator, distance: int) -> None:
    one = int(rng.integers(words.size - distance))
    words[[one, one + distance]] = words[[one + distance, one]]


def _move(words: Words, bits: int, rng: np.random.Generator) -> None:
    """Add a number to one word and subtract it from another."""
    one, other = rng.choice(words.size, 2, replace=False)
    words[[one]] += words.dtype.type(1)
    words[[other]] -= words.dtype.type(1)
    words &= words.dtype.type((1 << bits) - 1)


CHANGES: dict[str, Callable[[Words, int, np.random.Generator], object]] = {
    "one ulp": lambda words, _, rng: _flip(words, rng, 1, 0),
    "a little everywhere": lambda words, *_: _flip_all(words, 0),
    "the sign of one": lambda words, bits, rng: _flip(words, rng, 1, bits - 1),
    "every sign": lambda words, bits, _: _flip_all(words, bits - 1),
    "neighbours swapped": lambda words, _, rng: _swap(words, rng, 1),
    "two swapped": lambda words, _, rng: _swap(words, rng, 2 * int(rng.integers(1, SIDE))),
    "rows permuted": lambda words, _, rng: words.put(
        range(words.size), np.roll(words, SIDE * int(rng.integers(1, SIDE)))
    ),
    "the same bit of two": lambda words, bits, rng: _flip(words, rng, 2, int(rng.integers(bits))),
    "from one to another": _move,
    "transposed": lambda words, *_: words.put(range(words.size), words.reshape(SIDE, SIDE).T),
    "the sign of a zero": lambda words, bits, _: words.put(ZERO, 1 << (bits - 1)),
}


class Wrapper(torch.Tensor):
    """A tensor that stores its value in two others, as quantized and sharded tensors do."""

    upper: torch.Tensor
    lower: torch.Tensor

    @staticmethod
    def __new__(cls, upper: torch.Tensor, lower: torch.Tensor) -> "Wrapper":
        shape = (upper.shape[0] + lower.shape[0], *upper.shape[1:])
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=upper.dtype)
        made.upper, made.lower = upper, lower
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["upper", "lower"], None

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object, kwargs: object) -> None:
        raise AssertionError("a fingerprint runs no op of a subclass")


ROWS, COLUMNS = torch.arange(SIDE + 1) * SIDE, torch.arange(SIDE).repeat(SIDE)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda dense: torch.cat([dense[:1], dense])[1:],
    "transposed": lambda dense: dense.t(),
    "channels_last": lambda dense: dense.view(2, 8, 4, 4).to(memory_format=torch.channels_last),
    "gaps": lambda dense: torch.nn.functional.pad(dense, (1, 2))[:, 1:-2],
    "expanded": lambda dense: dense.expand(3, SIDE, SIDE),
    "conjugate": lambda dense: torch.view_as_complex(dense.view(SIDE, SIDE // 2, 2)).conj(),
    "negative": torch._neg_view,
    "sparse_coo": lambda dense: torch.sparse_coo_tensor(
        torch.ones(SIDE, SIDE).nonzero().t(), dense.reshape(-1), dense.shape
    ),
    "sparse_csr": lambda dense: torch.sparse_csr_tensor(
        ROWS, COLUMNS, dense.reshape(-1), dense.shape
    ),
    "quantised": lambda dense: torch._make_per_tensor_quantized_tensor(
        dense.view(torch.int32), 0.1, 3
    ),
    "nested": lambda dense: torch.nested.nested_tensor([dense[:5], dense[5:]]),
    "jagged": lambda dense: torch.nested.nested_tensor_from_jagged(
        dense, torch.tensor([0, 5, SIDE])
    ),
    "wrapper": lambda dense: Wrapper(dense[:4], dense[4:]),
}


def narrow(tensor: torch.Tensor) -> PendingDigest:
    """Start a fingerprint as on a device that multiplies 32 bits."""
    with unobserved():
        memory = memory_of(tensor)
        found = [sums(pieces(part), NARROW) for part in memory.parts]
    digest = PendingDigest(memory.layout)
    digest.sums = [(sums_of_part, 0) for sums_of_part in found]
    return digest


FINGERPRINTS = (fingerprint, device_fingerprint, narrow)


def _missed(
    name: str, change: str, laid_out: Callable[[torch.Tensor], torch.Tensor], trials: int
) -> dict[str, int]:
    """Count the trials in which each fingerprint did not change."""
    rng = np.random.default_rng(sum(map(ord, f"{name} {change}")))
    seen: list[tuple[str, Any, Any]] = []
    while len(seen) < trials * len(FINGERPRINTS):
        before = _random(BITS[name], rng)
        after = before.copy()
        CHANGES[change](after, BITS[name], rng)
        if not np.array_equal(before, after):
            squares = [words.reshape(SIDE, SIDE) for words in (before, after)]
            both = [
                laid_out(torch.from_numpy(square).view(torch.uint8).view(getattr(torch, name)))
                for square in squares
            ]
            seen += [(take.__name__, *map(take, both)) for take in FINGERPRINTS]
    fetch(one for _, *both in seen for one in both if isinstance(one, PendingDigest))
    missed = dict.fromkeys((take.__name__ for take in FINGERPRINTS), 0)
    for taken, *both in seen:
        one, other = (each.bytes if isinstance(each, PendingDigest) else each for each in both)
        missed[taken] += one == other
    return missed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", BITS)
def test_every_change_changes_the_fingerprint_in_every_dtype(dtype: str, change: str) -> None:
    """No fingerprint misses a change in any trial."""
    missed = _missed(dtype, change, lambda dense: dense, TRIALS)

    assert missed == dict.fromkeys(missed, 0)


@pytest.mark.filterwarnings("ignore")  # torch says of these layouts that they may still change
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_change_changes_the_fingerprint_in_every_layout(layout: str) -> None:
    """No fingerprint misses a change of the memory of any layout."""
    missed = {change: _missed("float32", change, LAYOUTS[layout], FEW) for change in CHANGES}

    assert {name for name, counts in missed.items() if any(counts.values())} == set()
