"""The git commit that a program is of, and whether its files have changed since."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from torchrepro.hidden import HIDDEN, ordinary, url_without_login

TIMEOUT = 2.0
"""Seconds that git may take for an answer; a manifest is written while a job starts."""

_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
_RUN_NOTHING = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules")
_DIFF = ("diff", "HEAD", "--no-ext-diff", "--no-textconv", "--ignore-submodules")


def repository() -> dict[str, Any]:
    """Return commit, number of changed files, digest of the changes, and where it came from.

    The working tree is that of the program's script, or the one this process is in. Files that git
    does not track count as no change, because runs write such files. Where git has no answer there
    is one key, ``unknown``, with the reason. Runs the git program once per process and folder; it
    writes nothing, and is kept from hooks, file monitors and external diffs
    (https://git-scm.com/docs/git#_environment_variables).
    """
    return dict(_repository(_folder()))


def _folder() -> str:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    place = Path(script).absolute().parent if script else None
    installed = place is not None and place.is_relative_to(sys.prefix)
    return str(place) if place is not None and not installed else str(Path.cwd())


@cache
def _repository(folder: str) -> dict[str, Any]:
    try:
        status = _git(folder, *_STATUS).decode(errors="replace").splitlines()
        heads = dict(line[2:].partition(" ")[::2] for line in status if line.startswith("# "))
        changed = sum(not line.startswith("#") for line in status)
        found = {"commit": heads.get("branch.oid", ""), "changed_files": changed}
        if changed:
            found["changes"] = hashlib.sha256(_git(folder, *_DIFF)).hexdigest()[:16]
        return {**found, "remotes": _remotes(folder)}
    except subprocess.TimeoutExpired:
        return {"unknown": f"git took longer than {TIMEOUT:g} s"}
    except FileNotFoundError:
        return {"unknown": "git is not installed"}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {"unknown": _reason(error)}


def _git(folder: str, *words: str) -> bytes:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(  # noqa: S603 - the words are those above
        ["git", *_RUN_NOTHING, "-C", folder, *words],  # noqa: S607 - the git that the user has
        env={**environment, **_QUIET},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TIMEOUT,
        check=True,
    ).stdout


def _remotes(folder: str) -> list[str]:
    """Return the URLs that the repository is fetched from, without what logs in there."""
    lines = _git(folder, "remote", "-v").decode(errors="replace").splitlines()
    urls = {line.split("\t")[1].removesuffix(" (fetch)") for line in lines if "(fetch)" in line}
    return sorted(_shown(url) for url in urls)


def _shown(url: str) -> str:
    if "://" in url:
        return url_without_login(url)
    place = url.rpartition("@")[2]  # as in user@host:path
    return place if ordinary(place) else HIDDEN


def _reason(error: Exception) -> str:
    """Return why git did not answer, in words that hold nothing of what it said."""
    said = getattr(error, "stderr", b"") or b""
    if b"not a git repository" in said:
        return "not in a git repository"
    if b"dubious ownership" in said:
        return "git does not trust the repository: another user owns it"
    return f"git failed ({type(error).__name__})"
