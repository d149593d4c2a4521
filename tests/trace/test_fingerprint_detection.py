"""What a fingerprint sees: every change of a bit or of its place, in every dtype and layout."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from torchrepro.trace.device_fingerprint import Pending, device_fingerprint, fetch
from torchrepro.trace.fingerprint import NARROW, fingerprint, memory_of, pieces, sums, unobserved

Bits = NDArray[np.unsignedinteger]
Change = Callable[["Words", Bits, np.random.Generator], tuple[Bits, Bits]]

TRIALS = 50
SIDE = 16


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
        if self.dtype is torch.bool:
            return rng.integers(0, 2, (SIDE, SIDE)).astype(unsigned)
        if self.arithmetic:
            return rng.standard_normal((SIDE, SIDE)).astype(self.arithmetic).view(unsigned)
        return rng.integers(0, 1 << self.bits, (SIDE, SIDE), unsigned)


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


def _two_places(before: Bits, rng: np.random.Generator, even: bool) -> tuple[int, int]:
    """Return two places that hold other words, side by side or at an even distance."""
    flat = before.reshape(-1)
    while True:
        first = int(rng.integers(flat.size - 1))
        distance = int(rng.integers(1, SIDE)) * 2 if even else 1
        if first + distance < flat.size and flat[first] != flat[first + distance]:
            return first, first + distance


def _swapped(before: Bits, rng: np.random.Generator, even: bool) -> Bits:
    one, other = _two_places(before, rng, even)
    after = before.copy().reshape(-1)
    after[[one, other]] = after[[other, one]]
    return after.reshape(before.shape)


def _flipped(before: Bits, rng: np.random.Generator, places: int, bit: int) -> Bits:
    after = before.copy().reshape(-1)
    after[rng.choice(after.size, places, replace=False)] ^= after.dtype.type(1 << bit)
    return after.reshape(before.shape)


def one_ulp(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """The last bit of one element."""
    return before, _flipped(before, rng, 1, 0)


def everywhere(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """A little more everywhere."""
    if words.arithmetic in (np.float32, np.float64):
        return before, (before.view(words.arithmetic) + words.arithmetic(1e-7)).view(before.dtype)
    return before, before ^ before.dtype.type(1)


def sign_of_one(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """The sign of one element."""
    return before, _flipped(before, rng, 1, words.bits - 1)


def negated(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """The sign of every element."""
    if not words.is_float:
        return before, (~before) + before.dtype.type(1)
    return before, before ^ before.dtype.type(1 << (words.bits - 1))


def swapped_neighbours(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """Two elements side by side, exchanged."""
    return before, _swapped(before, rng, even=False)


def swapped_far(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """Two elements at an even distance, exchanged."""
    return before, _swapped(before, rng, even=True)


def permuted_rows(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """The same rows in another order."""
    return before, np.roll(before, int(rng.integers(1, SIDE)), 0)


def same_bit_of_two(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """The same bit of two elements."""
    bit = 0 if words.dtype is torch.bool else int(rng.integers(words.bits))
    return before, _flipped(before, rng, 2, bit)


def pair(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """Something added to one element and taken from another."""
    after = before.copy().reshape(-1)
    one, other = rng.choice(after.size, 2, replace=False)
    values = after.view(words.arithmetic) if words.arithmetic else after
    amount = values.dtype.type(0.5 if words.arithmetic else 1)
    values[one] += amount
    values[other] -= amount
    return before, after.reshape(before.shape)


def transposed(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """The same elements with rows as columns, in a tensor of the same shape."""
    return before, before.T.copy()


def sign_of_zero(words: Words, before: Bits, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """A zero's sign."""
    before = before.copy()
    before[3, 5] = 0
    after = before.copy()
    after[3, 5] = 1 << (words.bits - 1)
    return before, after


CHANGES: tuple[Change, ...] = (
    *(one_ulp, everywhere, sign_of_one, negated, swapped_neighbours, swapped_far),
    *(permuted_rows, same_bit_of_two, pair, transposed, sign_of_zero),
)
NEEDS_A_SIGN = (sign_of_one, negated, pair)


def _cases() -> Iterator[tuple[Words, Change]]:
    for words in DTYPES:
        for change in CHANGES:
            if change is sign_of_zero and not words.is_float:
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


WAYS = (fingerprint, device_fingerprint, narrow)


def _tensor(words: Words, bits: Bits) -> torch.Tensor:
    flat = torch.from_numpy(bits.copy()).view(torch.uint8)
    return flat.view(words.dtype)


def _missed(
    words: Words, change: Change, laid_out: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, int]:
    """Count the trials in which each way saw no change."""
    rng = np.random.default_rng(sum(map(ord, f"{words.dtype} {change.__name__}")))
    seen = []
    for _ in range(TRIALS):
        both = [laid_out(_tensor(words, bits)) for bits in before_and_after(words, change, rng)]
        seen += [(way.__name__, *map(way, both)) for way in WAYS]
    fetch(one for _, *both in seen for one in both if isinstance(one, Pending))
    missed = dict.fromkeys((way.__name__ for way in WAYS), 0)
    for name, before, after in seen:
        missed[name] += _bytes(before) == _bytes(after)
    return missed


def _bytes(found: bytes | Pending | None) -> bytes | None:
    return found.bytes if isinstance(found, Pending) else found


def before_and_after(words: Words, change: Change, rng: np.random.Generator) -> tuple[Bits, Bits]:
    """Return words and what a change makes of them, which is something else."""
    while True:
        before, after = change(words, words.random(rng), rng)
        if not np.array_equal(before, after):
            return before, after


@pytest.mark.parametrize(
    ("words", "change"),
    list(_cases()),
    ids=lambda case: getattr(case, "__name__", "") or str(case.dtype),
)
def test_every_change_is_seen_in_every_dtype(words: Words, change: Change) -> None:
    """No way of fingerprinting misses a change in any trial."""
    with np.errstate(over="ignore", invalid="ignore"):
        missed = _missed(words, change, lambda dense: dense)

    assert missed == dict.fromkeys(missed, 0)


@pytest.mark.filterwarnings("ignore")  # torch says of these layouts that they may still change
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_change_is_seen_in_every_layout(layout: str) -> None:
    """No way of fingerprinting misses a change of what a tensor of any layout keeps."""
    missed = {change.__name__: _missed(FLOAT32, change, LAYOUTS[layout]) for change in CHANGES}

    assert {name for name, counts in missed.items() if any(counts.values())} == set()
