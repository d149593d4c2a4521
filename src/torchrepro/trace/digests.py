"""Placeholders for digests of uninitialized memory, and of results that are incomplete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.trace.format import PARTLY, UNINITIALIZED_INPUT
from torchrepro.trace.tensor_reads import fingerprint_of, version_of

if TYPE_CHECKING:
    from torchrepro.trace.frames import CallSite


class UninitializedDigest(bytes):
    """A placeholder for the digest of memory that no recorded op has written completely."""

    allocated_at: CallSite | None = None

    may_be_nan = False  # whether an op may have written NaN into it

    def becomes(self, digest: bytes, *, may_be_nan: bool = False) -> UninitializedDigest:
        """Return the new digest after ops have written a part of this memory, or of a copy."""
        derived = UninitializedDigest(digest)
        derived.allocated_at, derived.may_be_nan = self.allocated_at, self.may_be_nan or may_be_nan
        return derived


MAYBE_INITIALIZED = UninitializedDigest(PARTLY + b"miss")
"""Placeholder for uninitialized memory that was written while nothing was recorded."""

UNREAD = b"not read"
"""Placeholder for the input of a view op: memory too large to be read only because of the view."""

Digest = Any
"""The first bytes of a fingerprint, or a `Pending` or `InFlight` object until it is computed."""

PLACEHOLDERS = frozenset({UNREAD[:4], UNINITIALIZED_INPUT[:4], PARTLY})
"""The first 4 bytes of digests that were not computed from memory."""


def is_uninitialized(digest: Digest) -> bool:
    """Whether a digest is a placeholder for memory that is wholly or partly uninitialized."""
    return digest.__class__ is UninitializedDigest


def digest_of_uninitialized(inputs: list[Digest], key: bytes) -> bytes:
    """Return a fingerprint for partly uninitialized memory, computed from `inputs` and `key`."""
    known = [digest for digest in inputs if isinstance(digest, bytes)]
    return PARTLY + xxhash.xxh3_128_digest(b"".join(known) + key)[4:]


class InFlight:
    """The fingerprint of a tensor that another thread or device is still writing.

    A collective op returns before the result is complete. The result is read when the program uses
    it, or at the latest when the step ends. A result that the program has overwritten is not read.
    """

    __slots__ = ("_digest", "_tensor", "_version")

    def __init__(self, tensor: Any) -> None:
        self._tensor, self._version = tensor, version_of(tensor) + 1
        self._digest: Digest = UNREAD + UNREAD

    def land(self) -> Digest:
        """Return the tensor's fingerprint or a `Pending`. Only the first call reads the tensor."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None and version_of(tensor) <= self._version:
            self._digest = fingerprint_of(tensor)
        return self._digest

    @property
    def bytes(self) -> bytes:
        """The whole fingerprint. Call `land` first, and `fetch` if `land` returned a `Pending`."""
        return self._digest if self._digest.__class__ is bytes else self._digest.bytes
