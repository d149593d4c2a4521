"""The sums of `fingerprint.WIDE` in one Triton kernel, which reads memory once.

Imported only where Triton is installed. https://triton-lang.org
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.trace.fingerprint import (
    FEW,
    PIECE,
    ROW,
    WIDE,
    bytes_of,
    is_aligned,
    key_tables,
    pieces,
    sums,
)

if TYPE_CHECKING:
    from collections.abc import Callable

jit: Callable[[Callable[..., Any]], Any] = import_module("triton").jit
tl: Any = import_module("triton.language")

# Triton compiles the source of its kernels and takes every name in them for a value of the kernel.
# Their annotations are therefore its own only.

PROGRAMS = 4096
"""How many programs share the rows of a large tensor: several per processor of a device."""


RESULTS = 1 << 10
"""Parts whose sums lie beside each other."""


class Results:
    """Room for the sums of parts, which the kernel adds to: one launch for each part."""

    def __init__(self, device: Any, _width: int) -> None:
        torch = import_module("torch")
        self._sums = torch.zeros(RESULTS, 2, dtype=torch.int64, device=device)
        self._taken = 0

    @property
    def is_full(self) -> bool:
        """Whether no part can be put in any more."""
        return self._taken == RESULTS

    def put(self, part: Any) -> int:
        """Compute the sums of a part of which `results_width` says that it can be put in."""
        memory = bytes_of(next(pieces(part)))
        _add_sums(memory if is_aligned(memory, WIDE) else memory.clone(), self._sums[self._taken])
        self._taken += 1
        return self._taken - 1

    def computed(self) -> Any:
        """Return the sums of all parts, on their device."""
        return self._sums[: self._taken]

    def bytes_of(self, fetched: Any) -> bytes:
        """Return 16 bytes for each part."""
        return fetched.numpy().tobytes()  # type: ignore[no-any-return]


def results_width(size: int) -> int:
    """Return that a part of `size` bytes is put where others are; 0 for one that is alone.

    A larger one may have to be copied, which is done in pieces.
    """
    return int(size <= PIECE)


def sums_of_part(part: Any) -> Any:
    """Return the sums of a part of a `Memory`, as `fingerprint.sums` does, on its device."""
    torch = import_module("torch")
    lazy = part.is_conj() or part.is_neg()
    if part.is_contiguous() and not lazy and is_aligned(memory := bytes_of(part), WIDE):
        found = torch.zeros(2, dtype=torch.int64, device=memory.device)
        _add_sums(memory, found)
        return found
    return sums(pieces(part), WIDE)


def _add_sums(memory: Any, found: Any) -> None:
    """Add the sums of bytes to two zeros."""
    keys = key_tables(WIDE, memory.device, FEW)[0]
    size = memory.numel()
    rows = -(-size // (WIDE.width * ROW))
    each = -(-rows // PROGRAMS)
    with _current(memory.device):
        _kernel[(-(-rows // each),)](
            memory, _whole_words(memory, keys), keys, found, size, each,
            row=ROW, step=WIDE.step,
            first=WIDE.multipliers[0], second=WIDE.multipliers[1],
            shift=WIDE.shifts[0], other=WIDE.shifts[1],
        )  # fmt: skip


def _current(device: Any) -> Any:
    """Return a context in which `device` is the current one: Triton starts its kernels there."""
    return getattr(import_module("torch").get_device_module(device), "device", nullcontext)(device)


def _whole_words(memory: Any, none: Any) -> Any:
    """Return the complete words; `none`, which is never read, if there are none."""
    words = memory.numel() // WIDE.width
    if not words:
        return none
    return memory[: words * WIDE.width].view(none.dtype)


@jit
def _mixed(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917 - a kernel knows nothing else
    words, keys,
    first: tl.constexpr, second: tl.constexpr, shift: tl.constexpr, other: tl.constexpr,
):  # fmt: skip
    mixed = (words + keys) * first
    mixed = (mixed ^ (mixed >> shift)) * second
    return mixed ^ (mixed >> other)


@jit
def _kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0913, PLR0917 - a kernel knows nothing else
    memory, words, keys, found, size, each,
    row: tl.constexpr, step: tl.constexpr, first: tl.constexpr, second: tl.constexpr,
    shift: tl.constexpr, other: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * each
    column = tl.arange(0, row)
    key_row = tl.load(keys + column)
    whole = size // 8
    sums = tl.zeros([row], tl.int64)
    products = tl.zeros([row], tl.int64)
    for number in range(each):
        place = (begin + number) * row + column
        here = place < whole
        key = key_row + (begin + number) * step
        mixed = _mixed(tl.load(words + place, mask=here, other=0), key, first, second, shift, other)
        mixed = tl.where(here, mixed, 0)
        sums += mixed
        products += mixed * key
    tl.atomic_add(found, tl.sum(sums))
    tl.atomic_add(found + 1, tl.sum(products))
    if (begin == 0) & (size % 8 != 0):  # the last word, filled up with zeros
        word = tl.zeros([1], tl.int64)
        for byte in tl.static_range(8):
            at = whole * 8 + byte + tl.arange(0, 1)
            word += tl.load(memory + at, mask=at < size, other=0).to(tl.int64) << (8 * byte)
        at_word = whole + tl.arange(0, 1).to(tl.int64)
        key = tl.load(keys + at_word % row) + at_word // row * step
        mixed = _mixed(word, key, first, second, shift, other)
        tl.atomic_add(found + tl.arange(0, 1), mixed)
        tl.atomic_add(found + 1 + tl.arange(0, 1), mixed * key)
