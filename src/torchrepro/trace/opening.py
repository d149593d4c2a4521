"""Where the trace of a process goes, and what is said of the process in it."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from itertools import count
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrepro.applier import in_force
from torchrepro.errors import TraceError
from torchrepro.manifest.contents import secrets_here
from torchrepro.manifest.environment import hardware, software
from torchrepro.messages import Problem, shown
from torchrepro.redaction import cleaner
from torchrepro.seeding import generators
from torchrepro.seeding.ranks import world
from torchrepro.trace.device_fingerprint import algorithm
from torchrepro.trace.fingerprint import ALGORITHM
from torchrepro.trace.store import FORMAT, SUFFIX, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.trace.request import Request


class Redaction:
    """Takes the secrets of this process out of a text, those that it learnt meanwhile too."""

    def __init__(self) -> None:
        self._environment: Mapping[str, str] | None = None
        self._clean: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        """Return plain JSON values with no secret in any text."""
        environment = os.environ.copy()
        if environment != self._environment:
            profiles = (applied.resolved for applied in in_force())
            self._environment, self._clean = environment, cleaner(secrets_here(*profiles))
        return self._clean(value)


def about_this_process() -> Mapping[str, Any]:
    """Return the profile in force with its knobs, and what a manifest says of the machine.

    Secrets may be in it: whoever writes it takes them out (`Redaction`).
    """
    its: dict[str, Any] = {
        "versions": software(),
        "hardware": hardware() | _accelerator(),
        "knobs": {},
    }
    profiles = in_force()
    if profiles:
        resolved = profiles[-1].resolved
        its["profile"] = resolved.name
        its["digest"] = resolved.digest
        its["guarantee"] = resolved.guarantee
        rows = [row for applied in profiles for row in applied.report]
        its["knobs"] = {row.knob: shown(row.after) for row in rows}
        its["outcomes"] = {row.knob: str(row.outcome) for row in rows}
    return its


def _accelerator() -> dict[str, str]:
    """Return the type and the number of the devices that torch can compute on besides the CPU."""
    torch: Any = import_module("torch")
    if not torch.accelerator.is_available():
        return {}
    device = torch.accelerator.current_accelerator()
    return {"accelerator": f"{device.type} x{torch.accelerator.device_count()}"}


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
    return {"cpu": ALGORITHM} | {
        name: algorithm(torch.device(name)) for name in generators.devices_in_use()
    }


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
