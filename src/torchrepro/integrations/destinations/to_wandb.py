"""Weights & Biases: the run's config and one of its files.

A file of the run rather than an artifact, of which each call would make another version. See
https://docs.wandb.ai/ref/python/sdk/classes/run.
"""

from __future__ import annotations

import glob
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.integrations.destinations.entry import MANIFEST, NAMESPACE, Destination

if TYPE_CHECKING:
    from torchrepro.integrations.destinations.entry import Entry


def _wandb() -> Any:
    return sys.modules.get("wandb")


def _is_run(target: Any) -> bool:
    wandb = _wandb()
    return wandb is not None and isinstance(target, wandb.Run)


def _is_wandb(target: Any) -> bool:
    return target is not None and target is _wandb()


def _active() -> Any:
    return _wandb().run if _wandb() else None


def _write(run: Any, entry: Entry) -> str:
    run.config.update({NAMESPACE: entry.profile}, allow_val_change=True)
    path = Path(run.dir) / MANIFEST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(entry.text, encoding="utf-8")
    run.save(glob.escape(str(path)), base_path=run.dir, policy="now")
    return f"run {run.id}: config {NAMESPACE}.*, file {MANIFEST}"


WANDB = Destination(
    name="wandb",
    recognises=_is_run,
    is_tool=_is_wandb,
    active=_active,
    write=_write,
    takes="wandb or a run of it",
    would_be="wandb.init()",
)
