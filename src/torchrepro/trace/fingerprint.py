"""Fingerprints of tensors: 128 bits, of every bit of memory and its place.

Those of an accelerator are computed there, and fetched later, many at once.

On the host a fingerprint is XXH3. On a device it is a sum: each word is mixed with a key of its
place, in invertible steps, so that a change of one word always shows. The results are added modulo
a power of two, so that the order of a reduction, which devices leave open, does not matter. The
steps are those of SplitMix64 (https://prng.di.unimi.it).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib import import_module
from io import BytesIO
from typing import Any

import xxhash

torch: Any = import_module("torch")
"""Without its types: much of what is asked for here is private or of subclasses."""

PIECE = 1 << 24
"""Bytes that are copied at a time where memory is not contiguous."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that holds the value of a tensor."""

    kind: str
    """What distinguishes it from a plain contiguous tensor of the same bytes; empty for that."""
    parts: tuple[Any, ...]  # strided tensors, as contiguous as they can be without a copy


_UNOBSERVED: tuple[Callable[[], Any], ...] = (
    *(torch.no_grad, torch._C.DisableTorchFunction),  # noqa: SLF001
    *(torch._C._DisableFuncTorch, torch._C._DisableTorchDispatch),  # noqa: SLF001
)
"""Private, because nothing public turns them off; where one is gone recording is refused."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Keep autograd, subclasses, modes and `torch.func` from seeing operations in the block.

    They may record, count or change what is asked of a tensor.
    """
    with ExitStack() as stack:
        for off in _UNOBSERVED:
            stack.enter_context(off())
        yield


def memory_of(tensor: Any) -> Memory:
    """Return the memory of `tensor`, whatever its kind; called within `unobserved`.

    Raises whatever the code of a subclass raises.
    """
    # A subclass keeps its value in other tensors. Those without elements are left out: a jagged
    # tensor caches its lengths in the shape of one.
    # https://docs.pytorch.org/docs/stable/generated/torch.Tensor.__torch_dispatch__.html
    if hasattr(tensor, "__tensor_flatten__"):
        wait = getattr(tensor, "trigger_wait", None)  # what a collective has not written yet
        if wait is not None:
            wait()
        names = [name for name in tensor.__tensor_flatten__()[0] if getattr(tensor, name).numel()]
        title = f"{type(tensor).__qualname__} {' '.join(names)}"
        return _joined(title, [getattr(tensor, name) for name in names])
    # Nothing public tells the tensors inside of `torch.func`, and functional ones, from others;
    # where a torch has not even these, asking raises, and their memory is not read.
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001
        return _joined("transformed", [torch._C._functorch.get_unwrapped(tensor)])  # noqa: SLF001
    if torch._is_functional_tensor(tensor):  # noqa: SLF001
        return _joined("functional", [torch._from_functional_tensor(tensor)])  # noqa: SLF001
    if tensor.device.type == "meta":
        return Memory("no memory", ())
    layout = str(tensor.layout)
    if layout == "torch.sparse_coo":  # the public names of both refuse one that is not coalesced
        inner = [tensor._indices(), tensor._values()]  # noqa: SLF001
        return _joined(f"sparse coo, coalesced {tensor.is_coalesced()}", inner)
    if layout in _INDICES:
        return _joined(layout, [getattr(tensor, name)() for name in (*_INDICES[layout], "values")])
    if tensor.is_mkldnn:
        return _joined("mkldnn", [tensor.to_dense()])
    if tensor.is_quantized:
        scheme = str(tensor.qscheme())
        if "per_tensor" in scheme:
            scale = f"{tensor.q_scale().hex()} {tensor.q_zero_point()}"
            return _joined(f"{scheme} {scale}", [tensor.int_repr()])
        scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
        return _joined(f"{scheme} {tensor.q_per_channel_axis()}", [tensor.int_repr(), *scales])
    if tensor.is_nested:
        inner = tensor.unbind()
        return _joined(f"nested {[tuple(part.shape) for part in inner]}", inner)
    if not _has_memory(tensor):
        return Memory("no memory", ())
    order = None if tensor.is_contiguous() else _order_of_memory(tensor.shape, tensor.stride())
    if order is None:
        return Memory("", (tensor,))
    return Memory(_kind_of_order(order), (tensor.permute(order),))


_INDICES = {
    **dict.fromkeys(("torch.sparse_csr", "torch.sparse_bsr"), ("crow_indices", "col_indices")),
    **dict.fromkeys(("torch.sparse_csc", "torch.sparse_bsc"), ("ccol_indices", "row_indices")),
}
"""The names of what compressed layouts keep besides their values."""


def not_read(tensor: Any) -> Memory:
    """Return a stand-in for memory that was not found: the fingerprint is the same for a type."""
    return Memory(f"unread {type(tensor).__module__}.{type(tensor).__qualname__}", ())


def pieces(part: Any) -> Iterator[Any]:
    """Yield the value of a part of a `Memory` in order, as contiguous tensors of any dtype.

    A contiguous part comes as it is, without a copy. Of others every piece but the last has a
    multiple of 8 bytes, and hardly more than `PIECE` unless a row has many more.
    """
    # Elements that are in no memory: conjugated or negated ones, or zeros.
    lazy = part.is_conj() or part.is_neg() or part._is_zerotensor()  # noqa: SLF001 - they have no other name
    if part.is_contiguous() and not lazy:
        yield part
        return
    if not lazy:  # some dtypes have no kernel that copies
        same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        part = part.view(same.get(part.itemsize, part.dtype))
    rows = (part,)
    if part.nbytes > PIECE and part.dim():
        row = part.nbytes // part.shape[0]
        if row * 8 > PIECE and row % 8 == 0:
            for inner in part.unbind(0):
                yield from pieces(inner)
            return
        rows = part.split(max(PIECE // row // 8, 1) * 8)  # 8 rows are a multiple of 8 bytes
    for each in rows:
        yield each.clone(memory_format=torch.contiguous_format)  # lazy numbers become what they are


def _order_of_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] != 1, -strides[dim], dim))
    size = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != size:
            return None
        size *= shape[dim]
    return order


def _joined(name: str, tensors: Iterable[Any]) -> Memory:
    inner = [memory_of(tensor) for tensor in tensors]
    kinds = ", ".join(f"{memory.kind}:{len(memory.parts)}" for memory in inner)
    return Memory(f"{name}({kinds})", tuple(part for memory in inner for part in memory.parts))


def _kind_of_order(order: Sequence[int]) -> str:
    return f"order {' '.join(map(str, order))}"


def _has_memory(tensor: Any) -> bool:
    """Whether all the elements lie in storage: not on meta, in a fake, or after it was freed."""
    storage = tensor.untyped_storage()
    last = tensor.storage_offset() + sum(
        stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    zeros = tensor._is_zerotensor()  # noqa: SLF001 - zeros without memory have no other name
    enough = not tensor.numel() or (last + 1) * tensor.itemsize <= storage.nbytes()
    return bool(zeros or (enough and storage.device.type != "meta"))


ROW = 1024
"""Keys of one row; those of the next row are these with `Mixing.step` added."""

CHUNK = 1 << 24
"""Bytes that are mixed at a time, in all streams; up to four times as many are on the device."""

FEW = 1 << 19
"""Bytes up to which a small table of keys is used."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """Arithmetic on words of one width."""

    name: str
    dtype: str
    width: int  # bytes of a word
    multipliers: tuple[int, int]
    shifts: tuple[int, int]
    step: int  # difference between the keys of two rows; even, so that keys stay odd
    streams: int  # how often all is done, each time with other keys; each yields two sums


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
"""For devices that do so slowly, or not at all.

The vector unit of Ascend multiplies 16 and 32 bits:
https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/910beta2/API/ascendcopapi/atlasascendc_api_07_0037.html
"""


def sums(part: Iterator[Any], mixing: Mixing) -> Any:
    """Return the sums of consecutive contiguous tensors; None where all are empty.

    They stay on the device, in a tensor of 16 bytes; nothing waits for them.
    """
    total, at = None, 0
    for piece in part:
        for chunk in piece.reshape(-1).view(torch.uint8).split(CHUNK // mixing.streams):
            words = _words(chunk, mixing)
            if words.numel():
                here = _sums_at(words, at, mixing)
                total = here if total is None else total + here
            at += words.numel()
    return total


def _words(chunk: Any, mixing: Mixing) -> Any:
    missing = -chunk.numel() % mixing.width
    if missing:
        chunk = torch.nn.functional.pad(chunk, (0, missing))
    elif (chunk.data_ptr() | chunk.storage_offset()) % mixing.width:  # it may begin anywhere
        chunk = chunk.clone()
    return chunk.view(getattr(torch, mixing.dtype))


def _sums_at(words: Any, at: int, mixing: Mixing) -> Any:
    """Return the sums of words that begin at place `at` of a tensor.

    There are two of each stream: of the mixed words, and of their products with their keys.
    """
    room = FEW if len(words) * mixing.width <= FEW else CHUNK
    row, column = divmod(at, ROW)
    keys = key_tables(mixing, words.device, room)[:, column : column + len(words)]
    if row:
        keys = keys + _signed(row * mixing.step, mixing.width)
    mixed = words + keys
    for multiplier, shift in zip(mixing.multipliers, mixing.shifts, strict=True):
        mixed.mul_(multiplier)
        mixed.bitwise_xor_(mixed >> shift)
    plain = mixed.sum(-1, dtype=mixed.dtype)
    weighted = mixed.mul_(keys).sum(-1, dtype=mixed.dtype)
    return torch.stack((plain, weighted), -1).view(-1)


@cache
def key_tables(mixing: Mixing, device: Any, room: int) -> Any:
    """Return the keys for so many bytes on a device, a row for each stream; they stay there.

    They are made on the host and waited for once; every stream of the device may read them then.
    """
    rows = room // mixing.width // ROW + 1
    dtype = getattr(torch, mixing.dtype)
    steps = torch.arange(rows, dtype=dtype, device="cpu") * mixing.step
    first = [
        [_signed(_splitmix(stream * ROW + place) | 1, mixing.width) for place in range(ROW)]
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


ALGORITHM = "xxh3-128"
MANY = 1 << 12  # cached results; a program has few shapes


class _Arrays(dict[int, Any]):
    """The ctypes array of so many bytes: faster than `functools.lru_cache` where it exists."""

    def __missing__(self, size: int) -> Any:
        if len(self) >= MANY:
            self.clear()
        found = self[size] = ctypes.c_char * size
        return found


arrays = _Arrays()


@lru_cache(MANY)
def _order(shape: Any, strides: Any) -> bytes | None:
    order = _order_of_memory(shape, strides)
    return None if order is None else _kind_of_order(order).encode()


_plain_types = {torch.Tensor, torch.nn.Parameter}
widths: dict[Any, int] = {
    dtype: dtype.itemsize
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""Bytes of an element of each dtype that is not quantised."""

_digest = xxhash.xxh3_128_digest


def fingerprint(tensor: Any) -> bytes:
    """Return 16 bytes that differ where a bit, its place, or the order of memory differs.

    Tensors of equal value and order of memory have the same, wherever their memory lies. Only
    that memory is read, without a copy if it has no gaps; the tensor stays unchanged. A tensor
    without memory has a constant, and so has one whose memory is not found, for its type. Never
    raises. https://github.com/Cyan4973/xxHash
    """
    try:
        if (
            type(tensor) in _plain_types  # subclasses may count or change what is asked of them
            and (width := widths.get(tensor.dtype)) is not None
            and tensor.is_cpu
            and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)
        ):
            size, start = tensor.nbytes, tensor.data_ptr()
            end = tensor.storage_offset() * width + size
            # A freed storage still has an address if the tensor has an offset.
            if (start or not size) and tensor.untyped_storage().nbytes() >= end:
                if tensor.is_contiguous():
                    return _digest(arrays[size].from_address(start))
                order = _order(tensor.shape, tensor.stride())
                if order is not None:
                    return _digest(order + _digest(arrays[size].from_address(start)))
    except RuntimeError:  # no storage to ask: sparse, or inside of a transformed function
        return _of_any_kind(tensor)
    return _of_any_kind(tensor)


def _of_any_kind(tensor: Any) -> bytes:
    try:
        with unobserved():
            return _of_memory(memory_of(tensor))
    except Exception:  # noqa: BLE001 - the code of a subclass is anybody's, and may raise anything
        return _of_memory(not_read(tensor))


def _of_memory(memory: Memory) -> bytes:
    parts = [_of_part(part) for part in memory.parts]
    return _digest(memory.kind.encode() + b"".join(parts)) if memory.kind else parts[0]


def _of_part(part: Any) -> bytes:
    state = xxhash.xxh3_128()
    for piece in pieces(part):
        here = piece.cpu()
        state.update(arrays[here.nbytes].from_address(here.data_ptr()))
    return state.digest()


# On devices.

MIXINGS = {"npu": (NARROW, WIDE)}
"""How types of devices may compute sums, the fastest first."""

OTHER_MIXINGS = (WIDE, NARROW)


@dataclass(slots=True)
class Pending:
    """A fingerprint that a device computes."""

    bytes: bytes | None = None  # the 16 bytes, once fetched
    kind: str = ""
    sizes: tuple[int, ...] = ()
    sums: list[Any] = field(default_factory=list)
    """16 bytes on the device for each part that has bytes, until they are fetched."""


def device_fingerprint(tensor: Any) -> Pending:
    """Begin to fingerprint `tensor` on its device, without waiting; `fetch` fills it in.

    Two tensors have the same where their `fingerprint` is the same; the bytes are others. Waits at
    the first tensor of a device, to test the device's arithmetic, and at every tensor of a device
    that fails the test. Tensors that are captured into a graph are not computed yet and have a
    constant. Never raises.
    """
    try:
        with unobserved():
            return _begun(tensor)
    except Exception:  # noqa: BLE001 - the code of a subclass is anybody's, and may raise anything
        return _constant(not_read(tensor).kind)


def fetch(pendings: Iterable[Pending]) -> None:
    """Fill in the bytes of `pendings`; waits for each device once and copies once from it.

    One may come several times: as an output of one op, and as an input of those that read it.
    """
    once = {id(pending): pending for pending in pendings}.values()
    # Another thread may fetch the same one: it sets the bytes before it drops the sums.
    missing = [(one, sums) for one, sums in [(one, one.sums) for one in once] if one.bytes is None]
    by_device: dict[Any, list[Any]] = defaultdict(list)
    fetched = {}
    with unobserved():
        for _, sums_of_parts in missing:
            for found in sums_of_parts:
                by_device[found.device].append(found.view(torch.uint8))
        for device, together in by_device.items():
            getattr(_module(device), "synchronize", lambda _: None)(device)  # all of its streams
            fetched[device] = BytesIO(torch.cat(together).cpu().numpy().tobytes())
    for pending, sums_of_parts in missing:
        parts = b"".join(fetched[found.device].read(16) for found in sums_of_parts)
        pending.bytes = xxhash.xxh3_128_digest(f"{pending.kind} {pending.sizes}".encode() + parts)
        pending.sums = []


def algorithm(device: Any) -> str:
    """Return the name of what `device_fingerprint` computes on `device`."""
    with unobserved():
        mixing = _mixing(device)
    return mixing.name if mixing else ALGORITHM


def _begun(tensor: Any) -> Pending:
    memory = memory_of(tensor)
    pending = Pending(kind=memory.kind, sizes=tuple(part.nbytes for part in memory.parts))
    for part in memory.parts:
        # Nothing may be waited for where the device's stream is recording a graph.
        if getattr(_module(part.device), "is_current_stream_capturing", lambda: False)():
            return _constant("captured into a graph")
        if part.nbytes:
            mixing = _mixing(part.device)
            if mixing is None:
                return Pending(fingerprint(tensor))
            pending.sums.append(sums(pieces(part), mixing))
    return pending


def _constant(kind: str) -> Pending:
    return Pending(xxhash.xxh3_128_digest(kind.encode()))


@cache
def _module(device: Any) -> Any:
    return torch.get_device_module(device)


@cache
def _mixing(device: Any) -> Mixing | None:
    """Return the first arithmetic in which `device` computes what the host computes.

    One that raises there is skipped. Waits for the device.
    """
    probe = torch.arange(-9999, 9999, dtype=torch.int64, device="cpu") * WIDE.multipliers[0]
    probe = probe.view(torch.uint8)[5:]  # neither aligned nor whole words
    for mixing in MIXINGS.get(device.type, OTHER_MIXINGS):
        try:
            there = sums(iter([probe.to(device)]), mixing).cpu()
            if torch.equal(there, sums(iter([probe]), mixing)):
                return mixing
        except Exception:  # noqa: BLE001, S112 - a driver may raise anything
            continue
    return None
