"""The digests of the inputs and outputs of ops, by their tensors.

A tensor is fingerprinted again only where its memory may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch
import xxhash
from torch.multiprocessing.reductions import StorageWeakRef

from torchrepro.ground.callers import address
from torchrepro.trace.digests import (
    UNREAD,
    UNSEEN,
    Digest,
    InFlight,
    Unset,
    digest_of_unset,
    is_unset,
)
from torchrepro.trace.fingerprint import unobserved
from torchrepro.trace.format import INPUT, PARTLY, UNINITIALISED
from torchrepro.trace.op_facts import PLAIN, shape_of, tensors_in
from torchrepro.trace.tensor_reads import (
    fingerprint_of,
    fingerprint_of_plain_result,
    memory_shared,
    size_of,
    version_of,
    writes,
)

if TYPE_CHECKING:
    from weakref import ReferenceType

    from torchrepro.trace.frames import CallSite
    from torchrepro.trace.op_facts import OpFacts

Tensor = torch.Tensor

LARGE = 2**20
"""Bytes above which memory that is no parameter is read once and not again in every step."""


READ, WRITTEN, VIEW = range(3)
"""Where a digest comes from: memory was read, an op has written it, or it is a view of another."""

Entry = tuple["ReferenceType[Any]", int, Digest, int]
"""The tensor, its version, its digest, and where the digest comes from."""

NO_ENTRY: Entry = (lambda: None), 0, UNREAD, READ  # type: ignore[assignment]
"""Stands for the entry of a tensor that has none."""

NewTensor = tuple["ReferenceType[Any]", "list[Callable[[Any, Any], None]]"]
"""A tensor, and what to call with it and its fingerprint where it is first read.

Tensors of the same memory share the list, which is empty once one of them was read.
"""

_Kept = TypeVar("_Kept", Entry, NewTensor)

_short_digest = xxhash.xxh3_64_digest


class FingerprintCache:
    """Digests by tensor, valid as long as the tensor lives and torch has not written it again.

    The version of a tensor does not count writes from outside torch. Parameters, and all small
    tensors, are therefore read again in every step.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.new: dict[int, NewTensor] = {}  # made from values, until an op reads them
        self.bytes_read = 0  # bytes of tensors that the running step has read
        self.unset_inputs: list[tuple[Unset, Any]] = []
        """What the op that is about to run reads that nobody has written, with its digest."""
        self._allocated: dict[int, tuple[Any, int, Unset]] = {}  # unset memory, by its storage

    def digest_of_memory(self, tensor: Any) -> Digest:
        """Return the digest of the memory of `tensor`, also where the cache has that of a view.

        It does not depend on what else was recorded. Unset memory is not read.
        """
        entry = self.valid(tensor)
        if entry is None:
            return self.read(tensor)
        if entry[3] != VIEW or is_unset(entry[2]):
            return entry[2]
        self.bytes_read += size_of(tensor)
        found = fingerprint_of(tensor)
        return found[:INPUT] if found.__class__ is bytes else found

    def read(self, tensor: Any) -> Digest:
        """Return the digest of a tensor that the cache lacks; reads its memory."""
        fingerprint = fingerprint_of(tensor)
        if self.new:
            made = self.new.pop(address(tensor), None)
            if made is not None and made[0]() is tensor:
                waiting = []
                with suppress(IndexError):  # another thread was first
                    waiting.append(made[1].pop())
                for first_read in waiting:
                    first_read(tensor, fingerprint)
        return self.add(tensor, fingerprint)

    def expect(self, tensor: Any, first_read: Callable[[Any, Any], None]) -> None:
        """Call `first_read` with a new tensor and its fingerprint where an op first reads it.

        Its values count as they are then: the program may fill the memory in the meantime.
        """
        self.new[address(tensor)] = ref(tensor), [first_read]

    def pass_on(self, tensor: Any, result: Any) -> None:
        """Expect the first read of a new tensor under `result` too, which shares its memory."""
        made = self.new.get(address(tensor))
        if made is not None and made[0]() is tensor:
            self.new[address(result)] = ref(result), made[1]

    def add(self, tensor: Any, fingerprint: Any) -> Digest:
        """Add a tensor whose memory was read; returns its digest."""
        self.bytes_read += size_of(tensor)
        digest = fingerprint[:INPUT] if fingerprint.__class__ is bytes else fingerprint
        self.entries[address(tensor)] = ref(tensor), version_of(tensor), digest, READ
        return digest

    def is_unset(self, tensor: Any) -> bool:
        """Whether some or all of `tensor` is memory that no op is known to have written."""
        entry = self.entries.get(address(tensor))
        return entry is not None and entry[0]() is tensor and is_unset(entry[2])

    def is_never_written(self, tensor: Any) -> bool:
        """Whether `tensor` has memory that no op is known to have written, as any object of it."""
        if self.is_unset(tensor):
            return True
        if tensor.__class__ not in PLAIN or tensor.layout is not torch.strided:
            return False
        known = self._allocated.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - see `_notice`
        return known is not None and known[1] == version_of(tensor)

    def end_step(self, *, on_main: bool = True) -> None:
        """Forget all that may change without torch by the next step; large data stays.

        Views stay where another thread ends it than the main one: its digest is not that of its
        memory, and some thread may be about to read it.
        """

        def outlives(tensor: Any, entry: Entry) -> bool:
            if is_unset(entry[2]):
                return True  # reading it would read what nobody wrote
            if entry[3] == VIEW:
                return not on_main
            return size_of(tensor) > LARGE and not _is_parameter(tensor)

        _keep(self.entries, outlives)
        _keep(self.new, lambda *_: True)
        for key, (storage, *_) in self._allocated.copy().items():
            if storage.expired():
                self._allocated.pop(key, None)

    def forget_dead(self) -> None:
        _keep(self.entries, lambda *_: True)

    def distrust(self) -> None:
        """Forget everything except which memory nothing has written."""
        _keep(self.entries, lambda _, entry: is_unset(entry[2]))

    def resume(self) -> None:
        """Go on after ops were missed.

        Where they wrote memory that had been unset, nobody knows which part of it has a value.
        """
        self.distrust()
        for key, (tensor, version, _, source) in self.entries.copy().items():
            held = tensor()
            if held is not None and version_of(held) != version:
                self.entries[key] = tensor, version_of(held), UNSEEN, source

    def inputs(self, facts: OpFacts, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
        """Return the digests of the tensors that an op reads, and its other arguments."""
        digests: list[Any] = []
        plain: list[Any] = []
        for value in args[1:] if facts.overwrites else args:
            self._add_value(facts, value, digests, plain)
        self.add_named(facts, kwargs, digests, plain)
        return digests, plain

    def add_named(self, facts: OpFacts, kwargs: Any, digests: list[Any], plain: list[Any]) -> None:
        """Add the digests of keyword arguments, and their names and those that are no tensors."""
        plain += kwargs
        for name, value in kwargs.items():
            if name not in facts.written_names:  # what is overwritten is not read
                self._add_value(facts, value, digests, plain)

    def _add_value(self, facts: OpFacts, value: Any, digests: list[Any], plain: list[Any]) -> None:
        if value.__class__ in PLAIN:
            entry = self.valid(value)
            digests.append(self.missing_input(facts, value) if entry is None else entry[2])
            if entry is not None and entry[2].__class__ is not bytes:
                self.is_about_to_read(entry[2], value)
        elif value.__class__ is list or value.__class__ is tuple:
            self.add_list(value, digests, plain)
        else:
            plain.append(value)

    def is_about_to_read(self, digest: Digest, tensor: Any) -> None:
        """Take note of an input whose digest is not plain bytes."""
        if digest.__class__ is InFlight:
            digest.land()
        elif digest.__class__ is Unset:
            self.unset_inputs.append((digest, tensor))

    def _notice(self, tensor: Any) -> Unset | None:
        """Take note of an input that is not in the cache, if its memory is unset; return that."""
        if tensor.__class__ in PLAIN and tensor.layout is torch.strided:
            known = self._allocated.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - see above
            if known is not None and known[1] == version_of(tensor):
                self.unset_inputs.append((known[2], tensor))
                return known[2]
        return None

    def allocated(self, tensor: Any, place: CallSite) -> None:
        """Note where the memory of a tensor was allocated that is unset.

        Python may make another object of it without an op, as a parameter: its storage tells.
        """
        digest = self.entries[address(tensor)][2]
        digest.place = place
        if tensor.__class__ in PLAIN and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            held: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._allocated[held.cdata] = held, version_of(tensor), digest

    def missing_input(self, facts: OpFacts, tensor: Any) -> Digest:
        """Return the digest of a tensor that an op reads and the cache lacks."""
        if facts.view and size_of(tensor) > LARGE and not _is_parameter(tensor):
            return UNREAD
        unset = self._notice(tensor) if self._allocated else None
        return unset if unset is not None and facts.keeps else self.read(tensor)

    def add_list(self, values: Any, digests: list[Any], plain: list[Any]) -> None:
        """Add the digests of the tensors in a list; one without any is an argument like others."""
        if not any(isinstance(one, Tensor) for one in values):
            plain.append(values)
            return
        for one in values:
            if isinstance(one, Tensor):
                entry = self.valid(one)
                if entry is None and self._allocated:
                    self._notice(one)
                digests.append(self.read(one) if entry is None else entry[2])
                if digests[-1].__class__ is Unset:
                    self.unset_inputs.append((digests[-1], one))
            else:
                plain.append(one)

    def outputs(
        self, facts: OpFacts, args: Any, kwargs: Any, result: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return the fingerprints of all that an op has made or written, and their shapes."""
        fingerprints: list[Any] = []
        shapes: list[Any] = []
        if facts.rebinds:
            self.entries.pop(address(result), None)
            known = self._allocated.get(result.untyped_storage()._cdata)  # noqa: SLF001 - see above
            if known is not None:  # whose version counts this only afterwards
                storage, _, digest = known
                self._allocated[storage.cdata] = storage, version_of(result) + 1, digest
        elif result.__class__ is Tensor and not facts.writes:
            self._read_output(facts, result, version_of(result), fingerprints, shapes)
        else:
            written = facts.written_in(args, kwargs) if facts.writes else ()
            for tensor in written:
                if tensor.is_inference():
                    version = writes[memory_shared(tensor)] = version_of(tensor) + 1
                else:  # autograd counts the write only after this
                    version = version_of(tensor) + facts.counted
                self._read_output(facts, tensor, version, fingerprints, shapes)
                self.update_base_of(tensor)
            for tensor in _made(facts, written, result):
                self._read_output(facts, tensor, version_of(tensor), fingerprints, shapes)
        return fingerprints, shapes

    def views(self, args: Any, key: bytes, inputs: list[Any], result: Any) -> list[Any]:
        """Add views, whose digests come from that of their base; return their shapes."""
        base = inputs[0] if inputs else UNREAD
        digest = base
        if base.__class__ is bytes and base is not UNREAD:
            digest = _short_digest(base + key)
        elif base.__class__ is Unset and base[:4] == PARTLY:
            digest = base.becomes(PARTLY + _short_digest(base + key)[4:])
        version = version_of(args[0]) if args and isinstance(args[0], Tensor) else 0
        shapes = []
        for tensor in (result,) if isinstance(result, Tensor) else result:
            shapes.append(shape_of(tensor))
            if base is not UNREAD:
                # Autograd has a view count the writes of its base only after this.
                self.entries[address(tensor)] = ref(tensor), version, digest, VIEW
            elif self.new:
                self.pass_on(args[0], tensor)
        return shapes

    def unset_output(
        self, facts: OpFacts, key: bytes, inputs: list[Any], result: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return the fingerprint of memory that is still unset in part, and its shape."""
        digest = digest_of_unset(inputs, key)
        # Autograd counts a write only after this, and never one of an inference tensor.
        version = version_of(result) + (facts.writes and not result.is_inference())
        short = inputs[0].becomes(digest[:INPUT], given_nan=facts.writes)
        self.entries[address(result)] = ref(result), version, short, WRITTEN
        return [digest], [shape_of(result)]

    def valid(self, tensor: Any) -> Entry | None:
        entry = self.entries.get(address(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        # Which part of unset memory was written is not known of inference tensors.
        sticks = is_unset(entry[2]) and Tensor.is_inference(tensor)  # type: ignore[arg-type]
        return entry if sticks or entry[1] == version_of(tensor) else None

    def _read_output(
        self, facts: OpFacts, tensor: Any, version: int, fingerprints: list[Any], shapes: list[Any]
    ) -> None:
        if facts.allocates:
            short: Digest = Unset(UNINITIALISED)
        else:
            if facts.collective:
                digest: Digest = InFlight(tensor)
            else:
                digest = fingerprint_of_plain_result(tensor) or fingerprint_of(tensor)
            fingerprints.append(digest)
            short = digest[:INPUT] if digest.__class__ is bytes else digest
            self.bytes_read += size_of(tensor)
        shapes.append(shape_of(tensor))
        self.entries[address(tensor)] = ref(tensor), version, short, WRITTEN

    def update_base_of(self, view: Any) -> None:
        """Update the digest of memory that is unset in part, of which an op has written `view`."""
        if self._allocated and view.layout is torch.strided:
            self._allocated.pop(view.untyped_storage()._cdata, None)  # noqa: SLF001 - see above
        base, entries = view._base, self.entries  # noqa: SLF001 - documented in the notes on autograd
        if base is None:
            return
        before, after = entries.get(address(base)), entries[address(view)]
        if before is None or before[0]() is not base or not is_unset(before[2]):
            return
        where = repr((view.storage_offset(), view.shape, view.stride())).encode()
        digest = digest_of_unset([before[2], after[2]], where)
        short = before[2].becomes(digest[:INPUT], given_nan=is_nan(view))
        entries[address(base)] = before[0], after[1], short, WRITTEN


def is_nan(value: Any) -> bool:
    """Whether a plain tensor on the host has NaN in it; others are not asked."""
    if value.__class__ not in PLAIN or not value.is_cpu or not value.is_floating_point():
        return False
    with unobserved():
        return bool(value.isnan().any())


def fingerprinted(facts: OpFacts, args: Any, kwargs: Any, result: Any) -> list[Any]:
    """Return the tensors that the fingerprints of a record are of, in the same order."""
    if facts.view or facts.allocates or facts.rebinds:
        return []
    written = facts.written_in(args, kwargs)
    return [*written, *_made(facts, written, result)]


def _is_parameter(tensor: Any) -> bool:
    return bool(tensor.requires_grad and tensor.is_leaf)


def _keep(entries: dict[int, _Kept], is_kept: Callable[[Any, _Kept], bool]) -> None:
    """Remove all entries but some of living tensors, from a dict that other threads change.

    A copy is made at once. An entry that another thread has put in place of one in the copy stays.
    """
    for key, entry in entries.copy().items():
        tensor = entry[0]()
        if (tensor is None or not is_kept(tensor, entry)) and entries.get(key) is entry:
            entries.pop(key, None)


def _made(facts: OpFacts, written: Any, result: Any) -> Iterator[Any]:
    for position, tensor in enumerate(tensors_in(result) if result is not None else ()):
        if position not in facts.scratch and not any(tensor is other for other in written):
            yield tensor
