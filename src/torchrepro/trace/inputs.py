"""What an op is given: digests of its tensors, and the values that are none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchrepro.trace.arguments import PLAIN
from torchrepro.trace.known import InFlight, Known, version_of

if TYPE_CHECKING:
    from torchrepro.trace.op_facts import OpFacts

Tensor = torch.Tensor


class Inputs:
    """Reads the arguments of ops."""

    def __init__(self, known: Known) -> None:
        self.known = known

    def read(self, facts: OpFacts, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
        """Return the digests of all tensors and the plain values, each in their order."""
        digests: list[Any] = []
        plain: list[Any] = []
        self._read(facts, args[1:] if facts.overwrites else args, digests, plain)
        if kwargs:
            plain.extend(kwargs)
            for name, value in kwargs.items():
                if name not in facts.written_names:  # what is written over is not read
                    self._read(facts, (value,), digests, plain)
        return digests, plain

    def _read(self, facts: OpFacts, values: Any, digests: list[Any], plain: list[Any]) -> None:
        known = self.known
        entries = known.entries
        for value in values:
            kind = value.__class__
            if kind in PLAIN:
                entry = entries.get(id(value))
                if entry is not None and entry[0]() is value and entry[1] == version_of(value):
                    digests.append(entry[2])
                    if entry[2].__class__ is InFlight:
                        entry[2].land()
                elif facts.view:
                    digests.append(known.digest_of_base(value))
                else:
                    digests.append(known.digest(value))
            elif kind is list or kind is tuple:
                self._read_list(value, digests, plain)
            else:
                plain.append(value)

    def _read_list(self, values: Any, digests: list[Any], plain: list[Any]) -> None:
        if not any(isinstance(value, Tensor) for value in values):
            plain.append(values)
            return
        for value in values:
            if isinstance(value, Tensor):
                digests.append(self.known.digest(value))
            else:
                plain.append(value)
