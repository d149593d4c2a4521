"""Dropout as the identity, for every caller in the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.policies.dropout import coverage, ops, written_masks
from torchrepro.policies.toggle import Toggle

if TYPE_CHECKING:
    from contextlib import ExitStack


def _zero(undo: ExitStack) -> None:
    for call in ops.override_dropout():
        undo.callback(call)
    undo.callback(written_masks.restore)
    written_masks.zero()
    undo.callback(coverage.unwatch)
    coverage.watch()


policy = Toggle("keep", "zero", "dropout zero", _zero)
"""Whether dropout is zeroed: `keep` leaves torch alone, `zero` overrides its dropout."""
