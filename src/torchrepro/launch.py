"""Start a command under a profile, and find out that this process was started under one."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import ApplyError, Problem, ProfileError
from torchrepro.profile.resolved import Resolved

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROFILE = "TORCHREPRO_PROFILE"
"""Variable that carries the resolved profile, as JSON, to every process below `run`."""

FIRST = "TORCHREPRO_FIRST"
"""Variable that holds the process id of the command itself, which alone prints a summary."""

BOOT = Path(__file__).parent / "boot"
"""Folder whose sitecustomize puts the profile in force as a Python process starts."""

_PYTHON = re.compile(r"(python|pypy)[0-9.]*[dmtu]*")
_UNREACHABLE = {
    "I": "isolated mode ignores PYTHONPATH",
    "E": "PYTHON variables are ignored",
    "S": "sitecustomize is not loaded",
}
_WRAPPERS = frozenset(
    "env ionice nice nohup numactl setsid srun stdbuf taskset time timeout xvfb-run".split()
)
_WITH_ARGUMENT = "WX"
_END_OF_OPTIONS = "cm"


def inherited() -> Resolved | None:
    """Return the profile under which `torchrepro run` started this process, if it did."""
    text = os.environ.get(PROFILE)
    return _parsed(text) if text else None


@lru_cache(maxsize=4)
def _parsed(text: str) -> Resolved:
    return Resolved.of(json.loads(text))


def environment_for(resolved: Resolved, environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with all that puts `resolved` in force in a process and its children."""
    python_path = os.pathsep.join(filter(None, [str(BOOT), environment.get("PYTHONPATH", "")]))
    return {
        **environment,
        **resolved.environment(),
        "PYTHONPATH": python_path,
        PROFILE: json.dumps(dict(resolved.values), sort_keys=True, default=dict),
        FIRST: str(os.getpid()),
    }


def start(resolved: Resolved, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process by `command` under `resolved`; does not return.

    Raises `ProfileError` for a command that is not there, and `ApplyError` for one whose Python
    would not take the profile.
    """
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise ProfileError(
            Problem("no such command", found=command[0], todo="check its name and PATH")
        )
    barrier = unreachable(program, command)
    if barrier:
        raise ApplyError(f"the profile cannot reach `{' '.join(command)}`: {barrier}")
    os.execve(program, list(command), environment_for(resolved, environment))  # noqa: S606


def unreachable(program: str, command: Sequence[str]) -> str:
    """Return why a Python started by `command` would not take a profile, or an empty string."""
    wrapped = Path(command[0]).name in _WRAPPERS
    for position, word in enumerate(command if wrapped else command[:1]):
        if _PYTHON.fullmatch(Path(word).name):
            return _ignoring(command[position + 1 :])
    shebang = _shebang(Path(program))
    for position, word in enumerate(shebang):
        if _PYTHON.fullmatch(Path(word).name):
            return _ignoring(shebang[position + 1 :])
    return ""


def _ignoring(options: Sequence[str]) -> str:
    """Return the first interpreter option in `options` that keeps sitecustomize out, in words."""
    words = iter(options)
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return ""
        if word.startswith("--"):
            continue
        for position, letter in enumerate(word[1:], start=2):
            if letter in _UNREACHABLE:
                return f"Python's option -{letter}: {_UNREACHABLE[letter]}"
            if letter in _END_OF_OPTIONS:
                return ""
            if letter in _WITH_ARGUMENT:
                if position == len(word):
                    next(words, None)
                break
    return ""


def _shebang(program: Path) -> list[str]:
    try:
        with program.open("rb") as file:
            line = file.readline(512)
    except OSError:
        return []
    return line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
