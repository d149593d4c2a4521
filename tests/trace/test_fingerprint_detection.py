"""What a fingerprint sees: every change of a bit or of its place, in every dtype and layout."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from torchrepro.trace.fingerprint import (
    NARROW,
    Pending,
    device_fingerprint,
    fetch,
    fingerprint,
    memory_of,
    pieces,
    sums,
    unobserved,
)

Bits = NDArray[np.unsignedinteger]
Change = Callable[["Words", Bits, np.random.Generator], Bits]

TRIALS = 50
SIDE = 16
ZERO = 3, 5
"""Where each square of words has a zero."""


@dataclass(frozen=True)
class Words:
    """A dtype, and what the words mean that its memory consists of."""

    dtype: torch.dtype
    bits: int
    is_float: bool = True
    arithmetic: type[np.floating] | None = None
    """The numpy type of the same words, where there is one."""

    def random(self, rng: np.random.Generator) -> Bits:
        """Return a square of random words that mean something."""
        unsigned = np.dtype(f"uint{self.bits}")
        if self.arithmetic:
            found = rng.standard_normal((SIDE, SIDE)).astype(self.arithmetic).view(unsigned)
        else:
            end = 2 if self.dtype is torch.bool else 1 << self.bits
            found = rng.integers(0, end, (SIDE, SIDE), unsigned)
        found[ZERO] = 0
        return found


def _known(name: str, *rest: object) -> list[Words]:
    """Return a row of words, unless this torch is too old for the dtype."""
    return [Words(getattr(torch, name), *rest)] if hasattr(torch, name) else []


FLOAT32 = Words(torch.float32, 32, True, np.float32)
DTYPES = (
    FLOAT32,
    Words(torch.float64, 64, True, np.float64),
    Words(torch.float16, 16, True, np.float16),
    Words(torch.bfloat16, 16),
    Words(torch.complex32, 16, True, np.float16),
    Words(torch.complex64, 32, True, np.float32),
    Words(torch.complex128, 64, True, np.float64),
    Words(torch.bool, 8, False),
    *_known("float8_e4m3fn", 8),
    *_known("float8_e5m2", 8),
    *_known("float8_e4m3fnuz", 8),
    *_known("float8_e5m2fnuz", 8),
    *_known("float8_e8m0fnu", 8, False),
    *_known("float4_e2m1fn_x2", 8, False),
    *(Words(dtype, 8, False) for dtype in (torch.int8, torch.uint8)),
    *(Words(dtype, 16, False) for dtype in (torch.int16, torch.uint16)),
    *(Words(dtype, 32, False) for dtype in (torch.int32, torch.uint32)),
    *(Words(dtype, 64, False) for dtype in (torch.int64, torch.uint64)),
)


def _swapped(before: Bits, rng: np.random.Generator, distance: int) -> Bits:
    """Return words of which two at a distance, which are not the same, are exchanged."""
    after = before.copy().reshape(-1)
    while True:
        one = int(rng.integers(after.size - distance))
        if after[one] != after[one + distance]:
            after[[one, one + distance]] = after[[one + distance, one]]
            return after.reshape(before.shape)


def _flipped(before: Bits, rng: np.random.Generator, places: int, bit: int) -> Bits:
    after = before.copy().reshape(-1)
    after[rng.choice(after.size, places, replace=False)] ^= after.dtype.type(1 << bit)
    return after.reshape(before.shape)


def _everywhere(words: Words, before: Bits, rng: np.random.Generator) -> Bits:
    if words.arithmetic in (np.float32, np.float64):
        return (before.view(words.arithmetic) + words.arithmetic(1e-7)).view(before.dtype)
    return before ^ before.dtype.type(1)


def _negated(words: Words, before: Bits, rng: np.random.Generator) -> Bits:
    if not words.is_float:
        return (~before) + before.dtype.type(1)
    return before ^ before.dtype.type(1 << (words.bits - 1))


def _same_bit_of_two(words: Words, before: Bits, rng: np.random.Generator) -> Bits:
    bit = 0 if words.dtype is torch.bool else int(rng.integers(words.bits))
    return _flipped(before, rng, 2, bit)


def _moved(words: Words, before: Bits, rng: np.random.Generator) -> Bits:
    """Add something to one element and take it from another."""
    after = before.copy().reshape(-1)
    one, other = rng.choice(after.size, 2, replace=False)
    values = after.view(words.arithmetic) if words.arithmetic else after
    amount = values.dtype.type(0.5 if words.arithmetic else 1)
    values[one] += amount
    values[other] -= amount
    return after.reshape(before.shape)


def _sign_of_zero(words: Words, before: Bits, rng: np.random.Generator) -> Bits:
    after = before.copy()
    after[ZERO] = 1 << (words.bits - 1)
    return after


CHANGES: dict[str, Change] = {
    "one ulp": lambda _, before, rng: _flipped(before, rng, 1, 0),
    "a little everywhere": _everywhere,
    "the sign of one": lambda words, before, rng: _flipped(before, rng, 1, words.bits - 1),
    "every sign": _negated,
    "neighbours swapped": lambda _, before, rng: _swapped(before, rng, 1),
    "two swapped": lambda _, before, rng: _swapped(before, rng, 2 * int(rng.integers(1, SIDE))),
    "rows permuted": lambda _, before, rng: np.roll(before, int(rng.integers(1, SIDE)), 0),
    "the same bit of two": _same_bit_of_two,
    "from one to another": _moved,
    "transposed": lambda _, before, __: before.T.copy(),
    "the sign of a zero": _sign_of_zero,
}
NEEDS_A_SIGN = ("the sign of one", "every sign", "from one to another")


def _cases() -> Iterator[tuple[Words, str]]:
    for words in DTYPES:
        for change in CHANGES:
            if change == "the sign of a zero" and not words.is_float:
                continue
            if change in NEEDS_A_SIGN and words.dtype is torch.bool:
                continue
            yield words, change


class Wrapper(torch.Tensor):
    """A tensor that keeps its value in two others, as quantised weights and sharded tensors do."""

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


def _with_gaps(dense: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(SIDE, SIDE + 3, dtype=dense.dtype)
    wide[:, 1:-2] = dense
    return wide[:, 1:-2]


def _coordinates(dense: torch.Tensor) -> torch.Tensor:
    indices = torch.ones(SIDE, SIDE).nonzero().t()
    return torch.sparse_coo_tensor(indices, dense.reshape(-1), dense.shape, check_invariants=False)


def _compressed(dense: torch.Tensor) -> torch.Tensor:
    crow = torch.arange(SIDE + 1) * SIDE
    columns = torch.arange(SIDE).repeat(SIDE)
    values = dense.reshape(-1)
    return torch.sparse_csr_tensor(crow, columns, values, dense.shape, check_invariants=False)


def _quantised(dense: torch.Tensor) -> torch.Tensor:
    return torch._make_per_tensor_quantized_tensor(dense.view(torch.int32), 0.1, 3)


def _nested(dense: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([dense[:5], dense[5:]])


def _jagged(dense: torch.Tensor) -> torch.Tensor:
    offsets = torch.tensor([0, 5, SIDE])
    return torch.nested.nested_tensor_from_jagged(dense, offsets)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "offset": lambda dense: torch.cat([dense[:1], dense])[1:],
    "transposed": lambda dense: dense.t(),
    "channels_last": lambda dense: dense.view(2, 8, 4, 4).to(memory_format=torch.channels_last),
    "gaps": _with_gaps,
    "expanded": lambda dense: dense.expand(3, SIDE, SIDE),
    "conjugate": lambda dense: torch.view_as_complex(dense.view(SIDE, SIDE // 2, 2)).conj(),
    "negative": torch._neg_view,
    "sparse_coo": _coordinates,
    "sparse_csr": _compressed,
    "quantised": _quantised,
    "nested": _nested,
    "jagged": _jagged,
    "wrapper": lambda dense: Wrapper(dense[:4], dense[4:]),
}


def narrow(tensor: torch.Tensor) -> Pending:
    """Begin as on a device that multiplies 32 bits."""
    with unobserved():
        memory = memory_of(tensor)
        found = [sums(pieces(part), NARROW) for part in memory.parts]
    return Pending(kind=memory.kind, sums=found)


FINGERPRINTS = (fingerprint, device_fingerprint, narrow)


def _tensor(words: Words, bits: Bits) -> torch.Tensor:
    flat = torch.from_numpy(bits.copy()).view(torch.uint8)
    return flat.view(words.dtype)


def _missed(
    words: Words, change: str, laid_out: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, int]:
    """Count the trials in which each fingerprint saw no change."""
    rng = np.random.default_rng(sum(map(ord, f"{words.dtype} {change}")))
    seen: list[tuple[str, Any, Any]] = []
    while len(seen) < TRIALS * len(FINGERPRINTS):
        before = words.random(rng)
        after = CHANGES[change](words, before, rng)
        if not np.array_equal(before, after):
            both = [laid_out(_tensor(words, bits)) for bits in (before, after)]
            seen += [(take.__name__, *map(take, both)) for take in FINGERPRINTS]
    fetch(one for _, *both in seen for one in both if isinstance(one, Pending))
    missed = dict.fromkeys((take.__name__ for take in FINGERPRINTS), 0)
    for name, *both in seen:
        one, other = (each.bytes if isinstance(each, Pending) else each for each in both)
        missed[name] += one == other
    return missed


@pytest.mark.parametrize(
    ("words", "change"),
    list(_cases()),
    ids=lambda case: str(getattr(case, "dtype", case)),
)
def test_every_change_is_seen_in_every_dtype(words: Words, change: str) -> None:
    """No fingerprint misses a change in any trial."""
    with np.errstate(over="ignore", invalid="ignore"):
        missed = _missed(words, change, lambda dense: dense)

    assert missed == dict.fromkeys(missed, 0)


@pytest.mark.filterwarnings("ignore")  # torch says of these layouts that they may still change
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_change_is_seen_in_every_layout(layout: str) -> None:
    """No fingerprint misses a change of what a tensor of any layout keeps."""
    missed = {change: _missed(FLOAT32, change, LAYOUTS[layout]) for change in CHANGES}

    assert {name for name, counts in missed.items() if any(counts.values())} == set()
