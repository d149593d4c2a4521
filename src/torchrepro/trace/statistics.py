"""What is recorded besides fingerprints on request: statistics of outputs, and tensors."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchrepro.trace.fingerprint import memory_of, pieces, unobserved
from torchrepro.trace.op_facts import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torchrepro.trace.buffer import RecordingState
    from torchrepro.trace.frames import Place
    from torchrepro.trace.store import Store


PIECE = 1 << 18
"""Numbers that are widened at a time: few enough to stay in the processor's cache."""

LARGE_PIECE = 1 << 23
"""The same on a device, which is waited for at every piece."""

_WIDEST = {"mps": "float32", "npu": "float32"}
"""The widest floats of device types that have no, or only slow, arithmetic of 64 bits."""


class Statistics(NamedTuple):
    """Summary statistics of a tensor; NaN becomes None."""

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
    for part in _parts(tensor):
        wide = getattr(torch, _WIDEST.get(part.device.type, "float64"))
        size = PIECE if part.is_cpu else LARGE_PIECE
        for piece in pieces(part):
            numbers = piece.view(part.dtype)
            real = torch.view_as_real(numbers) if part.is_complex() else numbers
            yield from (few.to(wide) for few in real.reshape(-1).split(size))


def _parts(tensor: Any) -> Sequence[Any]:
    """Return plain tensors that hold the numbers of `tensor`, and nothing else."""
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
    # math.fsum refuses infinities of both signs.
    total = math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)
    mean, norm = (
        None if math.isnan(each) else each for each in (total / count, math.hypot(*norms))
    )
    return Statistics(count, mean, norm, min(lows), max(highs))


class DetailRecorder:
    """Records statistics of the outputs of every op, and the tensors of some modules."""

    def __init__(self, state: RecordingState) -> None:
        self._state = state
        self._statistics: list[tuple[Any, ...]] = []
        self._tensors: list[tuple[Any, ...]] = []
        self._matched: set[str] = set()
        self.lock = state.lock

    @classmethod
    def of(cls, state: RecordingState) -> DetailRecorder | None:
        """Return a recorder of the details that are requested; None if there are none."""
        request = state.request
        return cls(state) if request.statistics or request.keep or request.detail else None

    def before(self, place: Place, args: Any, kwargs: Any) -> list[Any] | None:
        """Return copies of the inputs, for a module whose tensors are kept, else None."""
        if not self._keeps(place) or not self._state.wants_step:
            return None
        cache = self._state.cache
        tensors = tensors_in((args, kwargs))
        return [None if cache.is_unset(tensor) else _copied(tensor) for tensor in tensors]

    def after(self, before: list[Any] | None, outputs: list[Any]) -> None:
        """Record the outputs of an op whose record was the last to be taken."""
        if not self._state.wants_step:
            return
        buffer = self._state.buffer
        position = buffer.moved + len(buffer.rows) - 1
        if self._state.request.statistics:
            self._statistics += [
                (position, number, *statistics(tensor)) for number, tensor in enumerate(outputs)
            ]
        if before is not None:
            self._keep(position, "input", before)
            self._keep(position, "output", map(_copied, outputs))

    def made(self, place: Place, tensor: Any) -> None:
        """Record a tensor made from values, whose record was the last to be taken."""
        self.after([] if self._keeps(place) else None, [tensor])

    def _keeps(self, place: Place) -> bool:
        """Whether the tensors of a module are kept."""
        module = place.module
        matching = [
            pattern
            for pattern in self._state.request.keep
            if fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
        ]
        self._matched.update(matching)
        return bool(matching)

    def unmatched(self) -> list[str]:
        """Return the patterns that matched no module."""
        return [pattern for pattern in self._state.request.keep if pattern not in self._matched]

    def write(self, store: Store, first: int) -> None:
        """Write the details of a step whose first record has the id `first`."""
        store.add_statistics((first + row[0], *row[1:]) for row in self._statistics)
        store.add_tensors((first + row[0], *row[1:]) for row in self._tensors)
        self._statistics, self._tensors = [], []

    def _keep(self, position: int, role: str, tensors: Iterable[Any]) -> None:
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                kind = str(tensor.dtype).removeprefix("torch.")
                shape = ",".join(map(str, tensor.shape))
                data = tensor.reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
                self._tensors.append((position, role, number, kind, shape, bytes(data)))


def _copied(tensor: Any) -> Any:
    """Return a copy on the CPU; None for a layout that has no plain memory."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return None
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return tensor.detach().to("cpu", copy=True).contiguous()
