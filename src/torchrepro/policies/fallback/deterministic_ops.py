"""Deterministic implementations of ops that torch implements on no device.

Where several writes meet at one place, the last of them wins, as in a loop over the elements
(https://docs.pytorch.org/docs/stable/generated/torch.Tensor.put_.html leaves it open). The places
are sorted, which keeps the order of equal ones, so that each is written once: the result is the
same on every device and in every run.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


def put_(self: Tensor, index: Tensor, source: Tensor, accumulate: Any = None) -> Tensor:
    """Write `source` to the places `index` of `self`, counted as if `self` were flat.

    It does not add up: for `accumulate` the CPU's kernel is deterministic (see `implementation`).
    Raises `IndexError` for a place that `self` does not have, and `RuntimeError` for arguments
    that do not fit each other, as torch does.
    """
    torch = import_module("torch")
    if index.dtype != torch.int64:
        raise RuntimeError(f"put_(): index has to be int64, and is {index.dtype}")
    if source.dtype != self.dtype:
        raise RuntimeError(f"put_(): self is {self.dtype} and source is {source.dtype}")
    if index.numel() != source.numel():
        raise IndexError(
            f"put_(): as many indices as elements are needed, not {index.numel()} for "
            f"{source.numel()}"
        )
    if not index.numel():
        return self
    count = self.numel()
    places = index.reshape(-1).to(torch.int64)
    if bool(((places < -count) | (places >= count)).any()):
        raise IndexError(f"put_(): an index is out of range for a tensor of {count} elements")
    places = torch.where(places < 0, places + count, places)
    _write_last(self, places, source.reshape(-1))
    return self


def max_unpool2d(self: Tensor, indices: Tensor, output_size: Sequence[int]) -> Tensor:
    """Write the elements of `self` to the places `indices` of planes of `output_size`, else zero.

    Raises `RuntimeError` for arguments that do not fit each other, as torch does.
    """
    torch = import_module("torch")
    result = _unpooled(self, indices, output_size, 2)
    last = torch.channels_last
    in_channels_last = self.dim() == 4 and self.is_contiguous(memory_format=last)  # noqa: PLR2004
    if in_channels_last and not self.is_contiguous():
        return result.contiguous(memory_format=last)
    return result


def max_unpool3d(
    self: Tensor,
    indices: Tensor,
    output_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Write the elements of `self` to the places `indices` of volumes of `output_size`, else zero.

    Raises `RuntimeError` for arguments that do not fit each other, as torch does; `stride` and
    `padding` decide nothing else.
    """
    if len(stride) != 3 or len(padding) != 3 or any(step <= 0 for step in stride):  # noqa: PLR2004
        raise RuntimeError("max_unpool3d: stride and padding take three numbers, strides above 0")
    return _unpooled(self, indices, output_size, 3)


def _unpooled(self: Tensor, indices: Tensor, output_size: Sequence[int], dims: int) -> Tensor:
    torch = import_module("torch")
    _check_unpooling(self, indices, output_size, dims)
    result = self.new_zeros((*self.shape[:-dims], *output_size))
    area = result.shape[-dims:].numel()
    places = indices.reshape(-1)
    if not places.numel():
        return result
    if bool(((places < 0) | (places >= area)).any()):
        raise RuntimeError(f"max_unpool{dims}d: an index lies outside of {tuple(output_size)}")
    planes = self.shape[:-dims].numel()
    first = torch.arange(planes, device=places.device).unsqueeze(1) * area
    places = (places.view(planes, -1) + first).view(-1)
    _write_last(result.view(-1), places, self.reshape(-1))
    return result


def _check_unpooling(self: Tensor, indices: Tensor, output_size: Sequence[int], dims: int) -> None:
    name = f"max_unpool{dims}d"
    if indices.dtype != import_module("torch").int64:
        raise RuntimeError(f"{name}: indices have to be int64, and are {indices.dtype}")
    if len(output_size) != dims:
        raise RuntimeError(f"{name}: output_size has {len(output_size)} numbers, not {dims}")
    if self.dim() not in (dims + 1, dims + 2) or self.shape != indices.shape:
        raise RuntimeError(
            f"{name}: input and indices have to be of one shape, of {dims + 1} or {dims + 2} "
            f"dimensions, not {tuple(self.shape)} and {tuple(indices.shape)}"
        )


def _write_last(target: Tensor, places: Tensor, values: Tensor) -> None:
    """Write each value to its place of `target`, counted flat; of several the last one stays."""
    torch = import_module("torch")
    ordered, order = torch.sort(places, stable=True)
    is_last = torch.ones_like(ordered, dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    at, value = ordered[is_last], values[order[is_last]]
    where = torch.unravel_index(at, target.shape) if target.dim() else ()
    if where:
        target.index_put_(where, value)
    else:
        target.copy_(value[-1])


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "max_unpool2d": max_unpool2d,
    "max_unpool3d": max_unpool3d,
    "put_": put_,
}


def implementation(packet: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the implementation of the op `packet` for a call with these arguments, or None."""
    adds_up = packet == "put_" and bool(kwargs.get("accumulate", args[3:] and args[3]))
    return None if adds_up else IMPLEMENTATIONS.get(packet)
