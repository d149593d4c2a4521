"""What an op has made or written: fingerprints, and what is known of it from now on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from torchrepro.trace.arguments import shape_of, tensors_in
from torchrepro.trace.known import (
    UNREAD,
    WRITTEN,
    InFlight,
    Known,
    is_unset,
    of_unset,
    of_view,
    size_of,
    version_of,
)
from torchrepro.trace.reading import INPUT, UNINITIALISED
from torchrepro.trace.results import fingerprint_of_result, plain_result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.trace.op_facts import OpFacts

Tensor = torch.Tensor


class Outputs:
    """Reads the results of ops."""

    def __init__(self, known: Known) -> None:
        self.known = known

    def read(
        self, facts: OpFacts, args: Any, kwargs: Any, result: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return the fingerprints of all that an op has made or written, and their shapes."""
        if result.__class__ is Tensor and facts.plain:
            plain = plain_result(result)
            if plain is not None:  # most ops: nothing of what follows is asked for
                digest, shape, size = plain
                known = self.known
                known.bytes_read += size
                known.entries[id(result)] = ref(result), version_of(result), digest[:INPUT], WRITTEN
                return [digest], [shape]
        fingerprints: list[Any] = []
        shapes: list[Any] = []
        if facts.rebinds:
            self.known.entries.pop(id(result), None)
        elif result.__class__ is Tensor and not facts.writes:
            self._read(facts, result, version_of(result), fingerprints, shapes)
        else:
            written = facts.written_in(args, kwargs) if facts.writes else ()
            for tensor in written:
                # Autograd counts the write only after this.
                version = version_of(tensor) + facts.counted
                self._read(facts, tensor, version, fingerprints, shapes)
                if tensor._base is not None:  # noqa: SLF001 - documented in the notes on autograd
                    self._know_base(tensor)
            for tensor in made(facts, written, result):
                self._read(facts, tensor, version_of(tensor), fingerprints, shapes)
        return fingerprints, shapes

    def _read(
        self, facts: OpFacts, tensor: Any, version: int, fingerprints: list[Any], shapes: list[Any]
    ) -> None:
        known = self.known
        if facts.allocates:
            short: Any = UNINITIALISED
        else:
            digest = fingerprint_of_result(tensor) if not facts.collective else InFlight(tensor)
            fingerprints.append(digest)
            short = digest[:INPUT] if digest.__class__ is bytes else digest
            known.bytes_read += size_of(tensor)
        shapes.append(shape_of(tensor))
        known.entries[id(tensor)] = ref(tensor), version, short, WRITTEN

    def _know_base(self, view: Any) -> None:
        """Know memory that is unset in part, of which an op has written `view`."""
        base, entries = view._base, self.known.entries  # noqa: SLF001 - see above
        before, after = entries.get(id(base)), entries[id(view)]
        if before is None or before[0]() is not base or not is_unset(before[2]):
            return
        where = repr((view.storage_offset(), view.shape, view.stride())).encode()
        digest = of_unset([before[2], after[2]], where)
        entries[id(base)] = before[0], after[1], digest[:INPUT], WRITTEN

    def know_unset(
        self, facts: OpFacts, key: bytes, inputs: list[Any], result: Any
    ) -> tuple[list[Any], list[Any]]:
        """Know memory that is still unset in part by what has been written into it."""
        digest = of_unset(inputs, key)
        # Autograd counts a write only after this, and never one of an inference tensor.
        version = version_of(result) + (facts.writes and not result.is_inference())
        self.known.entries[id(result)] = ref(result), version, digest[:INPUT], WRITTEN
        return [digest], [shape_of(result)]

    def know_views(self, args: Any, key: bytes, inputs: list[Any], result: Any) -> list[Any]:
        """Know views by what they are views of; returns their shapes."""
        base = inputs[0] if inputs else UNREAD
        version = version_of(args[0]) if args and isinstance(args[0], Tensor) else 0
        digest = of_view(base, key)
        shapes = []
        for tensor in (result,) if isinstance(result, Tensor) else result:
            shapes.append(shape_of(tensor))
            if base is not UNREAD:
                self.known.viewed(tensor, digest, version)
        return shapes


def made(facts: OpFacts, written: Any, result: Any) -> Iterator[Any]:
    """Yield the tensors in a result that a fingerprint is taken of, but for `written` ones."""
    for position, tensor in enumerate(tensors_in(result) if result is not None else ()):
        if position not in facts.scratch and not any(tensor is other for other in written):
            yield tensor


def fingerprinted(facts: OpFacts, args: Any, kwargs: Any, result: Any) -> list[Any]:
    """Return the tensors that the fingerprints of a record are of, in the same order."""
    if facts.view or facts.allocates or facts.rebinds:
        return []
    written = facts.written_in(args, kwargs)
    return [*written, *made(facts, written, result)]
