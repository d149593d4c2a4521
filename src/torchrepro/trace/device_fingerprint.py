"""Fingerprints that a device computes. Many fingerprints are fetched from the device at once.

A device fingerprint is a sum over the words in memory. Each word is first mixed with a key for its
position. The mixing steps are invertible, so a change of one word always changes the sum. Sums are
modulo a power of two. The order of the reduction, which devices do not guarantee, has therefore no
effect. The steps are those of SplitMix64 (https://prng.di.unimi.it).

Tensors that are read together share a batch. A batch takes about twenty kernel launches for all
of its tensors. Without a batch, each tensor takes a dozen launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import xxhash

from torchrepro.trace.fingerprint import (
    ALGORITHM,
    fingerprint,
    memory_of,
    pieces,
    torch,
    unobserved,
    unreadable_memory,
    widths,
)
from torchrepro.trace.op_facts import PLAIN

ROW = 1024
"""Keys per row; each row has the keys of the row before, plus `Mixing.step`."""

CHUNK = 1 << 24
"""Bytes that are mixed at a time, in all streams; needs up to four times as much memory."""

FEW = 1 << 19
"""The most bytes for which a small table of keys is used."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """The arithmetic of device fingerprints, for words of one width."""

    name: str
    dtype: str
    width: int  # bytes of a word
    multipliers: tuple[int, int]
    shifts: tuple[int, int]
    step: int  # difference between the keys of two rows; even, so that keys stay odd
    streams: int  # repetitions with different keys; each gives two sums


WIDE = Mixing(
    *("mix64", "int64", 8),
    multipliers=(-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15),
    shifts=(32, 29),
    step=0x3C6EF372FE94F82A,
    streams=1,
)
"""For devices that multiply integers of 64 bits."""

NARROW = Mixing(
    *("mix32", "int32", 4),
    multipliers=(-0x7A143589, 0x27D4EB2F),
    shifts=(15, 13),
    step=0x3C6EF372,
    streams=2,
)
"""For devices that multiply integers of 64 bits slowly, or not at all.

The vector unit of Ascend multiplies 16 and 32 bits:
https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/910beta2/API/ascendcopapi/atlasascendc_api_07_0037.html
"""


def sums(part: Iterator[Any], mixing: Mixing) -> Any:
    """Return the sums over consecutive contiguous tensors, or None if all are empty.

    The sums are a tensor of 16 bytes on the device. The function does not wait for the device.
    """
    total, position = None, 0
    for piece in part:
        for chunk in piece.reshape(-1).view(torch.uint8).split(CHUNK // mixing.streams):
            words = _words(chunk, mixing)
            if words.numel():
                chunk_sums = _sums_at(words, position, mixing)
                total = chunk_sums if total is None else total + chunk_sums
            position += words.numel()
    return total


def _words(chunk: Any, mixing: Mixing) -> Any:
    missing = -chunk.numel() % mixing.width
    if missing:
        chunk = torch.nn.functional.pad(chunk, (0, missing))
    elif (chunk.data_ptr() | chunk.storage_offset()) % mixing.width:  # it may be unaligned
        chunk = chunk.clone()
    return chunk.view(getattr(torch, mixing.dtype))


def _sums_at(words: Any, position: int, mixing: Mixing) -> Any:
    """Return two sums for each stream: of the mixed words, and of the mixed words times their keys.

    `position` is the number of words of the tensor that precede `words`.
    """
    room = FEW if len(words) * mixing.width <= FEW else CHUNK
    row, column = divmod(position, ROW)
    keys = key_tables(mixing, words.device, room)[:, column : column + len(words)]
    if row:
        keys = keys + _signed(row * mixing.step, mixing.width)
    mixed = words + keys
    _mix(mixed, mixing)
    plain = mixed.sum(-1, dtype=mixed.dtype)
    weighted = mixed.mul_(keys).sum(-1, dtype=mixed.dtype)
    return torch.stack((plain, weighted), -1).view(-1)


def _mix(words: Any, mixing: Mixing) -> None:
    for multiplier, shift in zip(mixing.multipliers, mixing.shifts, strict=True):
        words.mul_(multiplier)
        words.bitwise_xor_(words >> shift)


@cache
def key_tables(mixing: Mixing, device: Any, room: int) -> Any:
    """Return the keys for `room` bytes on a device, one row for each stream of `mixing`.

    The keys are cached. They are computed on the host and copied synchronously, so all streams of
    the device may read them.
    """
    rows = room // mixing.width // ROW + 1
    dtype = getattr(torch, mixing.dtype)
    steps = torch.arange(rows, dtype=dtype, device="cpu") * mixing.step
    first = [
        [_signed(_splitmix(stream * ROW + position) | 1, mixing.width) for position in range(ROW)]
        for stream in range(mixing.streams)
    ]
    keys = steps[:, None] + torch.tensor(first, dtype=dtype, device="cpu")[:, None]
    return keys.flatten(1).to(device)


def _splitmix(number: int) -> int:
    mask = (1 << 64) - 1
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & mask
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
    return mixed ^ mixed >> 31


def _signed(number: int, width: int) -> int:
    half = 1 << (8 * width - 1)
    return (number + half) % (2 * half) - half


MIXINGS = {"npu": (NARROW, WIDE)}
"""The arithmetic that each type of device may use, the fastest first."""

OTHER_MIXINGS = (WIDE, NARROW)


SMALL = 1 << 20
"""The most bytes of a tensor that shares a batch. The launches for a larger one cost little."""

BATCH = 1 << 22
"""The most bytes of a batch. Its temporary memory is up to eleven times as large."""


def sums_of_batch(tensors: Sequence[Any], mixing: Mixing) -> Any:
    """Return the cumulative sums at the end of each contiguous tensor, on the device.

    The shape is (2, streams, tensors). The first row sums the mixed words, the second row the mixed
    words times their keys. `_rows` separates the tensors. All tensors are on one device and have
    elements. The function only waits for the device at the first batch with these lengths.
    """
    device = tensors[0].device
    parts, lengths = [], []
    for tensor in tensors:
        memory = tensor.view(-1).view(torch.uint8)
        missing = -len(memory) % mixing.width
        parts.append(memory)
        if missing:
            parts.append(memory.new_zeros(missing))
        lengths.append((len(memory) + missing) // mixing.width)
    words = torch.cat(parts).view(getattr(torch, mixing.dtype))
    keys, ends = _keys_of_batch(mixing, device, tuple(lengths))
    both = words.new_empty((2, *keys.shape))
    _mix(torch.add(words, keys, out=both[0]), mixing)
    torch.mul(both[0], keys, out=both[1])
    return both.cumsum(-1, dtype=both.dtype).index_select(-1, ends)


def _rows(totals: Any) -> Sequence[bytes]:
    """Return the 16 bytes of each tensor. `totals` has the sums of one tensor or of a batch.

    Differences of cumulative sums are exact, because integers wrap around.
    """
    if totals.ndim == 1:
        return [totals.tobytes()]
    separate = np.diff(totals, axis=-1, prepend=totals.dtype.type(0))
    memory = np.ascontiguousarray(separate.T).tobytes()  # by tensor, stream, and kind of sum
    return [memory[start : start + 16] for start in range(0, len(memory), 16)]


@lru_cache(16)
def _keys_of_batch(mixing: Mixing, device: Any, lengths: tuple[int, ...]) -> tuple[Any, Any]:
    """Return the keys of all words of a batch, and the position of the last word of each tensor.

    Both are computed on the host and copied synchronously, so all streams of the device may read
    them. The same parameters are read in each step, so few batches are cached.
    """
    table = key_tables(mixing, torch.device("cpu"), CHUNK)
    keys = torch.cat([table[:, :length] for length in lengths], -1)
    ends = torch.tensor(lengths, device="cpu").cumsum(0) - 1
    return keys.to(device), ends.to(device)


@dataclass(slots=True)
class Pending:
    """A fingerprint that a device computes."""

    bytes: bytes | None = None  # the 16 bytes, after `fetch`
    layout: str = ""
    sizes: tuple[int, ...] = ()
    sums: list[tuple[Any, int]] = field(default_factory=list)
    """Until `fetch`, for each part that is not empty: sums on the device, and the row in them."""


def device_fingerprints(tensors: Sequence[Any]) -> list[Pending]:
    """Start to compute the fingerprints of tensors on their devices, as `device_fingerprint` does.

    Plain contiguous tensors of at most `SMALL` bytes share batches. Never raises.
    """
    batches: dict[Any, list[list[int]]] = defaultdict(list)
    room: dict[Any, int] = defaultdict(int)
    for index, tensor in enumerate(tensors):
        if _is_small_and_plain(tensor):
            device, size = tensor.device, tensor.nbytes
            if size > room[device]:
                batches[device].append([])
                room[device] = BATCH
            batches[device][-1].append(index)
            room[device] -= size
    started: dict[int, Pending] = {}
    for batch in (batch for of_device in batches.values() for batch in of_device):
        started |= zip(batch, _batch([tensors[index] for index in batch]), strict=False)
    return [
        started.get(index) or device_fingerprint(tensor) for index, tensor in enumerate(tensors)
    ]


def _is_small_and_plain(tensor: Any) -> bool:
    try:
        return bool(
            tensor.__class__ in PLAIN
            and (width := widths.get(tensor.dtype)) is not None
            and tensor.is_contiguous()
            and 0 < (size := tensor.nbytes) <= SMALL
            and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)
            and tensor.data_ptr()
            and tensor.untyped_storage().nbytes() >= tensor.storage_offset() * width + size
        )
    except RuntimeError:  # no storage: a sparse tensor, or a tensor within `torch.func`
        return False


def _batch(tensors: Sequence[Any]) -> Sequence[Pending]:
    """Return the fingerprints of tensors on one device; empty if the device computes no batches."""
    device = tensors[0].device
    try:
        with unobserved():
            mixing = _mixing(device)
            if len(tensors) == 1 or mixing is None or _is_capturing(device):
                return ()
            if not _batches_are_exact(mixing, device):
                return ()
            totals = sums_of_batch(tensors, mixing)
    except Exception:  # noqa: BLE001 - a driver may raise any error; each tensor is read alone
        return ()
    return [
        Pending(sizes=(tensor.nbytes,), sums=[(totals, row)]) for row, tensor in enumerate(tensors)
    ]


def device_fingerprint(tensor: Any) -> Pending:
    """Start to compute the fingerprint of `tensor` on its device. `fetch` fills in the bytes later.

    Two tensors have equal device fingerprints if and only if `fingerprint` is equal for both. The
    bytes of the two functions differ. The first tensor of a device waits for a test of the device's
    arithmetic. If the test fails, every tensor of the device waits. A tensor that is being captured
    into a graph has no value yet, so it gets a constant fingerprint. Never raises.
    """
    try:
        with unobserved():
            return _start(tensor)
    except Exception:  # noqa: BLE001 - the code of a subclass may raise any error
        return _constant_fingerprint(unreadable_memory(tensor).layout)


def fetch(pendings: Iterable[Pending]) -> None:
    """Fill in the bytes of `pendings`. Waits for each device once, and copies from it once.

    A fingerprint may occur several times: as the output of an op and as an input of other ops.
    """
    distinct = {id(pending): pending for pending in pendings}.values()
    # Read the sums before the bytes: another thread that fetches the same fingerprint sets the
    # bytes before it deletes the sums.
    with_sums = [(pending, pending.sums) for pending in distinct]
    missing = [(pending, sums) for pending, sums in with_sums if pending.bytes is None]
    by_device: dict[Any, dict[int, Any]] = defaultdict(dict)
    fetched: dict[int, Sequence[bytes]] = {}
    with unobserved():
        for _, sums_of_parts in missing:
            for totals, _ in sums_of_parts:
                by_device[totals.device][id(totals)] = totals
        for device, distinct_sums in by_device.items():
            getattr(_module(device), "synchronize", lambda _: None)(device)  # all of its streams
            flat = [totals.reshape(-1).view(torch.uint8) for totals in distinct_sums.values()]
            copied = torch.cat(flat).cpu().split([len(memory) for memory in flat])
            for (key, totals), memory in zip(distinct_sums.items(), copied, strict=True):
                on_host = memory.numpy().view(str(totals.dtype).removeprefix("torch."))
                fetched[key] = _rows(on_host.reshape(totals.shape))
    for pending, sums_of_parts in missing:
        parts = b"".join(fetched[id(totals)][row] for totals, row in sums_of_parts)
        pending.bytes = xxhash.xxh3_128_digest(f"{pending.layout} {pending.sizes}".encode() + parts)
        pending.sums = []


def algorithm(device: Any) -> str:
    """Return the name of the arithmetic that `device_fingerprint` uses on `device`."""
    with unobserved():
        mixing = _mixing(device)
    return mixing.name if mixing else ALGORITHM


def _start(tensor: Any) -> Pending:
    memory = memory_of(tensor)
    pending = Pending(layout=memory.layout, sizes=tuple(part.nbytes for part in memory.parts))
    for part in memory.parts:
        # Do not wait while the device's stream is capturing a graph.
        if _is_capturing(part.device):
            return _constant_fingerprint("captured into a graph")
        if part.nbytes:
            mixing = _mixing(part.device)
            if mixing is None:
                return Pending(fingerprint(tensor))
            pending.sums.append((sums(pieces(part), mixing), 0))
    return pending


def _constant_fingerprint(layout: str) -> Pending:
    return Pending(xxhash.xxh3_128_digest(layout.encode()))


def _is_capturing(device: Any) -> bool:
    return bool(getattr(_module(device), "is_current_stream_capturing", lambda: False)())


@cache
def _module(device: Any) -> Any:
    return torch.get_device_module(device)


@cache
def _mixing(device: Any) -> Mixing | None:
    """Return the first arithmetic with the same sums on `device` as on the host, or None.

    An arithmetic that raises an error on the device is skipped. Waits for the device.
    """
    probe = torch.arange(-9999, 9999, dtype=torch.int64, device="cpu") * WIDE.multipliers[0]
    probe = probe.view(torch.uint8)[5:]  # neither aligned nor whole words
    for mixing in MIXINGS.get(device.type, OTHER_MIXINGS):
        try:
            device_sums = sums(iter([probe.to(device)]), mixing).cpu()
            if torch.equal(device_sums, sums(iter([probe]), mixing)):
                return mixing
        except Exception:  # noqa: BLE001, S112 - a driver may raise any error
            continue
    return None


@cache
def _batches_are_exact(mixing: Mixing, device: Any) -> bool:
    """Return whether a batch on `device` has the sums of its tensors. Waits for the device."""
    probes = [
        torch.arange(-9, length, dtype=dtype, device="cpu")
        for length, dtype in ((1, torch.int8), (4000, torch.int64), (2, torch.int16))
    ]
    try:
        totals = sums_of_batch([probe.to(device) for probe in probes], mixing).cpu().numpy()
    except Exception:  # noqa: BLE001 - a driver may raise any error
        return False
    return _rows(totals) == [sums(iter([probe]), mixing).numpy().tobytes() for probe in probes]
