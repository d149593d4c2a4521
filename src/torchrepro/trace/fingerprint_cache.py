"""Fingerprints of what ops are given and make; of a tensor that was seen before, from the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import xxhash

from torchrepro.trace.device_fingerprint import device_fingerprint
from torchrepro.trace.fingerprint import arrays, fingerprint
from torchrepro.trace.op_facts import CPU, PLAIN, shape_of, tensors_in
from torchrepro.trace.reader import INPUT, PARTLY, UNINITIALISED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from weakref import ReferenceType

    from torchrepro.trace.op_facts import OpFacts


_NOT_A_DEVICE = ("cpu", "meta")
_digest = xxhash.xxh3_128_digest


def fingerprint_of(tensor: Any) -> Any:
    """Return the fingerprint of a tensor, `Pending` for one whose device still computes it."""
    if tensor.device.type in _NOT_A_DEVICE:
        return fingerprint(tensor)
    return device_fingerprint(tensor)


def fingerprint_of_result(tensor: Any) -> Any:
    """Return the fingerprint of a tensor whose memory an op has just written."""
    plain = plain_result(tensor)
    return fingerprint_of(tensor) if plain is None else plain[0]


def plain_result(tensor: Any) -> tuple[bytes, Any, int] | None:
    """Return fingerprint, shape and size of a plain contiguous tensor on the CPU, else None.

    It is one that an op has just written: its memory is there and no value of it waits to be
    conjugated or negated, so that nothing more has to be asked before it is read. The fingerprint
    is the same as `fingerprint` takes.
    """
    try:
        shape = tensor.shape  # raises for nested tensors
        if (
            tensor.__class__ in PLAIN
            and tensor.device == CPU
            and tensor.is_contiguous()  # raises for sparse ones
            and (size := tensor.nbytes)
            and (start := tensor.data_ptr())  # none for zeros that autograd only imagines
        ):
            return _digest(arrays[size].from_address(start)), (shape, tensor.dtype), size
    except RuntimeError:
        return None
    return None


LARGE = 2**20
"""Bytes above which memory that is no parameter is read once and not anew in every step."""

UNREAD = b"not read"
"""Stands for the input of a view whose memory is too large to be read for that alone."""

Digest = Any
"""The first bytes of a fingerprint, or a `Pending` one that a device still computes."""

READ, WRITTEN, VIEW = range(3)
"""How a digest came about: memory was read, an op has written it, or it is a view of another."""

Entry = tuple["ReferenceType[Any]", int, Digest, int]
"""The tensor, its version, its digest, and how that came about."""


def version_of(tensor: Any) -> int:
    """Return how often torch has written `tensor` in place; inference tensors do not count it.

    https://docs.pytorch.org/docs/stable/notes/autograd.html#in-place-correctness-checks
    """
    try:
        return tensor._version  # type: ignore[no-any-return]  # noqa: SLF001 - documented, see above
    except RuntimeError:
        return 0


def size_of(tensor: Any) -> int:
    """Return how many bytes the elements of a tensor take; of a sparse one, those it stores."""
    try:
        return tensor.nbytes  # type: ignore[no-any-return]
    except (RuntimeError, NotImplementedError):
        return tensor._nnz() * tensor.element_size() if tensor.is_sparse else 0  # noqa: SLF001 - the public `values` needs a coalesced tensor


class FingerprintCache:
    """Digests by tensor, valid as long as the tensor lives and torch has not written it again.

    Memory that something else than torch writes keeps its version: parameters, and all that is
    small, are therefore read anew in every step.
    """

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.bytes_read = 0
        """Bytes of tensors read since `taken_bytes` was called, by whoever takes fingerprints."""

    def digest(self, tensor: Any) -> Digest:
        """Return the digest of `tensor`, reading its memory if it is not known."""
        known = self._valid(tensor)
        if known is not None:
            return known[2]
        self.bytes_read += size_of(tensor)
        digest = fingerprint_of(tensor)
        digest = digest[:INPUT] if type(digest) is bytes else digest
        self.entries[id(tensor)] = ref(tensor), version_of(tensor), digest, READ
        return digest

    def _valid(self, tensor: Any) -> Entry | None:
        """Return what is known of a tensor that torch has not written since."""
        known = self.entries.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version_of(tensor):
            return known
        return None

    def digest_of_base(self, tensor: Any) -> Digest:
        """Return the digest of what a view is taken of, without reading large data for it."""
        if self._valid(tensor) is not None or _is_parameter(tensor) or size_of(tensor) <= LARGE:
            return self.digest(tensor)
        return UNREAD

    def viewed(self, tensor: Any, digest: Digest, version: int) -> None:
        """Remember what `tensor` is a view of."""
        self.entries[id(tensor)] = ref(tensor), version, digest, VIEW

    def read(self, tensor: Any, digest: Digest) -> None:
        """Remember what was read of `tensor` by somebody else."""
        self.entries[id(tensor)] = ref(tensor), version_of(tensor), digest, READ

    def taken_bytes(self) -> int:
        """Return how many bytes were read since the last call."""
        taken, self.bytes_read = self.bytes_read, 0
        return taken

    def is_unset(self, tensor: Any) -> bool:
        """Whether nothing is known to have written some or all of `tensor`."""
        known = self.entries.get(id(tensor))
        return known is not None and known[0]() is tensor and is_unset(known[2])

    def end_step(self) -> None:
        """Forget all that may change without torch by the next step, but for large data."""
        self.entries = {key: entry for key, entry in self.entries.items() if _outlives(entry)}

    def forget_what_is_gone(self) -> None:
        """Forget tensors that no longer are."""
        alive = {k: entry for k, entry in self.entries.items() if entry[0]() is not None}
        self.entries = alive

    def distrust(self) -> None:
        """Forget everything but which memory nothing has written."""
        self.entries = {k: entry for k, entry in self.entries.items() if is_unset(entry[2])}

    def forget(self) -> None:
        """Forget everything: something unseen may have written anywhere."""
        self.entries.clear()


def _is_parameter(tensor: Any) -> bool:
    return bool(tensor.requires_grad and tensor.is_leaf)


def _outlives(entry: Entry) -> bool:
    """Whether what is known of a tensor is kept for the next step."""
    tensor = entry[0]()
    if tensor is None:
        return False
    if is_unset(entry[2]):
        return True  # reading it would read what nobody wrote
    return entry[3] != VIEW and size_of(tensor) > LARGE and not _is_parameter(tensor)


def of_view(base: Digest, key: bytes) -> Digest:
    """Return the digest of a view from that of its base and from what it is a view of."""
    if base.__class__ is not bytes or base is UNINITIALISED:
        return base
    digest = xxhash.xxh3_64_digest(base + key)
    return digest if base[:4] != PARTLY else PARTLY + digest[4:]


def is_unset(digest: Digest) -> bool:
    """Whether a digest stands for memory of which nothing had written some or all."""
    return digest is UNINITIALISED or (digest.__class__ is bytes and digest[:4] == PARTLY)


def of_unset(inputs: list[Digest], key: bytes) -> Digest:
    """Return the fingerprint of memory that is unset in part, from what was written into it."""
    known = [digest for digest in inputs if digest.__class__ is bytes]
    return PARTLY + xxhash.xxh3_128_digest(b"".join(known) + key)[4:]


class InFlight:
    """The fingerprint of a tensor that another thread or device is still writing.

    A collective returns before its result is there; it is when the program goes on to use it, at
    the latest when the step ends. What the program has overwritten by then stays unread.
    """

    __slots__ = ("_digest", "_tensor", "_version")

    def __init__(self, tensor: Any) -> None:
        self._tensor, self._version = tensor, version_of(tensor) + 1
        self._digest: Digest = UNREAD + UNREAD

    def land(self) -> Digest:
        """Read the tensor once; returns a fingerprint that a device may still have to hand over."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None and version_of(tensor) <= self._version:
            self._digest = fingerprint_of(tensor)
        return self._digest

    @property
    def bytes(self) -> bytes:
        """The whole fingerprint, once it has landed."""
        return self._digest if self._digest.__class__ is bytes else self._digest.bytes


Tensor = torch.Tensor


class Inputs:
    """Reads the arguments of ops."""

    def __init__(self, known: FingerprintCache) -> None:
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


class Outputs:
    """Reads the results of ops."""

    def __init__(self, known: FingerprintCache) -> None:
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
