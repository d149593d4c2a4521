"""Caches the digests of the tensors that ops read and write.

A tensor is fingerprinted again only if the memory of the tensor may have changed.
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
from torchrepro.trace.device_fingerprint import Digest, PendingDigest
from torchrepro.trace.digests import (
    MAYBE_INITIALIZED,
    UNREAD,
    UninitializedDigest,
    digest_of_unfinished,
    digest_of_uninitialized,
    is_uninitialized,
)
from torchrepro.trace.fingerprint import fingerprint, unobserved
from torchrepro.trace.format import INPUT, PARTLY, UNINITIALIZED_INPUT
from torchrepro.trace.op_facts import (
    PLAIN,
    inference_writes,
    shape_of,
    storage_id,
    tensors_in,
    version_of,
)
from torchrepro.trace.tensor_reads import fingerprint_of_plain_result, size_of
from torchrepro.trace.waiting_outputs import WaitingOutputs

if TYPE_CHECKING:
    from weakref import ReferenceType

    from torchrepro.trace.frames import CallSite
    from torchrepro.trace.op_facts import OpFacts

Tensor = torch.Tensor

LARGE = 2**20
"""Tensors of more bytes are read once. Smaller tensors and parameters are read in every step."""
READ, WRITTEN, VIEW = range(3)
"""Source of a digest: memory was read, an op wrote the tensor, or the tensor is a view."""

Entry = tuple["ReferenceType[Any]", int, Digest, int]
"""A tensor, the version of the tensor, a digest, and the source of the digest."""

NO_ENTRY: Entry = (lambda: None), 0, UNREAD, READ  # type: ignore[assignment]
"""The default for a tensor without an entry; it never is valid."""

NewTensor = tuple["ReferenceType[Any]", "list[Callable[[Any, Any], None]]"]
"""A tensor, and a callback for its first read, which gets the tensor and its fingerprint.

The callback is in a list that tensors of the same memory share. The first read empties the list.
"""

_Kept = TypeVar("_Kept", Entry, NewTensor)

_short_digest = xxhash.xxh3_64_digest


class FingerprintCache:
    """Maps each living tensor to its digest, which is valid until torch writes the tensor again.

    Torch counts its writes in the version of a tensor. It does not count writes from outside torch.
    Parameters and small tensors are therefore read again in every step.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.new: dict[int, NewTensor] = {}  # made from Python values; not read by any op yet
        self.waiting = WaitingOutputs()
        self.bytes_read = 0  # in the running step
        self.uninitialized_inputs: list[tuple[UninitializedDigest, Any]] = []
        """The inputs of the running op that are uninitialized, each with its digest."""
        self._allocated: dict[int, tuple[Any, int, UninitializedDigest]] = {}
        """Storages that are uninitialized, by id: the storage, its version, its digest."""

    def digest_of_memory(self, tensor: Any) -> Digest:
        """Return the digest of the memory of `tensor`. Reads the memory if `tensor` is a view.

        The cached digest of a view is computed from the digest of another tensor, so it depends on
        the recorded ops. Uninitialized memory is not read.
        """
        entry = self.valid(tensor)
        if entry is None:
            return self.read(tensor)
        if entry[3] != VIEW or is_uninitialized(entry[2]):
            return entry[2]
        self.bytes_read += size_of(tensor)
        digest = self._fingerprint(tensor, version_of(tensor))
        return digest[:INPUT] if digest.__class__ is bytes else digest

    def read(self, tensor: Any) -> Digest:
        """Read a tensor that is not in the cache. Add the tensor's digest and return it."""
        fingerprint = self._fingerprint(tensor, version_of(tensor))
        if self.new:
            made = self.new.pop(address(tensor), None)
            if made is not None and made[0]() is tensor:
                first_read = None
                with suppress(IndexError):  # another thread was first
                    first_read = made[1].pop()
                if first_read is not None:
                    first_read(tensor, fingerprint)
        return self.add(tensor, fingerprint)

    def _fingerprint(self, tensor: Any, version: int) -> Digest:
        """Return the fingerprint of a tensor on the host. One on a device may wait."""
        if tensor.is_cpu or tensor.is_meta:
            return fingerprint(tensor)
        return self.waiting.add(tensor, version)

    def expect(self, tensor: Any, first_read: Callable[[Any, Any], None]) -> None:
        """Call ``first_read(tensor, fingerprint)`` when an op reads a new tensor the first time.

        The fingerprint is computed at that read, because the program may fill the memory before.
        """
        self.new[address(tensor)] = ref(tensor), [first_read]

    def pass_on(self, tensor: Any, result: Any) -> None:
        """Treat a read of `result` as a read of the new `tensor`, because they share memory."""
        made = self.new.get(address(tensor))
        if made is not None and made[0]() is tensor:
            self.new[address(result)] = ref(result), made[1]

    def add(self, tensor: Any, fingerprint: Any) -> Digest:
        """Add the fingerprint of a tensor whose memory was read. Return the tensor's digest."""
        self.bytes_read += size_of(tensor)
        digest = fingerprint[:INPUT] if fingerprint.__class__ is bytes else fingerprint
        self.entries[address(tensor)] = ref(tensor), version_of(tensor), digest, READ
        return digest

    def is_uninitialized(self, tensor: Any) -> bool:
        """Whether the cache lists `tensor` as wholly or partly uninitialized."""
        entry = self.entries.get(address(tensor))
        return entry is not None and entry[0]() is tensor and is_uninitialized(entry[2])

    def has_uninitialized_memory(self, tensor: Any) -> bool:
        """Whether `tensor`, or the storage of `tensor`, is wholly or partly uninitialized."""
        if self.is_uninitialized(tensor):
            return True
        if tensor.__class__ not in PLAIN or tensor.layout is not torch.strided:
            return False
        known = self._allocated.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - see `BORROWED_NAMES`
        return known is not None and known[1] == version_of(tensor)

    def end_step(self, *, on_main: bool = True) -> None:
        """Forget views, parameters and small tensors: other code may change them between steps.

        Uninitialized tensors stay, because they must not be read. Views stay if the step ends on a
        thread other than the main thread. Another thread may be about to use such a view, and
        a digest of the memory would differ from the cached digest.
        """

        def outlives(tensor: Any, entry: Entry) -> bool:
            if is_uninitialized(entry[2]):
                return True  # its memory must not be read
            if entry[3] == VIEW:
                return not on_main
            return size_of(tensor) > LARGE and not _is_parameter(tensor)

        _keep_only(self.entries, outlives)
        _keep_only(self.new, lambda *_: True)
        for key, (storage, *_) in self._allocated.copy().items():
            if storage.expired():
                self._allocated.pop(key, None)

    def forget_dead(self) -> None:
        _keep_only(self.entries, lambda *_: True)

    def distrust(self) -> None:
        """Forget all digests except the placeholders for uninitialized memory."""
        _keep_only(self.entries, lambda _, entry: is_uninitialized(entry[2]))

    def resume(self) -> None:
        """Forget digests that ops may have made invalid while nothing was recorded.

        Uninitialized memory that such ops have written gets the digest `MAYBE_INITIALIZED`.
        """
        self.distrust()
        for key, (reference, version, _, source) in self.entries.copy().items():
            tensor = reference()
            if tensor is not None and version_of(tensor) != version:
                self.entries[key] = reference, version_of(tensor), MAYBE_INITIALIZED, source

    def add_named(self, facts: OpFacts, kwargs: Any, digests: list[Any], plain: list[Any]) -> None:
        """Add the digests of tensors in `kwargs`; add all names and other values to `plain`."""
        plain += kwargs
        for name, value in kwargs.items():
            if name not in facts.written_names:  # an overwritten argument is not read
                self._add_value(facts, value, digests, plain)

    def _add_value(self, facts: OpFacts, value: Any, digests: list[Any], plain: list[Any]) -> None:
        if value.__class__ in PLAIN:
            entry = self.valid(value)
            digests.append(self.missing_input(facts, value) if entry is None else entry[2])
            if entry is not None and entry[2].__class__ is not bytes:
                self.note_unfinished_input(entry[2], value)
        elif value.__class__ is list or value.__class__ is tuple:
            self.add_list(value, digests, plain)
        else:
            plain.append(value)

    def note_unfinished_input(self, digest: Digest, tensor: Any) -> None:
        """Read an input that a collective was writing. Note an input that is uninitialized."""
        if isinstance(digest, PendingDigest):
            if digest.is_unfinished:
                digest.start()
        elif isinstance(digest, UninitializedDigest):
            self.uninitialized_inputs.append((digest, tensor))

    def _uninitialized_digest_of(self, tensor: Any) -> UninitializedDigest | None:
        """Note an input whose storage is uninitialized; return the storage's digest or None."""
        if tensor.__class__ in PLAIN and tensor.layout is torch.strided:
            known = self._allocated.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - see `BORROWED_NAMES`
            if known is not None and known[1] == version_of(tensor):
                self.uninitialized_inputs.append((known[2], tensor))
                return known[2]
        return None

    def allocated(self, tensor: Any, call_site: CallSite) -> None:
        """Note which call site allocated uninitialized memory, for the tensor and for its storage.

        Without an op, Python may make another tensor of the storage, such as a parameter.
        """
        digest: Any = self.entries[address(tensor)][2]
        digest.allocated_at = call_site
        if tensor.__class__ in PLAIN and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            reference: Any = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._allocated[reference.cdata] = reference, version_of(tensor), digest

    def missing_input(self, facts: OpFacts, tensor: Any) -> Digest:
        """Return the digest of a tensor that an op reads and that is not in the cache."""
        if facts.view and size_of(tensor) > LARGE and not _is_parameter(tensor):
            return UNREAD
        uninitialized = self._uninitialized_digest_of(tensor) if self._allocated else None
        return uninitialized if uninitialized and facts.keeps else self.read(tensor)

    def add_list(self, sequence: Any, digests: list[Any], plain: list[Any]) -> None:
        """Add the digests of the tensors in a list. Add a list without tensors to `plain`."""
        if not any(isinstance(member, Tensor) for member in sequence):
            plain.append(sequence)
            return
        for member in sequence:
            if isinstance(member, Tensor):
                entry = self.valid(member)
                if entry is None and self._allocated:
                    self._uninitialized_digest_of(member)
                digests.append(self.read(member) if entry is None else entry[2])
                if digests[-1].__class__ is UninitializedDigest:
                    self.uninitialized_inputs.append((digests[-1], member))
            else:
                plain.append(member)

    def outputs(
        self, facts: OpFacts, args: Any, kwargs: Any, result: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return the fingerprints and shapes of all tensors that an op has created or written."""
        fingerprints: list[Any] = []
        shapes: list[Any] = []
        if facts.rebinds:
            self.entries.pop(address(result), None)
            known = self._allocated.get(result.untyped_storage()._cdata)  # noqa: SLF001 - see `BORROWED_NAMES`
            if known is not None:  # torch increments the version later
                storage, _, digest = known
                self._allocated[storage.cdata] = storage, version_of(result) + 1, digest
        elif result.__class__ is Tensor and not facts.writes:
            self._read_output(facts, result, version_of(result), fingerprints, shapes)
        else:
            written = facts.written_in(args, kwargs) if facts.writes else ()
            for tensor in written:
                if tensor.is_inference():
                    version = inference_writes[storage_id(tensor)] = version_of(tensor) + 1
                else:  # autograd increments the version later
                    version = version_of(tensor) + facts.counted
                self._read_output(facts, tensor, version, fingerprints, shapes)
                self.update_base_of(tensor)
            for tensor in _created_tensors(facts, written, result):
                self._read_output(facts, tensor, version_of(tensor), fingerprints, shapes)
        return fingerprints, shapes

    def views(self, args: Any, key: bytes, inputs: list[Any], result: Any) -> list[Any]:
        """Add views with digests computed from the digest of the base. Return the views' shapes."""
        base = inputs[0] if inputs else UNREAD
        digest = base
        if base.__class__ is bytes and base is not UNREAD:
            digest = _short_digest(base + key)
        elif base.__class__ is UninitializedDigest and base[:4] == PARTLY:
            digest = base.becomes(PARTLY + _short_digest(base + key)[4:])
        version = version_of(args[0]) if args and isinstance(args[0], Tensor) else 0
        shapes = []
        tensors = (result,) if isinstance(result, Tensor) else result
        for tensor in tensors:
            shapes.append(shape_of(tensor))
            if base is not UNREAD:
                # The version of the base: autograd lets the view share it later.
                self.entries[address(tensor)] = ref(tensor), version, digest, VIEW
            elif self.new:
                self.pass_on(args[0], tensor)
        return shapes

    def output_partly_uninitialized(
        self, facts: OpFacts, key: bytes, inputs: list[Any], result: Any
    ) -> tuple[list[Any], list[Any]]:
        """Return the fingerprint and the shape of a result that is partly uninitialized."""
        digest = digest_of_uninitialized(inputs, key)
        # Autograd increments the version later, and never for an inference tensor.
        version = version_of(result) + (facts.writes and not result.is_inference())
        short = inputs[0].becomes(digest[:INPUT], may_be_nan=facts.writes)
        self.entries[address(result)] = ref(result), version, short, WRITTEN
        return [digest], [shape_of(result)]

    def valid(self, tensor: Any) -> Entry | None:
        entry = self.entries.get(address(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        # An inference tensor has no version: if it is uninitialized, its entry is always valid.
        is_inference = is_uninitialized(entry[2]) and Tensor.is_inference(tensor)  # type: ignore[arg-type]
        return entry if is_inference or entry[1] == version_of(tensor) else None

    def _read_output(
        self, facts: OpFacts, tensor: Any, version: int, fingerprints: list[Any], shapes: list[Any]
    ) -> None:
        if facts.allocates:
            short: Digest = UninitializedDigest(UNINITIALIZED_INPUT)
        else:
            if facts.collective:
                digest: Digest = digest_of_unfinished(tensor)
            else:
                digest = fingerprint_of_plain_result(tensor) or self._fingerprint(tensor, version)
            fingerprints.append(digest)
            short = digest[:INPUT] if digest.__class__ is bytes else digest
            self.bytes_read += size_of(tensor)
        shapes.append(shape_of(tensor))
        self.entries[address(tensor)] = ref(tensor), version, short, WRITTEN

    def update_base_of(self, view: Any) -> None:
        """Update the digest of the uninitialized base of `view` after an op has written `view`."""
        if self._allocated and view.layout is torch.strided:
            self._allocated.pop(view.untyped_storage()._cdata, None)  # noqa: SLF001 - see `BORROWED_NAMES`
        base, entries = view._base, self.entries  # noqa: SLF001 - documented in the notes on autograd
        if base is None:
            return
        before, after = entries.get(address(base)), entries[address(view)]
        if before is None or before[0]() is not base:
            return
        known = before[2]
        if not isinstance(known, UninitializedDigest):
            return
        region = repr((view.storage_offset(), view.shape, view.stride())).encode()
        digest = digest_of_uninitialized([known, after[2]], region)
        short = known.becomes(digest[:INPUT], may_be_nan=contains_nan(view))
        entries[address(base)] = before[0], after[1], short, WRITTEN


def contains_nan(value: Any) -> bool:
    """Whether `value` is a plain tensor on the CPU that contains NaN."""
    if value.__class__ not in PLAIN or not value.is_cpu or not value.is_floating_point():
        return False
    with unobserved():
        return bool(value.isnan().any())


def fingerprinted_tensors(facts: OpFacts, args: Any, kwargs: Any, result: Any) -> list[Any]:
    """Return the tensors whose fingerprints are in the record of an op, in the same order."""
    if facts.view or facts.allocates or facts.rebinds:
        return []
    written = facts.written_in(args, kwargs)
    return [*written, *_created_tensors(facts, written, result)]


def _is_parameter(tensor: Any) -> bool:
    return bool(tensor.requires_grad and tensor.is_leaf)


def _keep_only(entries: dict[int, _Kept], is_kept: Callable[[Any, _Kept], bool]) -> None:
    """Remove dead tensors, and tensors that fail the test `is_kept`, from `entries`.

    Threads share `entries`, so the loop uses a copy. An entry that another thread replaces stays.
    """
    for key, entry in entries.copy().items():
        tensor = entry[0]()
        if (tensor is None or not is_kept(tensor, entry)) and entries.get(key) is entry:
            entries.pop(key, None)


def _created_tensors(facts: OpFacts, written: Any, result: Any) -> Iterator[Any]:
    for position, tensor in enumerate(tensors_in(result) if result is not None else ()):
        if position not in facts.scratch and not any(tensor is known for known in written):
            yield tensor
