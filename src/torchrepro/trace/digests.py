"""Digests that are not those of bytes that were read: uninitialized memory, and pending results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.trace.format import PARTLY, UNINITIALISED
from torchrepro.trace.tensor_reads import fingerprint_of, version_of

if TYPE_CHECKING:
    from torchrepro.trace.frames import CallSite


class Unset(bytes):
    """The digest of memory that no op is known to have written, in part or at all."""

    place: CallSite | None = None  # where it was allocated

    given_nan = False  # whether what ops have written into it is NaN, or may be

    def becomes(self, digest: bytes, *, given_nan: bool = False) -> Unset:
        """Return the digest of the same memory, or of a copy, once ops have written into it."""
        made = Unset(digest)
        made.place, made.given_nan = self.place, self.given_nan or given_nan
        return made


UNSEEN = Unset(PARTLY + b"miss")
"""Stands for memory that was unset, and that ops have written which were not seen."""

UNREAD = b"not read"
"""Stands for the input of a view whose memory is too large to be read for that alone."""

Digest = Any
"""The first bytes of a fingerprint, or a `Pending` or `InFlight` one that is not there yet."""

STAND_INS = frozenset({UNREAD[:4], UNINITIALISED[:4], PARTLY})
"""How the digests begin that are not of bytes that were read."""


def is_unset(digest: Digest) -> bool:
    """Whether a digest stands for memory that nothing has written, in part or at all."""
    return digest.__class__ is Unset


def digest_of_unset(inputs: list[Digest], key: bytes) -> bytes:
    known = [digest for digest in inputs if isinstance(digest, bytes)]
    return PARTLY + xxhash.xxh3_128_digest(b"".join(known) + key)[4:]


class InFlight:
    """The fingerprint of a tensor that another thread or device is still writing.

    A collective returns before its result is there. The result is there when the program uses it,
    or at the latest when the step ends. What the program has overwritten by then stays unread.
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
        """All of the fingerprint, once it has landed."""
        return self._digest if self._digest.__class__ is bytes else self._digest.bytes
