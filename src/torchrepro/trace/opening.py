"""Where the trace of a process goes, and what is said of the process in it."""

from __future__ import annotations

import sys
from itertools import count
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrepro.errors import TraceError
from torchrepro.messages import Problem
from torchrepro.seeding import devices
from torchrepro.seeding.ranks import world
from torchrepro.trace.about import Redaction
from torchrepro.trace.device_fingerprint import algorithm
from torchrepro.trace.fingerprint import ALGORITHM
from torchrepro.trace.store import FORMAT, SUFFIX, Store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrepro.trace.request import Request


def open_store(request: Request, about: Mapping[str, Any]) -> Store:
    """Open a store for this process, the next free one of its rank, and say what it is.

    Raises `TraceError` if the folder cannot be written to.
    """
    its = world()
    folder = Path(request.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path, ordinal = _free(folder, its.rank)
    except OSError as error:
        raise TraceError(
            Problem(f"cannot hold a recording: {error.strerror}", found=request.folder)
        ) from None
    store = Store(path, Redaction())
    store.write_meta(
        {
            "format": FORMAT,
            "level": request.level,
            "rank": its.rank,
            "world_size": its.size,
            "ordinal": ordinal,
            "program": sys.argv[0] if sys.argv else "",
            "process": current_process().name,
            "steps": request.steps,
            "algorithm": _algorithms(),
            "statistics": request.statistics,
            "detail": request.detail,
            "keep": list(request.keep),
            **about,
        }
    )
    return store


def _algorithms() -> Mapping[str, str]:
    """Return how fingerprints are taken, by type of device in use."""
    return {"cpu": ALGORITHM} | {name: algorithm(torch.device(name)) for name in devices.in_use()}


def _free(folder: Path, rank: int) -> tuple[Path, int]:
    """Return a file of this rank that this process alone has made, and its number."""
    for ordinal in count():
        path = folder / f"rank{rank}{f'.{ordinal}' if ordinal else ''}{SUFFIX}"
        try:
            path.open("x").close()
        except FileExistsError:
            continue
        return path, ordinal
    raise AssertionError("count() does not end")
