"""Fingerprints of tensors that the recorder has seen, so that inputs are not read twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import xxhash

from torchrepro.trace.reading import INPUT, PARTLY, UNINITIALISED
from torchrepro.trace.results import fingerprint_of

if TYPE_CHECKING:
    from weakref import ReferenceType

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


class Known:
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
