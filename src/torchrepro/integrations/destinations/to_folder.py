"""A folder, and the one in which Hydra keeps what a job was."""

from __future__ import annotations

import sys
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.integrations.destinations.entry import MANIFEST, Destination

if TYPE_CHECKING:
    from torchrepro.integrations.destinations.entry import Entry


def _is_folder(target: Any) -> bool:
    """Whether it is a path; a bare word has to be a folder that is there, lest a typo make one."""
    if isinstance(target, str):
        return "/" in target or "\\" in target or Path(target).is_dir()
    return isinstance(target, PathLike)


def _write(folder: Any, entry: Entry) -> str:
    path = Path(folder) / MANIFEST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(entry.text, encoding="utf-8")
    return str(path)


def _job_folder() -> Path | None:
    """Return the folder of the Hydra job that runs now, where `+repro=` writes as well.

    See https://hydra.cc/docs/configure_hydra/intro (hydra.runtime.output_dir).
    """
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    config = hydra.HydraConfig.get()
    folder = config.runtime.get("output_dir", None)
    return Path(folder) / (config.output_subdir or ".hydra") if folder else None


def _is_hydra(target: Any) -> bool:
    return target is not None and target is sys.modules.get("hydra")


def _never(_: Any) -> bool:
    return False


def _nothing() -> None:
    return None


FOLDER = Destination(
    name="folder",
    recognises=_is_folder,
    is_tool=_never,
    active=_nothing,
    write=_write,
    takes="a path to a folder",
    would_be="nothing: hand over its path",
)
HYDRA = Destination(
    name="hydra",
    recognises=_never,
    is_tool=_is_hydra,
    active=_job_folder,
    write=_write,
    takes="hydra",
    would_be="the task function of a Hydra app",
)
