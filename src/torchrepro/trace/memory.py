"""Where the bytes of a tensor lie: a tensor of any kind as plain strided ones."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

PIECE = 1 << 24
"""Bytes that are copied at a time where memory cannot be read as it lies."""

unread: set[str] = set()
"""Kinds of tensors whose memory was not found: their fingerprints say nothing of their values."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the value of a tensor is kept in."""

    kind: str
    """What sets it apart from a plain contiguous tensor of the same bytes; empty for such a one."""
    parts: tuple[Any, ...]
    """Strided tensors, as contiguous as they can be without a copy."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Keep autograd, subclasses, modes and `torch.func` from what is done to tensors within.

    They may record, count or change what is asked of a tensor. Nothing public turns all of them
    off; where this fails, every tensor that is not plain is `unread`.
    """
    torch = import_module("torch")
    names = ("DisableTorchFunction", "_DisableFuncTorch", "_DisableTorchDispatch")
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for name in names:
            stack.enter_context(getattr(torch._C, name)())  # noqa: SLF001
        yield


def memory_of(tensor: Any) -> Memory:
    """Return the memory of `tensor`, whatever its kind; called within `unobserved`.

    Raises whatever the code of a subclass raises.
    """
    return next(kind.memory(tensor) for kind in _KINDS if kind.holds(tensor))


def not_read(tensor: Any) -> Memory:
    """Return what stands for the memory of `tensor`, which was not found; adds to `unread`."""
    name = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    unread.add(name)
    return Memory(f"unread {name}", ())


def pieces(part: Any) -> Iterator[Any]:
    """Yield the value of a part of a `Memory` in order, as contiguous tensors of any dtype.

    One that is contiguous already comes whole, without a copy. Of others every piece but the last
    has a multiple of 8 bytes, and few bytes more than `PIECE` unless a row has many more.
    """
    lazy = part.is_conj() or part.is_neg() or part._is_zerotensor()  # noqa: SLF001 - zeros without memory have no other name
    if part.is_contiguous() and not lazy:
        yield part
    else:
        yield from _copies(part if lazy else _as_integers(part))


def order_of_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int] | None:
    """Return the dimensions, slowest first, of a tensor without gaps; None for one with gaps."""
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] != 1, -strides[dim], dim))
    size = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != size:
            return None
        size *= shape[dim]
    return order


def kind_of_order(order: Sequence[int]) -> str:
    """Return the kind of a `Memory` whose dimensions lie in `order`."""
    return f"order {' '.join(map(str, order))}"


def _joined(name: str, tensors: Iterable[Any]) -> Memory:
    inner = [memory_of(tensor) for tensor in tensors]
    kinds = ", ".join(f"{memory.kind}:{len(memory.parts)}" for memory in inner)
    return Memory(f"{name}({kinds})", tuple(part for memory in inner for part in memory.parts))


def _copies(part: Any) -> Iterator[Any]:
    size = part.nbytes
    if size <= PIECE or not part.dim():
        yield _copy(part)
        return
    row = size // part.shape[0]
    if row * 8 > PIECE and row % 8 == 0:
        for inner in part.unbind(0):
            yield from pieces(inner)
        return
    for rows in part.split(max(PIECE // row // 8, 1) * 8):  # 8 rows are a multiple of 8 bytes
        yield _copy(rows)


def _copy(part: Any) -> Any:
    contiguous = import_module("torch").contiguous_format
    return part.clone(memory_format=contiguous)  # conjugates and negates what is yet to be


def _as_integers(part: Any) -> Any:
    """Return `part` with integers for its elements: some dtypes have no kernel that copies."""
    torch = import_module("torch")
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return part.view(same.get(part.itemsize, part.dtype))


def _wrapper(tensor: Any) -> Memory:
    """Return the memory of what a subclass keeps its value in.

    https://docs.pytorch.org/docs/stable/generated/torch.Tensor.__torch_dispatch__.html describes
    such subclasses. An inner tensor without elements says nothing: a jagged one caches its lengths
    in the shape of such.
    """
    wait = getattr(tensor, "trigger_wait", None)  # what a collective has not written yet
    if wait is not None:
        wait()
    names = [name for name in tensor.__tensor_flatten__()[0] if getattr(tensor, name).numel()]
    title = f"{type(tensor).__qualname__} {' '.join(names)}"
    return _joined(title, [getattr(tensor, name) for name in names])


def _transformed(tensor: Any) -> Memory:
    return _joined("transformed", [_functorch().get_unwrapped(tensor)])


def _is_transformed(tensor: Any) -> bool:
    return bool(_functorch().is_functorch_wrapped_tensor(tensor))


def _functorch() -> Any:
    """Return what knows the tensors of `torch.func`, inside of a transformed function.

    Private, because nothing public tells them from others; without it, their memory is `unread`.
    """
    return import_module("torch")._C._functorch  # noqa: SLF001


def _functional(tensor: Any) -> Memory:
    return _joined("functional", [import_module("torch")._from_functional_tensor(tensor)])  # noqa: SLF001 - no public name


def _is_functional(tensor: Any) -> bool:
    return bool(import_module("torch")._is_functional_tensor(tensor))  # noqa: SLF001 - no public name


def _coordinates(tensor: Any) -> Memory:
    # The public names of both refuse a tensor that is not coalesced.
    inner = [tensor._indices(), tensor._values()]  # noqa: SLF001
    return _joined(f"sparse coo, coalesced {tensor.is_coalesced()}", inner)


def _compressed(tensor: Any) -> Memory:
    rows = str(tensor.layout) in ("torch.sparse_csr", "torch.sparse_bsr")
    index = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
    return _joined(f"{tensor.layout}", [getattr(tensor, name)() for name in (*index, "values")])


def _quantised(tensor: Any) -> Memory:
    scheme = str(tensor.qscheme())
    if "per_tensor" in scheme:
        scale = f"{tensor.q_scale().hex()} {tensor.q_zero_point()}"
        return _joined(f"{scheme} {scale}", [tensor.int_repr()])
    scales = [tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]
    return _joined(f"{scheme} {tensor.q_per_channel_axis()}", [tensor.int_repr(), *scales])


def _nested(tensor: Any) -> Memory:
    inner = tensor.unbind()
    return _joined(f"nested {[tuple(part.shape) for part in inner]}", inner)


def _strided(tensor: Any) -> Memory:
    if not _has_memory(tensor):
        return Memory("no memory", ())
    if tensor.is_contiguous():
        return Memory("", (tensor,))
    order = order_of_memory(tensor.shape, tensor.stride())
    if order is None:
        return Memory("", (tensor,))
    return Memory(kind_of_order(order), (tensor.permute(order),))


def _has_memory(tensor: Any) -> bool:
    """Whether all the elements lie in storage: not on meta, in a fake, or after it was freed."""
    storage = tensor.untyped_storage()
    last = tensor.storage_offset() + sum(
        stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
    zeros = tensor._is_zerotensor()  # noqa: SLF001 - zeros without memory have no other name
    enough = not tensor.numel() or (last + 1) * tensor.itemsize <= storage.nbytes()
    return bool(zeros or (enough and storage.device.type != "meta"))


@dataclass(frozen=True, slots=True)
class _Kind:
    holds: Callable[[Any], bool]
    memory: Callable[[Any], Memory]


_COMPRESSED = tuple(f"torch.sparse_{name}" for name in ("csr", "csc", "bsr", "bsc"))

_KINDS = (
    _Kind(lambda tensor: hasattr(tensor, "__tensor_flatten__"), _wrapper),
    _Kind(_is_transformed, _transformed),
    _Kind(_is_functional, _functional),
    _Kind(lambda tensor: tensor.device.type == "meta", lambda _: Memory("no memory", ())),
    _Kind(lambda tensor: str(tensor.layout) == "torch.sparse_coo", _coordinates),
    _Kind(lambda tensor: str(tensor.layout) in _COMPRESSED, _compressed),
    _Kind(lambda tensor: tensor.is_mkldnn, lambda tensor: _joined("mkldnn", [tensor.to_dense()])),
    _Kind(lambda tensor: tensor.is_quantized, _quantised),
    _Kind(lambda tensor: tensor.is_nested, _nested),
    _Kind(lambda _: True, _strided),
)
"""The kinds of tensors; the first that holds for a tensor says where its memory lies."""
