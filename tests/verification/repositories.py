"""Git repositories of small programs, as users have them."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

AUTHOR = ("-c", "user.name=A", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")


def git(folder: Path, *words: str) -> str:
    """Run git as its user types it, without the settings of this machine."""
    environment = {name: its for name, its in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", *AUTHOR, *words],
        cwd=folder,
        env={**environment, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files by their path in a folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def commit(folder: Path, files: dict[str, str], message: str = "work") -> str:
    """Write files, commit all that is not ignored, and return the commit."""
    folder.mkdir(exist_ok=True)
    write(folder, files)
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", message)
    return git(folder, "rev-parse", "HEAD")
