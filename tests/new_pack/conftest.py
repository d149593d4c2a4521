"""Environments into which packs are really installed, on top of the one that runs the tests."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

TIMEOUT = 300
_FOREIGN = ("TORCHREPRO_", "PYTEST_", "HYDRA_", "COV_", "TEST_REPORTS", "PYTHONPATH", "VIRTUAL_ENV")
COMMANDS = ("pip", "pytest", "torchrepro")
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip's odd way to say that isolation is off
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
}
"""Nothing is fetched: hatchling is one of the packages that the tests need."""


class Environment:
    """A virtual environment in which everything can be imported that can be here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        self._see_what_is_here(python)
        for name in COMMANDS:
            self._write_command(name, python)

    def _see_what_is_here(self, python: Path) -> None:
        asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=TIMEOUT)
        here = dict.fromkeys(sysconfig.get_path(each) for each in ("purelib", "platlib"))
        # addsitedir and not the folder itself: it also reads the .pth files that lie there.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in here]
        Path(said.stdout.strip(), "here.pth").write_text("".join(lines), encoding="utf-8")

    def _write_command(self, name: str, python: Path) -> None:
        program = self.folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{python}" -m {name} "$@"\n', encoding="utf-8")
        program.chmod(0o755)

    def run(self, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder `cwd`, and return how it ended and what it said."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        folders = [str(self.folder / "bin"), os.environ["PATH"]]
        return subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env={**kept, **OFFLINE, "PATH": os.pathsep.join(folders)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    def succeed(self, *words: object, cwd: Path) -> str:
        """Run a command that has to end with status 0, and return what it printed."""
        done = self.run(*words, cwd=cwd)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An environment of one test, into which packs can be installed."""
    return Environment(tmp_path / "environment")
