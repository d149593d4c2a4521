"""Statistics of outputs, and whole tensors, where fingerprints are not all that is asked for."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from torchrepro.trace.arguments import tensors_in
from torchrepro.trace.statistics import statistics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchrepro.trace.frames import Place
    from torchrepro.trace.recording import Recording
    from torchrepro.trace.store import Store


class CloserLook:
    """Looks at the tensors of every op, and keeps those of some modules."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._statistics: list[tuple[Any, ...]] = []
        self._kept: list[tuple[Any, ...]] = []
        self._met: set[str] = set()

    @classmethod
    def of(cls, recording: Recording) -> CloserLook | None:
        """Return the closer look that a recording asks for; None if fingerprints are enough."""
        request = recording.request
        return cls(recording) if request.statistics or request.keep or request.detail else None

    def before(self, place: Place, args: Any, kwargs: Any) -> list[Any] | None:
        """Return copies of the inputs, for a module whose tensors are kept, else None."""
        request = self._recording.request
        if request.detail:
            self._recording.known.distrust()  # the next op reads its inputs anew
        fitting = [pattern for pattern in request.keep if _fits(place.module, pattern)]
        self._met.update(fitting)
        if not self._recording.wants_step or not fitting:
            return None
        unset = self._recording.known.is_unset
        return [None if unset(tensor) else _copied(tensor) for tensor in tensors_in((args, kwargs))]

    def after(self, before: list[Any] | None, outputs: list[Any]) -> None:
        """Look at the outputs of an op whose record was the last to be taken."""
        if not self._recording.wants_step:
            return
        tape = self._recording.tape
        position = tape.moved + len(tape.taken) - 1
        if self._recording.request.statistics:
            self._statistics += [
                (position, number, *statistics(tensor)) for number, tensor in enumerate(outputs)
            ]
        if before is not None:
            self._keep(position, "input", before)
            self._keep(position, "output", map(_copied, outputs))

    def unmet(self) -> list[str]:
        """Return the patterns that no module fitted."""
        return [pattern for pattern in self._recording.request.keep if pattern not in self._met]

    def write(self, store: Store, first: int) -> None:
        """Write all that was seen in a step whose first record has the id `first`."""
        store.add_statistics((first + row[0], *row[1:]) for row in self._statistics)
        store.add_tensors((first + row[0], *row[1:]) for row in self._kept)
        self._statistics, self._kept = [], []

    def _keep(self, position: int, role: str, tensors: Iterable[Any]) -> None:
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                kind = str(tensor.dtype).removeprefix("torch.")
                shape = ",".join(map(str, tensor.shape))
                self._kept.append((position, role, number, kind, shape, _bytes(tensor)))


def _fits(module: str, pattern: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _copied(tensor: Any) -> Any:
    """Return a copy on the CPU; None for a layout that has no plain memory."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_nested:
        return None
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return tensor.detach().to("cpu", copy=True).contiguous()


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
