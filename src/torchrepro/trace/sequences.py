"""Sequences of numbers: how a trace stores them, and those that are remembered for a while."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Generic, TypeVar

from torchrepro.trace.format import MANY

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

REMEMBERED = 1 << 20
"""Numbers of sequences that are held in memory at once."""

_LETTERS = {1: "B", 2: "H", 4: "I"}
"""What `struct` calls unsigned numbers of so many bytes."""

Key = TypeVar("Key", bound="Hashable")
Value = TypeVar("Value")


def packed(numbers: Sequence[int]) -> bytes:
    """Return numbers as bytes: the width of one, then all of them, the lowest byte first."""
    largest = max(numbers)
    width = 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4
    return struct.pack(f"<B{len(numbers)}{_LETTERS[width]}", width, *numbers)


def unpacked(content: bytes) -> tuple[int, ...]:
    """Return the numbers of a sequence. Raises `ValueError` if no part can have it."""
    width = content[0] if content else 0
    count, rest = divmod(len(content) - 1, width) if width in _LETTERS else (0, 0)
    if rest or not 0 < count <= MANY:
        raise ValueError("a sequence of numbers is not valid")
    return struct.unpack_from(f"<{count}{_LETTERS[width]}", content, 1)


class Recent(Generic[Key, Value]):
    """What is known of sequences that were used lately; the others are forgotten."""

    def __init__(self, most: int = REMEMBERED) -> None:
        self._most = most // 2
        self._held = 0
        self._used: dict[Key, tuple[Value, int]] = {}
        self._older: dict[Key, tuple[Value, int]] = {}

    def get(self, key: Key) -> Value | None:
        """Return what is known of a sequence."""
        found = self._used.get(key)
        if found is None:
            found = self._older.get(key)
            if found is None:
                return None
            self.add(key, *found)
        return found[0]

    def add(self, key: Key, value: Value, numbers: int) -> None:
        """Remember a sequence of so many numbers."""
        if self._held + numbers > self._most:
            self._older, self._used, self._held = self._used, {}, 0
        self._used[key] = value, numbers
        self._held += numbers

    def clear(self) -> None:
        """Forget all of them."""
        self._older, self._used, self._held = {}, {}, 0
