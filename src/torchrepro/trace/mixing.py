"""Integer arithmetic that mixes the words of a tensor into sums, the same on every device.

A word is mixed with a key of its place, in steps that can each be undone, so that a change of one
word always shows. The results are added up modulo a power of two: the order of a reduction, which
devices leave open, cannot show. The steps are those of SplitMix64 (https://prng.di.unimi.it).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROW = 1024
"""Keys that are unlike each other; those of the next row are these with `Mixing.step` added."""

CHUNK = 1 << 24
"""Bytes that are mixed at a time; meanwhile up to four times as many lie on the device."""

FEW = 1 << 19
"""Bytes up to which a small table of keys is enough."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Arithmetic on words of one width."""

    name: str
    dtype: str
    width: int
    """Bytes of a word."""
    multipliers: tuple[int, int]
    shifts: tuple[int, int]
    step: int
    """What a row of keys adds to those of the row before; even, so that keys stay odd."""
    streams: int
    """Times that all is done, with other keys: each yields two sums."""


WIDE = Mixing(
    *("mix64", "int64", 8),
    multipliers=(-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15),
    shifts=(32, 29),
    step=0x3C6EF372FE94F82A,
    streams=1,
)
"""Where the device multiplies integers of 64 bits."""

NARROW = Mixing(
    *("mix32", "int32", 4),
    multipliers=(-0x7A143589, 0x27D4EB2F),
    shifts=(15, 13),
    step=0x3C6EF372,
    streams=2,
)
"""Where it does so slowly, or not at all.

The vector unit of Ascend multiplies 16 and 32 bits:
https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/910beta2/API/ascendcopapi/atlasascendc_api_07_0037.html
"""


def sums(part: Iterator[Any], mixing: Mixing) -> Any:
    """Return the sums of contiguous tensors that follow each other; None where all are empty.

    They stay on the device, in a tensor of 16 bytes; nothing waits for them.
    """
    total = None
    at = 0
    for piece in part:
        for chunk in bytes_of(piece).split(CHUNK):
            words = _words(chunk, mixing)
            if words.numel():
                mixed = _mixed(words, at, mixing)
                total = mixed if total is None else total + mixed
            at += words.numel()
    return total


def bytes_of(piece: Any) -> Any:
    """Return the memory of a contiguous tensor as bytes."""
    torch = import_module("torch")
    return piece.reshape(-1).view(torch.uint8)


def is_aligned(memory: Any, mixing: Mixing) -> bool:
    """Whether bytes begin where a word may; memory from elsewhere begins anywhere."""
    return bool((memory.data_ptr() | memory.storage_offset()) % mixing.width == 0)


def _words(chunk: Any, mixing: Mixing) -> Any:
    """Return bytes as words, the last one filled up with zeros."""
    torch = import_module("torch")
    missing = -chunk.numel() % mixing.width
    if missing:
        chunk = torch.nn.functional.pad(chunk, (0, missing))
    elif not is_aligned(chunk, mixing):
        chunk = chunk.clone()
    return chunk.view(getattr(torch, mixing.dtype))


def _mixed(words: Any, at: int, mixing: Mixing) -> Any:
    torch = import_module("torch")
    room = FEW if len(words) * mixing.width <= FEW else CHUNK
    row, column = divmod(at, ROW)
    found = []
    for table in key_tables(mixing, words.device, room):
        keys = table[column : column + len(words)]
        if row:
            keys = keys + _signed(row * mixing.step, mixing.width)
        mixed = words + keys
        for multiplier, shift in zip(mixing.multipliers, mixing.shifts, strict=True):
            mixed.mul_(multiplier)
            mixed.bitwise_xor_(mixed >> shift)
        found += [mixed.sum(dtype=mixed.dtype), mixed.mul_(keys).sum(dtype=mixed.dtype)]
    return torch.stack(found)


@cache
def key_tables(mixing: Mixing, device: Any, room: int) -> Sequence[Any]:
    """Return the keys of so many bytes on a device, a table for each stream; they stay there.

    Made on the host and waited for, once: every stream of the device may read them afterwards.
    """
    torch = import_module("torch")
    rows = room // mixing.width // ROW + 1
    dtype = getattr(torch, mixing.dtype)
    steps = torch.arange(rows, dtype=dtype, device="cpu") * mixing.step
    tables = []
    for stream in range(mixing.streams):
        first = torch.tensor(_keys(stream, mixing.width), dtype=dtype, device="cpu")
        tables.append((steps[:, None] + first).reshape(-1).to(device))
    return tables


def _keys(stream: int, width: int) -> list[int]:
    numbers = (_splitmix(stream * ROW + place) for place in range(ROW))
    return [_signed(number | 1, width) for number in numbers]


def _splitmix(number: int) -> int:
    mask = (1 << 64) - 1
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return mixed ^ mixed >> 31


def _signed(number: int, width: int) -> int:
    """Return `number` modulo the size of a word, as a signed one."""
    half = 1 << (8 * width - 1)
    return (number + half) % (2 * half) - half
