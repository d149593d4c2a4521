"""Start a command with a profile in force from before it begins."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import ApplyError, Problem, ProfileError
from torchrepro.hidden import secret_values
from torchrepro.manifest.command_line import shareable
from torchrepro.planner import Plan, make_plan, observe, refusal
from torchrepro.process import PROFILE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrepro.profile.resolved import Resolved

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
_WRAPPERS = (
    *("env", "ionice", "nice", "nohup", "numactl", "setsid", "srun", "stdbuf"),
    *("taskset", "time", "timeout", "xvfb-run"),
)
_WITH_ARGUMENT = "WX"
_END_OF_OPTIONS = "cm"
_CARRIERS = ("PYTHONPATH", PROFILE)


def environment_for(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with all that puts the plan's profile in force in a process below.

    Variables that the user exported are kept where the plan keeps them. Raises `ApplyError` if
    a strict profile meets one that contradicts it.
    """
    if plan.stopping:
        raise ApplyError(refusal(plan.resolved, plan.stopping), plan.report)
    python_path = os.pathsep.join(filter(None, [str(BOOT), environment.get("PYTHONPATH", "")]))
    return {
        **environment,
        **plan.variables,
        "PYTHONPATH": python_path,
        PROFILE: json.dumps(plan.resolved.to_json(), sort_keys=True),
        FIRST: str(os.getpid()),
    }


def start(resolved: Resolved, command: Sequence[str], more: Mapping[str, str]) -> None:
    """Replace this process by `command` under `resolved`, with `more` variables; does not return.

    Raises `ProfileError` for a command that is not there, and `ApplyError` for one whose Python
    would not take the profile, or for an exported variable that contradicts a strict one.
    """
    program, environment = prepared(resolved, command)
    try:
        os.execve(program, list(command), {**environment, **more})  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise ProfileError(Problem(f"cannot be started: {error.strerror}", found=program)) from None


def prepared(resolved: Resolved, command: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the program that `command` names, and the environment that puts `resolved` in force.

    Raises as `start` does.
    """
    program = shutil.which(command[0])
    if program is None:
        raise ProfileError(
            Problem(
                "not an executable file" if Path(command[0]).exists() else "no such command",
                found=command[0],
                todo="check its name and PATH",
            )
        )
    barrier = unreachable(program, command)
    if barrier:
        shown = " ".join(shareable(command, secret_values(os.environ)))
        raise ApplyError(f"the profile cannot reach `{shown}`: {barrier}")
    before_python_starts = make_plan(resolved, observe(resolved, closed={}))
    return program, environment_for(before_python_starts, os.environ)


def unreachable(program: str, command: Sequence[str]) -> str:
    """Return why a Python started by `command` would not take a profile, or an empty string."""
    if Path(command[0]).name == "env" and _drops_the_environment(command[1:]):
        return "`env` takes the variables away that carry it"
    if Path(command[0]).name not in _WRAPPERS:
        return _barrier(command, program)
    for position, word in enumerate(command[1:], start=1):
        inner = shlex.split(word) if command[position - 1] in ("-S", "--split-string") else [word]
        started = shutil.which(inner[0]) if inner and not word.startswith("-") else None
        if started:
            return unreachable(started, [*inner, *command[position + 1 :]])
    return ""


def _drops_the_environment(options: Sequence[str]) -> bool:
    for position, word in enumerate(options):
        following = options[position + 1] if position + 1 < len(options) else ""
        if word in ("-", "-i", "--ignore-environment"):
            return True
        if word in ("-u", "--unset") and following in _CARRIERS:
            return True
        if word.removeprefix("--unset=").removeprefix("-u") in _CARRIERS:
            return True
        if not word.startswith("-") and "=" not in word and options[position - 1] != "-u":
            return False
    return False


def _barrier(command: Sequence[str], program: str) -> str:
    """Return what keeps a profile from a command that is a Python, or a script of one."""
    if _PYTHON.fullmatch(Path(command[0]).name):
        return _ignoring(command[1:])
    shebang = _shebang(Path(program or shutil.which(command[0]) or ""))
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
