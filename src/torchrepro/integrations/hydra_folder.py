"""Where Hydra keeps what a job was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

_IF_HYDRA_WRITES_NOTHING = ".hydra"


def hydra_folder(config: DictConfig) -> Path:
    """Return the folder in which Hydra keeps the config of a job, of which `config` is its part.

    See https://hydra.cc/docs/configure_hydra/intro (hydra.runtime.output_dir, output_subdir).
    """
    subdir = config.output_subdir or _IF_HYDRA_WRITES_NOTHING
    return Path(config.runtime.output_dir) / subdir
