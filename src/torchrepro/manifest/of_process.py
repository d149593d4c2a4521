"""The manifest of a process below `torchrepro run --log-to DIR`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.console import say_once
from torchrepro.errors import ProfileError
from torchrepro.manifest.contents import FILE, as_text, manifest, write_manifest
from torchrepro.seeding.ranks import VARIABLES, world

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.report import Report

VARIABLE = "TORCHREPRO_LOG_TO"
"""Variable that holds the folder, for every process below `run`."""


def refuse_used_folder(folder: Path) -> None:
    """Raise `ProfileError` if `folder` holds the manifest of another run, which stays, or is none.

    Of several processes the one that writes it looks: the others may start after it has written.
    """
    what = ""
    if world().rank == 0:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if (folder / FILE).exists():
            what = "holds the manifest of another run already"
        elif not there.is_dir():
            what = "cannot be a folder: there is a file"
    if what:
        todo = "name a new folder"
        raise ProfileError.about(what, key="--log-to", found=str(folder), todo=todo)


class ProcessManifest:
    """Written when torch is there, and again, complete, when the process ends.

    One process of a run has it: the first that imports torch, or else rank 0, whose launcher may
    have imported torch before it.
    """

    def __init__(self, folder: str, read: Callable[[], tuple[ResolvedProfile, Report]]) -> None:
        self._folder = Path(folder)
        self._read = read
        self._process = os.getpid()
        self._written = ""

    def write(self) -> None:
        """Write it, unless another process has it; a folder that cannot be written is said."""
        if os.getpid() != self._process or world().rank or not self._is_ours():
            return
        its = manifest(*self._read())
        try:
            write_manifest(self._folder, its)
        except OSError as error:
            say_once(f"the manifest cannot be written: {self._folder}: {error.strerror}")
            return
        self._written = as_text(its)

    def _is_ours(self) -> bool:
        try:
            found = (self._folder / FILE).read_text(encoding="utf-8")
        except OSError:
            return True
        ranked = any(rank in os.environ for rank, _ in VARIABLES)
        return found == self._written or (ranked and not self._written)
