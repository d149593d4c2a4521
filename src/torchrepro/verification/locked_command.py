"""A command whose numbers a lock holds: what it is, how it is run, and which files it read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.launch import is_python
from torchrepro.manifest.contents import secrets_here
from torchrepro.redaction import shareable
from torchrepro.trace.request import LEVELS, Request
from torchrepro.verification import file_notes
from torchrepro.verification.copies import CopyError, repository_root
from torchrepro.verification.perturbations import RunEnvironment
from torchrepro.verification.repository_files import FilesRead, files_read
from torchrepro.verification.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verification.result import Run


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run, and what it noted of its files."""

    run: Run
    log: Path
    began: float


@dataclass(frozen=True, slots=True)
class LockedCommand:
    """What is run for its numbers: they stand in the lock, and `check` takes them from there."""

    command: tuple[str, ...]
    folder: Path
    """Where it is started."""
    root: Path | None
    """The root of its repository."""
    steps: tuple[int, int] | None = None
    every: int = 1

    @classmethod
    def here(
        cls, command: Sequence[str], steps: tuple[int, int] | None = None, every: int = 1
    ) -> LockedCommand:
        """Return what is asked for in this folder."""
        folder = Path.cwd()
        return cls(tuple(command), folder, repository_root(folder), steps, every)

    def to_json(self) -> dict[str, Any]:
        """Return it as a lock holds it: the interpreter's path is not part of the command."""
        words = shareable(self.command, secrets_here())
        inside = self.folder.relative_to(self.root) if self.root else Path()
        return {
            "command": [*(["python"] if is_python(words[0]) else words[:1]), *words[1:]],
            "folder": inside.as_posix(),
            "steps": list(self.steps) if self.steps else None,
            "every": self.every,
        }

    def runner(self, output: Path, say: Any, meanwhile: Any) -> Runner:
        """Return what runs it, recorded at the coarsest level."""
        request = Request("", LEVELS[0], self.steps)
        return Runner(self.command, output, request, None, say, meanwhile)

    def run(self, runner: Runner, resolved: ResolvedProfile, name: str) -> Recorded:
        """Run it once; raises what `Runner.run` does, and `TraceError` if it holds no numbers."""
        log, began = runner.folder / f"{name}.files", time.time()
        noting = file_notes.variables(self.root, log) if self.root else {}
        run = runner.run(resolved, name, RunEnvironment(variables=noting))
        return Recorded(run, log, began)

    def files_of(self, its: Recorded, resolved: ResolvedProfile) -> FilesRead:
        """Return the files that a run read; raises `CopyError` where that cannot be known."""
        if self.root is None:
            raise CopyError("git finds no repository here")
        words = [Path(word) for word in self.command]
        origins = (each.to_json()["set_by"] for each in resolved.origins.values())
        profiles = [Path(origin.rpartition(":")[0]) for origin in origins]
        return files_read(self.root, its.log, its.began, [*words, *profiles])
