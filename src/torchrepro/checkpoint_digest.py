"""The identity of a checkpoint: digests of its tensors and values, in every file format.

Equal names, dtypes, shapes and bits have equal digests. The file format, the version of torch, the
device, the strides and the order of the entries do not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from torchrepro.checkpoint_files import SavedTensor, damage_explained, saved_state
from torchrepro.ground.errors import shown
from torchrepro.ground.redaction import HIDDEN, sounds_secret
from torchrepro.trace.fingerprint import fingerprint


@dataclass(frozen=True)
class EntryDigest:
    """The digest of a tensor, or of another value."""

    name: str
    """The keys that lead to it, joined by dots."""
    dtype: str
    """The dtype of a tensor; the Python type of another value."""
    shape: tuple[int, ...] | None
    """The shape of a tensor; null for another value."""
    digest: str
    """SHA-256 of dtype, shape and elements, or of type and value."""

    @property
    def description(self) -> str:
        """The dtype, and the shape of a tensor."""
        return self.dtype if self.shape is None else f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class CheckpointDigest:
    """The digests of a checkpoint, of its tensors and of its values."""

    file: str
    """The file or folder."""
    digest: str
    """SHA-256 of all names and their digests."""
    entries: list[EntryDigest]
    """The tensors and values, in the order of the file."""
    state: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        entries = [vars(digest) for digest in self.entries]
        return {"file": self.file, "digest": self.digest, "entries": entries}


@dataclass(frozen=True)
class EntryDifference:
    """A tensor or value that differs between two checkpoints."""

    file: str
    """The checkpoint that differs from the first one."""
    name: str
    """The name of the tensor or value."""
    change: str
    """The difference in words."""
    elements: int | None = None
    """How many elements differ; null if they cannot be compared."""
    largest: float | None = None
    """The largest finite difference of two elements; null if they cannot be compared."""


def digest_checkpoint(file: str) -> CheckpointDigest:
    """Return the digests of a checkpoint. Raises `ProfileError` if it cannot be read safely."""
    with damage_explained(Path(file)):
        state = saved_state(Path(file))
        entries = [_digest_entry(name, value) for name, value in state.items()]
        whole = _digest(sorted((row.name, row.digest) for row in entries))
    return CheckpointDigest(file, whole, entries, state)


def _digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()


def _digest_entry(name: str, value: Any) -> EntryDigest:
    if not isinstance(value, SavedTensor):
        type_name = type(value).__name__
        return EntryDigest(name, type_name, None, _digest([type_name, _text(value)]))
    content, tensor = sha256(), value()
    for piece in value.pieces():
        content.update(piece.view(torch.uint8).numpy().data)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    return EntryDigest(name, dtype, shape, _digest([dtype, shape, content.hexdigest()]))


def _text(value: Any) -> str:
    if torch.is_tensor(value):  # a sparse or quantized one
        return f"{value.dtype} {list(value.shape)} {fingerprint(value).hex()}"
    return repr(sorted(value, key=repr) if isinstance(value, set) else value)


def differences(first: CheckpointDigest, second: CheckpointDigest) -> Iterator[EntryDifference]:
    """Yield the entries that differ between two checkpoints, and by how much tensors differ."""
    left, right = ({row.name: row for row in whole.entries} for whole in (first, second))
    for name in dict.fromkeys([*left, *right]):
        if name not in left or name not in right:
            owner = first if name in left else second
            yield EntryDifference(second.file, name, f"only in {owner.file}")
        elif left[name].digest != right[name].digest:
            before, after = left[name].description, right[name].description
            prefix = f"{before} -> {after}: " if before != after else ""
            try:
                change, *amount = _difference(name, first.state[name], second.state[name])
            except NotImplementedError:  # torch has no arithmetic of packed dtypes
                change, amount = "other elements", []
            yield EntryDifference(second.file, name, prefix + change, *amount)


def _difference(name: str, *pair: Any) -> tuple[Any, ...]:
    """Return the difference in words and, of tensors of one shape, the elements and the largest."""
    if not all(isinstance(saved, SavedTensor) for saved in pair):
        is_secret = sounds_secret(name.rpartition(".")[2])
        texts = [
            "a tensor" if isinstance(value, SavedTensor) else shown(_text(value)) for value in pair
        ]
        return (HIDDEN if is_secret else " -> ".join(texts),)
    first, second = (saved() for saved in pair)
    if first.shape != second.shape:
        return ("not compared",)
    count, largest = 0, 0.0
    wide = torch.complex128 if first.is_complex() or second.is_complex() else torch.float64
    for left, right in zip(*(saved.pieces() for saved in pair), strict=True):
        distance = (left.to(wide) - right.to(wide)).abs()
        unequal = left.to(wide) != right.to(wide)
        if left.dtype == right.dtype:  # each bit counts
            bits = [piece.view(torch.uint8).view(len(piece), -1) for piece in (left, right)]
            unequal = (bits[0] != bits[1]).any(1)
        count += int(unequal.sum())
        largest = max(largest, float(distance.where(unequal & distance.isfinite(), 0).max()))
    words = f"{count:,} of {first.numel():,} elements differ" if count else "equal values"
    return words + (f", by at most {largest:.3g}" if largest else ""), count, largest
