"""Placeholders for digests of uninitialized memory, and of results that are incomplete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.trace.device_fingerprint import Digest, PendingDigest
from torchrepro.trace.format import PARTLY, UNINITIALIZED_INPUT
from torchrepro.trace.op_facts import version_of
from torchrepro.trace.tensor_reads import fingerprint_of

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
"""Placeholder for memory that is too large to be read only because of a view, or written too early.

An output that was written again before it was read has this placeholder twice."""

PLACEHOLDERS = frozenset({UNREAD[:4], UNINITIALIZED_INPUT[:4], PARTLY})
"""The first 4 bytes of digests that were not computed from memory."""


def is_uninitialized(digest: Digest) -> bool:
    """Whether a digest is a placeholder for memory that is wholly or partly uninitialized."""
    return digest.__class__ is UninitializedDigest


def digest_of_uninitialized(inputs: list[Digest], key: bytes) -> bytes:
    """Return a fingerprint for partly uninitialized memory, computed from `inputs` and `key`."""
    known = [digest for digest in inputs if isinstance(digest, bytes)]
    return PARTLY + xxhash.xxh3_128_digest(b"".join(known) + key)[4:]


def digest_of_unfinished(tensor: Any) -> PendingDigest:
    """Return the digest of a tensor that another thread or device is still writing.

    A collective op returns before the result is complete. The result is read when the program uses
    it, or at the latest when the step ends. A result that the program has overwritten is not read.
    """
    digest, last_version = PendingDigest(), version_of(tensor) + 1

    def read() -> None:
        is_overwritten = version_of(tensor) > last_version
        digest.become(UNREAD + UNREAD if is_overwritten else fingerprint_of(tensor))

    digest.is_unfinished, digest.land = True, read
    return digest
