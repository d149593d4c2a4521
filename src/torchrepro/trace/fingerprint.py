"""Fingerprints of tensors: 128 bits that depend on every bit of memory and its position.

On the host, a fingerprint is an XXH3 hash. `device_fingerprint` has the arithmetic of devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import xxhash

torch: Any = import_module("torch")
"""Untyped, because this module uses many private names, and attributes of subclasses."""

PIECE = 1 << 24
"""Bytes that are copied at a time if memory is not contiguous."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that stores the value of a tensor."""

    layout: str
    """A text that differs between layouts of equal bytes; empty for a plain contiguous tensor."""
    parts: tuple[Any, ...]  # strided tensors, as contiguous as they can be without a copy


_UNOBSERVED: tuple[Callable[[], Any], ...] = (
    *(torch.no_grad, torch._C.DisableTorchFunction),  # noqa: SLF001
    *(torch._C._DisableFuncTorch, torch._C._DisableTorchDispatch),  # noqa: SLF001
)
"""Private, because torch has no public switches. If one is missing, recording is refused."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide the operations in a `with` block from autograd, subclasses, modes and `torch.func`.

    Each of these could record, count or change the operations.
    """
    with ExitStack() as stack:
        for off in _UNOBSERVED:
            stack.enter_context(off())
        yield


def memory_of(tensor: Any) -> Memory:
    """Return the memory of a tensor of any layout and class. Call it in an `unobserved` block.

    Raises any error that the code of a subclass raises.
    """
    # A subclass stores its value in inner tensors. Skip inner tensors without elements: a jagged
    # tensor caches its lengths in the shape of such a tensor.
    # https://docs.pytorch.org/docs/stable/generated/torch.Tensor.__torch_dispatch__.html
    if hasattr(tensor, "__tensor_flatten__"):
        wait = getattr(tensor, "trigger_wait", None)  # until a collective has written the tensor
        if wait is not None:
            wait()
        names = [name for name in tensor.__tensor_flatten__()[0] if getattr(tensor, name).numel()]
        title = f"{type(tensor).__qualname__} {' '.join(names)}"
        return _joined(title, [getattr(tensor, name) for name in names])
    # Torch has no public test for tensors within `torch.func` or for functional tensors. In a torch
    # without these private tests, the call raises an error, and the memory is not read.
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # noqa: SLF001
        return _joined("transformed", [torch._C._functorch.get_unwrapped(tensor)])  # noqa: SLF001
    if torch._is_functional_tensor(tensor):  # noqa: SLF001
        return _joined("functional", [torch._from_functional_tensor(tensor)])  # noqa: SLF001
    if tensor.device.type == "meta":
        return Memory("no memory", ())
    layout = str(tensor.layout)
    if layout == "torch.sparse_coo":  # public methods raise if it is not coalesced
        tensors = [tensor._indices(), tensor._values()]  # noqa: SLF001
        return _joined(f"sparse coo, coalesced {tensor.is_coalesced()}", tensors)
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
        tensors = tensor.unbind()
        return _joined(f"nested {[tuple(part.shape) for part in tensors]}", tensors)
    if not _has_memory(tensor):
        return Memory("no memory", ())
    order = None if tensor.is_contiguous() else _order_of_memory(tensor.shape, tensor.stride())
    if order is None:
        return Memory("", (tensor,))
    return Memory(_layout_of_order(order), (tensor.permute(order),))


_INDICES = {
    **dict.fromkeys(("torch.sparse_csr", "torch.sparse_bsr"), ("crow_indices", "col_indices")),
    **dict.fromkeys(("torch.sparse_csc", "torch.sparse_bsc"), ("ccol_indices", "row_indices")),
}
"""The methods that return the indices of compressed layouts."""


def unreadable_memory(tensor: Any) -> Memory:
    """Return a placeholder for memory that cannot be read. It depends only on the class."""
    return Memory(f"unread {type(tensor).__module__}.{type(tensor).__qualname__}", ())


def pieces(part: Any) -> Iterator[Any]:
    """Yield the value of a part of a `Memory` in order, as contiguous tensors of any dtype.

    A contiguous part is yielded without a copy. Other parts are copied piece by piece. Each piece
    except the last has a multiple of 8 bytes. A piece exceeds `PIECE` bytes only if 8 rows do.
    """
    lazy = is_lazy(part)
    if part.is_contiguous() and not lazy:
        yield part
        return
    if not lazy:  # some dtypes have no copy kernel
        same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        part = part.view(same.get(part.itemsize, part.dtype))
    rows = (part,)
    if part.nbytes > PIECE and part.dim():
        row = part.nbytes // part.shape[0]
        if row * 8 > PIECE and row % 8 == 0:
            for subtensor in part.unbind(0):
                yield from pieces(subtensor)
            return
        rows = part.split(max(PIECE // row // 8, 1) * 8)  # 8 rows are a multiple of 8 bytes
    for row_block in rows:
        yield row_block.clone(memory_format=torch.contiguous_format)  # also resolves lazy values


def is_lazy(part: Any) -> bool:
    """Whether values are not in memory: torch conjugates, negates or zeros them at each read."""
    return bool(part.is_conj() or part.is_neg() or part._is_zerotensor())  # noqa: SLF001 - no public name


def _order_of_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] != 1, -strides[dim], dim))
    size = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != size:
            return None
        size *= shape[dim]
    return order


def _joined(name: str, tensors: Iterable[Any]) -> Memory:
    memories = [memory_of(tensor) for tensor in tensors]
    layouts = ", ".join(f"{memory.layout}:{len(memory.parts)}" for memory in memories)
    return Memory(f"{name}({layouts})", tuple(part for memory in memories for part in memory.parts))


def _layout_of_order(order: Sequence[int]) -> str:
    return f"order {' '.join(map(str, order))}"


def _has_memory(tensor: Any) -> bool:
    """Whether all elements are in allocated storage; False for meta, fake and freed tensors."""
    storage = tensor.untyped_storage()
    last = tensor.storage_offset() + sum(
        stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    zeros = tensor._is_zerotensor()  # noqa: SLF001 - zeros without memory; no public name
    enough = not tensor.numel() or (last + 1) * tensor.itemsize <= storage.nbytes()
    return bool(zeros or (enough and storage.device.type != "meta"))


ALGORITHM = "xxh3-128"
MANY = 1 << 12  # the most cached results; a program has few shapes


class _Arrays(dict[int, Any]):
    """Maps a size in bytes to the ctypes array type. A hit is faster than with `lru_cache`."""

    def __missing__(self, size: int) -> Any:
        if len(self) >= MANY:
            self.clear()
        array_type = self[size] = ctypes.c_char * size
        return array_type


arrays = _Arrays()


@lru_cache(MANY)
def _order(shape: Any, strides: Any) -> bytes | None:
    order = _order_of_memory(shape, strides)
    return None if order is None else _layout_of_order(order).encode()


_plain_types = {torch.Tensor, torch.nn.Parameter}
widths: dict[Any, int] = {
    dtype: dtype.itemsize
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""Bytes of an element of each dtype that is not quantised."""

_digest = xxhash.xxh3_128_digest


def fingerprint(tensor: Any) -> bytes:
    """Return 16 bytes that depend on every bit in memory and on the order of dimensions in memory.

    Tensors with equal values and equal order of dimensions in memory have equal fingerprints. The
    memory is copied only if it has gaps. All tensors without memory have the same fingerprint. If
    the memory cannot be read, only the class of the tensor matters. Never raises.
    https://github.com/Cyan4973/xxHash
    """
    try:
        if (
            type(tensor) in _plain_types  # subclasses may count or change operations
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
    except RuntimeError:  # no storage: a sparse tensor, or a tensor within `torch.func`
        return _fingerprint_of_any(tensor)
    return _fingerprint_of_any(tensor)


def _fingerprint_of_any(tensor: Any) -> bytes:
    try:
        with unobserved():
            return _fingerprint_of_memory(memory_of(tensor))
    except Exception:  # noqa: BLE001 - the code of a subclass may raise any error
        return _fingerprint_of_memory(unreadable_memory(tensor))


def _fingerprint_of_memory(memory: Memory) -> bytes:
    parts = [_digest_of_part(part) for part in memory.parts]
    return _digest(memory.layout.encode() + b"".join(parts)) if memory.layout else parts[0]


def _digest_of_part(part: Any) -> bytes:
    state = xxhash.xxh3_128()
    for piece in pieces(part):
        on_host = piece.cpu()
        state.update(arrays[on_host.nbytes].from_address(on_host.data_ptr()))
    return state.digest()
