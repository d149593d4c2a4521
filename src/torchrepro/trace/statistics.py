"""Statistics of tensors, by which runs are compared that cannot be bitwise the same."""

from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.trace.memory import memory_of, pieces, unobserved

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PIECE = 1 << 18
"""Numbers that are widened at a time: few enough to stay in the processor's cache."""

LARGE_PIECE = 1 << 23
"""The same on a device, which is waited for at every piece."""

_WIDEST = {"mps": "float32", "npu": "float32"}
"""The widest floats of device types that have no, or only slow, arithmetic of 64 bits."""


class Statistics(NamedTuple):
    """What the numbers of a tensor come to; a value that is no number is None."""

    numbers: int
    """Numbers besides NaN: the shape says how many there would be without it."""
    mean: float | None = None
    norm: float | None = None
    low: float | None = None
    high: float | None = None


def statistics(tensor: Any) -> Statistics:
    """Return count, mean, Euclidean norm, least and greatest of the numbers of `tensor`.

    NaN is left out of all of them. A complex number counts as two real ones, a quantised one as
    what it stands for; of a sparse tensor those that it keeps count. Without numbers, or where
    none can be read, all but the count, 0, are None. Waits for a device. Never raises.
    """
    try:
        with unobserved():
            return _combined(list(map(_of_piece, _pieces(tensor))))
    except Exception:  # noqa: BLE001 - the code of a subclass is anybody's, and may raise anything
        return Statistics(0)


def _pieces(tensor: Any) -> Iterator[Any]:
    """Yield the numbers of `tensor` as flat tensors of the widest floats that its device has."""
    torch = import_module("torch")
    for part in _parts(tensor):
        wide = getattr(torch, _WIDEST.get(part.device.type, "float64"))
        size = PIECE if part.is_cpu else LARGE_PIECE
        for piece in pieces(part):
            numbers = piece.view(part.dtype)
            real = torch.view_as_real(numbers) if part.is_complex() else numbers
            yield from (few.to(wide) for few in real.reshape(-1).split(size))


def _parts(tensor: Any) -> Sequence[Any]:
    """Return plain tensors that hold the numbers of `tensor`, and nothing else."""
    torch = import_module("torch")
    if hasattr(tensor, "__tensor_flatten__"):  # offsets and scales come after the values
        return _parts(getattr(tensor, tensor.__tensor_flatten__()[0][0]))
    if tensor.layout == torch.sparse_coo:
        return _parts(tensor._values())  # noqa: SLF001 - the public name refuses one not coalesced
    if tensor.layout in {torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}:
        return _parts(tensor.values())
    return memory_of(tensor.dequantize() if tensor.is_quantized else tensor).parts


def _of_piece(piece: Any) -> tuple[int, float, float, float, float]:
    """Return count, sum, norm, low and high of numbers; none of them is left if all are NaN."""
    if not piece.numel():
        return 0, 0.0, 0.0, math.inf, -math.inf
    torch = import_module("torch")
    low, high = piece.aminmax()
    norm = torch.linalg.vector_norm(piece)
    found = torch.stack([piece.sum(), norm, low, high]).tolist()
    if math.isnan(found[2]):
        return _of_piece(piece[~piece.isnan()])
    return (piece.numel(), *found)


def _combined(pieces: list[tuple[int, float, float, float, float]]) -> Statistics:
    count = sum(piece[0] for piece in pieces)
    if not count:
        return Statistics(0)
    _, sums, norms, lows, highs = zip(*pieces, strict=True)
    return Statistics(
        count,
        _number(_sum(sums) / count),
        _number(math.hypot(*norms)),
        min(lows),
        max(highs),
    )


def _sum(values: tuple[float, ...]) -> float:
    # math.fsum refuses infinities of both signs.
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
