"""A folder, and the one in which Hydra keeps what a job was."""

from __future__ import annotations

import sys
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.integrations.destinations.entry import Destination
from torchrepro.integrations.hydra_folder import hydra_folder
from torchrepro.manifest.contents import write_manifest

if TYPE_CHECKING:
    from torchrepro.integrations.destinations.entry import Entry


def _is_folder(target: Any) -> bool:
    """Whether it is a path; a bare word has to be a folder that is there, lest a typo make one."""
    if isinstance(target, str):
        return "/" in target or "\\" in target or Path(target).is_dir()
    return isinstance(target, PathLike)


def _write(folder: Any, entry: Entry) -> str:
    return str(write_manifest(Path(folder), entry.manifest))


def _job_folder() -> Path | None:
    """Return the folder of the Hydra job that runs now, where `+repro=` writes as well."""
    hydra: Any = sys.modules.get("hydra.core.hydra_config")
    if hydra is None or not hydra.HydraConfig.initialized():
        return None
    config = hydra.HydraConfig.get()
    return hydra_folder(config) if config.runtime.get("output_dir", None) else None


FOLDER = Destination(
    name="folder",
    takes="a path to a folder",
    write=_write,
    recognises=_is_folder,
)
HYDRA = Destination(
    name="hydra",
    takes="hydra",
    write=_write,
    modules=("hydra",),
    active=_job_folder,
    would_be="the task function of a Hydra app",
)
