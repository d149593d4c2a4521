"""Weights & Biases: the run's config and one of its files.

A file of the run rather than an artifact, of which each call would make another version. See
https://docs.wandb.ai/ref/python/sdk/classes/run.
"""

from __future__ import annotations

import glob
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.integrations.destinations.entry import NAMESPACE, Destination
from torchrepro.manifest.contents import FILE, write_manifest

if TYPE_CHECKING:
    from torchrepro.integrations.destinations.entry import Entry


def _wandb() -> Any:
    return sys.modules.get("wandb")


def _is_run(target: Any) -> bool:
    wandb = _wandb()
    return wandb is not None and isinstance(target, wandb.Run)


def _active() -> Any:
    return _wandb().run if _wandb() else None


def _write(run: Any, entry: Entry) -> str:
    if run.disabled:
        return f"run {run.id} is disabled: wandb keeps nothing"
    run.config.update({NAMESPACE: entry.profile}, allow_val_change=True)
    path = write_manifest(Path(run.dir), entry.manifest)
    run.save(glob.escape(str(path)), base_path=run.dir, policy="now")
    return f"run {run.id}: config {NAMESPACE}.*, file {FILE}"


WANDB = Destination(
    name="wandb",
    takes="wandb or a run of it",
    write=_write,
    modules=("wandb",),
    recognises=_is_run,
    active=_active,
    would_be="wandb.init()",
)
