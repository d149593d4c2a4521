"""Fingerprints that a device computes. Many fingerprints are fetched from the device at once.

A device fingerprint is a sum over the words in memory. Each word is first mixed with a key for its
position. The mixing steps are invertible, so a change of one word always changes the sum. Sums are
modulo a power of two. The order of the reduction, which devices do not guarantee, has therefore no
effect. The steps are those of SplitMix64 (https://prng.di.unimi.it).

Tensors that are read together share a batch. A batch takes about twenty launches of torch's own
ops, or three where the kernel of `device_kernel` works. Without a batch, each tensor takes a dozen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib import import_module
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash

from torchrepro.trace.fingerprint import (
    ALGORITHM,
    fingerprint,
    is_lazy,
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
"""The most bytes of a batch of torch's ops. Its temporary memory is up to eleven times as large."""

KERNEL_BATCH = 1 << 26
"""The most bytes of a batch of the kernel, which needs no temporary memory."""

_CONCATENATED = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
_CONCATENATED |= {torch.int32, torch.int64}  # any device can; other dtypes are read as bytes


def sums_of_batch(tensors: Sequence[Any], mixing: Mixing) -> Any:
    """Return the cumulative sums at the end of each contiguous tensor, on the device.

    The shape is (2, streams, tensors). The first row sums the mixed words, the second row the mixed
    words times their keys. `_rows` separates the tensors. All tensors are on one device and have
    elements. Neighbours of the same dtype share launches. The function does not wait for the
    device, except at the first tensor of a dtype.
    """
    device, words, lengths = tensors[0].device, [], []
    for dtype, neighbours in groupby(tensors, attrgetter("dtype")):
        read_as = dtype if dtype in _CONCATENATED else torch.uint8
        padding, parts = _padding(device, read_as), []
        for tensor in neighbours:
            flat = tensor if tensor.dim() == 1 else tensor.view(-1)
            parts.append(flat if read_as is dtype else flat.view(read_as))
            missing = -tensor.nbytes % mixing.width
            if missing:
                parts.append(padding[: missing // read_as.itemsize])
            lengths.append((tensor.nbytes + missing) // mixing.width)
        words.append(torch.cat(parts).view(getattr(torch, mixing.dtype)))
    together = words[0] if len(words) == 1 else torch.cat(words)
    keys, ends = _keys_of_batch(mixing, device, stream_of(device), tuple(lengths))
    both = keys.new_empty((2, *keys.shape))
    _mix(torch.add(together, keys, out=both[0]), mixing)
    torch.mul(both[0], keys, out=both[1])
    return both.cumsum(-1, dtype=both.dtype).index_select(-1, ends)


@lru_cache(64)
def _padding(device: Any, dtype: Any) -> Any:
    return torch.zeros(8, dtype=dtype, device="cpu").to(device)


@lru_cache(32)
def _keys_of_batch(
    mixing: Mixing, device: Any, _stream: Any, lengths: tuple[int, ...]
) -> tuple[Any, Any]:
    """Return the keys of all words of a batch, and the position of the last word of each tensor.

    Both are made on the current stream of the device, so only that stream may read them. Steps
    repeat, so most batches are in the cache.
    """
    table = key_tables(mixing, device, CHUNK)
    keys = torch.cat([table[:, :length] for length in lengths], -1)
    return keys, _copied_to(device, torch.tensor(lengths, device="cpu").cumsum(0) - 1)


def _copied_to(device: Any, host: Any) -> Any:
    """Copy a tensor to a device. Waits for the device only if the host's memory cannot be pinned.

    https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
    """
    try:
        return host.pin_memory().to(device, non_blocking=True)
    except (RuntimeError, NotImplementedError):  # no accelerator that pins memory
        return host.to(device)


def sums_by_kernel(kernel: Any, tensors: Sequence[Any], mixing: Mixing) -> Any:
    """Return the two sums of each tensor, in the shape (tensors, 2), by one launch of `kernel`.

    All tensors are contiguous and on one device, and have elements. The function does not wait for
    the device, except at the first batch.
    """
    # A word that is not aligned cannot be loaded.
    aligned = [tensor if tensor.data_ptr() % 8 == 0 else tensor.clone() for tensor in tensors]
    device = tensors[0].device
    sizes = np.array([tensor.nbytes for tensor in aligned])
    programs = -(-sizes // (mixing.width * kernel.WORDS))
    first = np.arange(programs.sum()) - np.repeat(programs.cumsum() - programs, programs)
    numbers = np.repeat(np.arange(len(sizes)), programs)
    addresses = [tensor.data_ptr() for tensor in aligned]
    rows = addresses, sizes, numbers, first * (kernel.WORDS // ROW)
    table = _copied_to(device, torch.from_numpy(np.concatenate(rows, dtype=np.int64)))
    totals = torch.zeros((len(sizes), 2), dtype=torch.int64, device=device)
    within = getattr(_module(device), "device", nullcontext)
    with within(device):
        kernel.start(table, len(sizes), key_tables(mixing, device, FEW)[0], totals, mixing)
    return totals


_CUMULATIVE = 3
"""The number of dimensions of cumulative sums."""


def _rows(totals: Any) -> Sequence[bytes]:
    """Return the 16 bytes of each tensor. `totals` are the sums of one tensor or of a batch.

    Differences of cumulative sums are exact, because integers wrap around.
    """
    if totals.ndim == _CUMULATIVE:
        totals = np.diff(totals, axis=-1, prepend=totals.dtype.type(0)).T  # tensors first
    memory = totals.tobytes()
    return [memory[start : start + 16] for start in range(0, len(memory), 16)]


def _sums_one_by_one(tensors: Sequence[Any], mixing: Mixing) -> Any:
    return torch.stack([sums(iter([tensor]), mixing) for tensor in tensors])


@dataclass(frozen=True, slots=True)
class Summation:
    """How a device computes sums."""

    name: str  # of the library whose kernels compute the sums of a batch
    mixing: Mixing
    of_batch: Callable[[Sequence[Any]], Any]
    """Returns the sums of contiguous tensors that are on the device and have elements."""
    room: int  # bytes of a batch
    takes_large: bool = False  # `of_batch` also takes tensors of more than `SMALL` bytes


@cache
def summation(device: Any) -> Summation | None:
    """Return the fastest method that gives the sums of the host on `device`, or None.

    A method that raises an error is skipped. Waits for the device.
    """
    mixing = _mixing(device)
    if mixing is None:
        return None
    probes = [
        torch.arange(-9, length, dtype=dtype, device="cpu")
        for length, dtype in ((1, torch.int8), (4000, torch.int64), (2, torch.int16))
    ]
    expected = [sums(iter([probe]), mixing).numpy().tobytes() for probe in probes]
    for method in _methods(device, mixing):
        try:
            totals = method.of_batch([probe.to(device) for probe in probes]).cpu().numpy()
        except Exception:  # noqa: BLE001, S112 - a driver or a compiler may raise any error
            continue
        if _rows(totals) == expected:
            return method
    return None


def _methods(device: Any, mixing: Mixing) -> Iterator[Summation]:
    if mixing is WIDE and device.type in KERNEL_DEVICES:
        with suppress(Exception):  # there is no Triton, or Triton does not fit this torch
            kernel = import_module("torchrepro.trace.device_kernel")
            by_kernel = partial(sums_by_kernel, kernel, mixing=mixing)
            yield Summation(kernel.NAME, mixing, by_kernel, KERNEL_BATCH, takes_large=True)
    yield Summation("torch", mixing, partial(sums_of_batch, mixing=mixing), BATCH)
    yield Summation("torch", mixing, partial(_sums_one_by_one, mixing=mixing), BATCH)


KERNEL_DEVICES = frozenset({"cuda", "xpu"})
"""The types of devices that Triton compiles for."""


class PendingDigest:
    """A digest that is not known yet: of memory on a device, or of the result of a collective.

    Its life, in which states may be skipped:

    - *unfinished*: a collective still writes the tensor. `land` reads the tensor, when the program
      uses it, or when the step ends.
    - *waiting*: the tensor waits for its batch (see `WaitingOutputs`). `land` launches the batch.
    - *launched*: `sums` are computed on the device.
    - *fetched*: `bytes` is known. `fetch` leads here from each state.
    """

    __slots__ = ("bytes", "is_unfinished", "land", "layout", "sizes", "sums")

    def __init__(self, layout: str = "", sizes: tuple[int, ...] = ()) -> None:
        self.layout = layout
        self.sizes = sizes
        self.sums: list[tuple[Any, int]] = []
        """For each part that is not empty: sums on the device, and the row in them."""
        self.bytes: bytes | None = None
        self.is_unfinished = False
        self.land: Callable[[], object] | None = None

    def start(self) -> None:
        """Read the tensor, if that has not begun."""
        if (land := self.land) is not None:
            land()

    def become(self, digest: Digest) -> None:
        """Take the value of `digest`, which is bytes, or launched or fetched."""
        if isinstance(digest, bytes):
            self.bytes = digest
        else:
            self.layout, self.sizes, self.sums = digest.layout, digest.sizes, digest.sums
            self.bytes = digest.bytes
        self.is_unfinished, self.land = False, None


Digest = bytes | PendingDigest
"""The fingerprint of a tensor, or its first bytes."""


def device_fingerprints(tensors: Sequence[Any]) -> list[PendingDigest]:
    """Start to compute the fingerprints of tensors on their devices, as `device_fingerprint` does.

    Plain contiguous tensors of at most `SMALL` bytes share batches. Never raises.
    """
    digests = [PendingDigest() for _ in tensors]
    by_device: dict[Any, list[tuple[PendingDigest, Any]]] = defaultdict(list)
    for digest, tensor in zip(digests, tensors, strict=True):
        if is_small_and_plain(tensor):
            by_device[tensor.device].append((digest, tensor))
        else:
            digest.become(device_fingerprint(tensor))
    for rows in by_device.values():
        launch(rows)
    return digests


def is_small_and_plain(tensor: Any) -> bool:
    """Whether a tensor may share a batch."""
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


def launch(rows: Sequence[tuple[PendingDigest, Any]]) -> None:
    """Start to compute the digests of small plain tensors on one device. Never raises."""
    with unobserved():
        device = rows[0][1].device
        method = summation(device)
        if method is not None and not is_capturing(device):
            by_dtype: dict[Any, list[tuple[PendingDigest, Any]]] = defaultdict(list)
            for row in rows:
                by_dtype[row[1].dtype].append(row)
            batch: list[tuple[PendingDigest, Any]] = []
            room = method.room
            for row in chain.from_iterable(by_dtype.values()):
                size = row[1].nbytes
                if size > room:
                    _launch_batch(method.of_batch, batch)
                    batch, room = [], method.room
                batch.append(row)
                room -= size
            _launch_batch(method.of_batch, batch)
    for digest, tensor in rows:
        if not digest.sums:
            digest.become(device_fingerprint(tensor))


def _launch_batch(
    of_batch: Callable[[Sequence[Any]], Any], batch: Sequence[tuple[PendingDigest, Any]]
) -> None:
    try:
        totals = of_batch([tensor for _, tensor in batch])
    except Exception:  # noqa: BLE001 - a driver may raise any error; each tensor is read alone
        return
    for row, (digest, tensor) in enumerate(batch):
        digest.sizes, digest.sums, digest.land = (tensor.nbytes,), [(totals, row)], None


def device_fingerprint(tensor: Any) -> PendingDigest:
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


def fetch(digests: Iterable[PendingDigest]) -> None:
    """Fill in the bytes of `digests`. Waits for each device once, and copies from it once.

    A digest may occur several times: as the output of an op and as an input of other ops.
    """
    distinct = {id(digest): digest for digest in digests}.values()
    for digest in distinct:
        digest.start()
    # Read the sums before the bytes: another thread that fetches the same digest sets the bytes
    # before it deletes the sums.
    with_sums = [(digest, digest.sums) for digest in distinct]
    missing = [(digest, sums) for digest, sums in with_sums if digest.bytes is None]
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
    for digest, sums_of_parts in missing:
        parts = b"".join(fetched[id(totals)][row] for totals, row in sums_of_parts)
        digest.bytes = xxhash.xxh3_128_digest(f"{digest.layout} {digest.sizes}".encode() + parts)
        digest.sums = []


def algorithm(device: Any) -> str:
    """Return the name of the arithmetic that `device_fingerprint` uses on `device`."""
    with unobserved():
        mixing = _mixing(device)
    return mixing.name if mixing else ALGORITHM


def summed_by(device: Any) -> str:
    """Return the name of the library whose kernels compute the sums on `device`."""
    with unobserved():
        method = summation(device)
    return method.name if method else "the host"


def _start(tensor: Any) -> PendingDigest:
    memory = memory_of(tensor)
    digest = PendingDigest(memory.layout, tuple(part.nbytes for part in memory.parts))
    for part in memory.parts:
        # Do not wait while the device's stream is capturing a graph.
        if is_capturing(part.device):
            return _constant_fingerprint("captured into a graph")
        if part.nbytes:
            method = summation(part.device)
            if method is None:
                digest = PendingDigest()
                digest.bytes = fingerprint(tensor)
                return digest
            if method.takes_large and part.is_contiguous() and not is_lazy(part):
                digest.sums.append((method.of_batch([part]), 0))
            else:
                digest.sums.append((sums(pieces(part), method.mixing), 0))
    return digest


def _constant_fingerprint(layout: str) -> PendingDigest:
    digest = PendingDigest()
    digest.bytes = xxhash.xxh3_128_digest(layout.encode())
    return digest


def is_capturing(device: Any) -> bool:
    """Whether the current stream of a device is capturing a graph."""
    return bool(_functions(device)[0]())


def stream_of(device: Any) -> Any:
    """Return the current stream of a device, or None if the device has no streams."""
    return _functions(device)[1](device)


@cache
def _functions(device: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return (
        getattr(_module(device), "is_current_stream_capturing", lambda: False),
        getattr(_module(device), "current_stream", lambda _: None),
    )


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
