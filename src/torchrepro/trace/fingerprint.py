"""Fingerprints of tensors in the host's memory: 128 bits, of every bit and where it is."""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.trace.memory import (
    Memory,
    kind_of_order,
    memory_of,
    not_read,
    order_of_memory,
    pieces,
    unobserved,
)

if TYPE_CHECKING:
    from collections.abc import Callable

ALGORITHM = "xxh3-128"
MANY = 1 << 12  # answers that are remembered; a program has few shapes


class _Remembered(dict[Any, Any]):
    """Answers of a function by its argument, up to `MANY`, and then anew."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = function

    def __missing__(self, argument: Any) -> Any:
        if len(self) >= MANY:
            self.clear()
        found = self[argument] = self._function(argument)
        return found


def _order(shape_and_strides: tuple[Any, Any]) -> bytes | None:
    order = order_of_memory(*shape_and_strides)
    return None if order is None else kind_of_order(order).encode()


arrays = _Remembered(lambda size: ctypes.c_char * size)
"""Types that stand for so many bytes of memory."""

_orders = _Remembered(_order)
_plain_types: set[type] = set()
_widths: dict[Any, int] = {}
"""Bytes of an element of each dtype that is not quantised."""

_digest = xxhash.xxh3_128_digest


def fingerprint(tensor: Any) -> bytes:
    """Return 16 bytes that differ where a bit, its place, or the order of memory differs.

    Tensors of equal value and order of memory have the same, wherever their memory lies. Only
    that memory is read, without a copy if it has no gaps; the tensor stays as it was. A tensor
    without memory has a constant, and so has one whose memory is not found: `memory.unread`
    names its type. Never raises. https://github.com/Cyan4973/xxHash
    """
    try:
        if (
            type(tensor) in _plain_types  # others may count or change what is asked of them
            and (width := _widths.get(tensor.dtype)) is not None
            and tensor.is_cpu
            and not (tensor.is_neg() or tensor.is_conj() or tensor.is_nested)
        ):
            size, start = tensor.nbytes, tensor.data_ptr()
            end = tensor.storage_offset() * width + size
            # Storage that was freed leaves an address behind where an offset is added to none.
            if (start or not size) and tensor.untyped_storage().nbytes() >= end:
                if tensor.is_contiguous():
                    return _digest(arrays[size].from_address(start))
                order = _orders[tensor.shape, tensor.stride()]
                if order is not None:
                    return _digest(order + _digest(arrays[size].from_address(start)))
    except RuntimeError:  # no storage to ask: sparse, or inside of a transformed function
        return _of_any_kind(tensor)
    return _of_any_kind(tensor)


def _of_any_kind(tensor: Any) -> bytes:
    if not _widths:
        _learn_what_is_plain()
        return fingerprint(tensor)
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


def _learn_what_is_plain() -> None:
    torch = import_module("torch")
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    plain = (dtype for dtype in dtypes if not str(dtype).startswith("torch.q"))
    _plain_types.update((torch.Tensor, torch.nn.Parameter))
    _widths.update((dtype, dtype.itemsize) for dtype in plain)
