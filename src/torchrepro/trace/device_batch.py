"""Small tensors of a device, fingerprinted together: every launch takes a device some time.

A tensor is copied into memory of ours while it has its value, which is one launch. What is in that
memory is mixed at once, in as few launches as one tensor takes, when it is full or is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from torchrepro.trace.fingerprint import (
    FEW,
    SUMS,
    Mixing,
    contiguous_strides,
    copyable,
    key_tables,
    mixed,
    sums_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOM = 1 << 22
"""Bytes of a batch on its device; while it is mixed it takes up to four times as many more."""

WIDTHS = (1 << 12, 1 << 14, 1 << 16, 1 << 18)
"""Bytes that the tensors of a batch may have; a tensor goes where it leaves least room."""


ZEROED = 16
"""Slots that are filled with zeros at a time: the others may never be taken."""


class Batch(Protocol):
    """Parts of tensors whose sums are computed, and fetched, together."""

    def put(self, part: Any) -> int:
        """Take a part as it is now; returns its number."""

    @property
    def is_full(self) -> bool:
        """Whether no part can be put in any more."""

    def computed(self) -> Any:
        """Return the sums of all parts on their device; no part is put in after that."""

    def bytes_of(self, fetched: Any) -> bytes:
        """Return 16 bytes for each part, from what `computed` gave, on the host and flat."""


@dataclass(slots=True)
class Alone:
    """A part that is in no batch with others."""

    sums: Any
    is_full = True

    def put(self, part: Any) -> int:
        """Take nothing."""
        raise NotImplementedError("this batch is full from the start")

    def computed(self) -> Any:
        """Return the sums, which were begun before."""
        return self.sums

    def bytes_of(self, fetched: Any) -> bytes:
        """Return the 16 bytes of the part."""
        return fetched.numpy().tobytes()  # type: ignore[no-any-return]


def staging_width(size: int) -> int:
    """Return for how many bytes the slots are that a part of `size` bytes goes to; 0 for none."""
    return next((width for width in WIDTHS if size <= width), 0)


class Staging:
    """Memory with a slot of `width` bytes for each part, filled up with zeros.

    What the zeros add to the sums of a part is known, and taken away on the host.
    """

    def __init__(self, mixing: Mixing, device: Any, width: int) -> None:
        torch = import_module("torch")
        self._mixing, self._width = mixing, width
        self._memory: Any = torch.empty(ROOM // 8, dtype=torch.int64, device=device)
        self._views: dict[Any, Any] = {}
        self._words: list[int] = []
        self._sums: Any = None

    @property
    def is_full(self) -> bool:
        """Whether every slot is taken."""
        return len(self._words) * self._width >= ROOM

    def put(self, part: Any) -> int:
        """Copy a part of at most `width` bytes, contiguous or not, in one launch."""
        source = copyable(part)
        memory = self._views.get(source.dtype)
        if memory is None:
            memory = self._views[source.dtype] = self._memory.view(source.dtype)
        number = len(self._words)
        if number % ZEROED == 0:
            self._memory[number * self._width // 8 :][: ZEROED * self._width // 8].zero_()
        start = number * self._width // source.itemsize
        memory.as_strided(source.shape, contiguous_strides(source.shape), start).copy_(source)
        self._words.append(-(-part.nbytes // self._mixing.width))
        return number

    def computed(self) -> Any:
        """Return the sums of the slots that are taken, and give the memory back."""
        if self._sums is None:
            torch = import_module("torch")
            dtype = getattr(torch, self._mixing.dtype)
            slots = self._memory.view(dtype).view(-1, self._width // self._mixing.width)
            words = slots[: len(self._words)]
            keys = key_tables(self._mixing, words.device, FEW)[:, None, : words.shape[1]]
            self._sums = sums_of(words, keys, self._mixing)
            self._memory, self._views = None, {}
        return self._sums

    def bytes_of(self, fetched: Any) -> bytes:
        """Return 16 bytes for each slot, without what the zeros behind a part have added."""
        zeros = _sums_of_zeros(self._mixing)
        behind = zeros[:, self._width // self._mixing.width, None] - zeros[:, self._words]
        found = fetched.view(zeros.dtype).view(self._mixing.streams, len(self._words), SUMS)
        return (found - behind).transpose(0, 1).contiguous().numpy().tobytes()  # type: ignore[no-any-return]


@cache
def _sums_of_zeros(mixing: Mixing) -> Any:
    """Return the sums of words of zero, for each count of them that fits into a slot."""
    torch = import_module("torch")
    count = WIDTHS[-1] // mixing.width
    keys = key_tables(mixing, torch.device("cpu"), FEW)[:, :count]
    words = mixed(torch.zeros(count, dtype=keys.dtype, device="cpu"), keys, mixing)
    parts: Sequence[Any] = (words, words * keys)
    sums = torch.stack([part.cumsum(-1, dtype=part.dtype) for part in parts], -1)
    return torch.nn.functional.pad(sums, (0, 0, 1, 0))
