"""How a profile's variables are written for what starts a program: a shell, a container, a job.

A format is a row: its name, and a function from variables to text. Each text gives the program the
very values; a value that a format has no way to write is refused.
"""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _in_shell(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())


def _in_dotenv(variables: Mapping[str, str]) -> str:
    """Return lines whose quotes keep every reader of such files, a shell too, from replacing."""
    lines = []
    for name, value in variables.items():
        if any(letter in value for letter in "'\\") or not value.isprintable():
            what = "a character that programs read differently in .env files"
            raise _unwritable(name, value, what)
        plain = all(letter.isalnum() or letter in "_-.,:;/+@%=[]" for letter in value)
        lines.append(f'{name}="{value}"\n' if plain else f"{name}='{value}'\n")
    return "".join(lines)


def _in_docker(variables: Mapping[str, str]) -> str:
    """Return the lines of a file for `docker run --env-file`, which takes quotes as they are.

    https://docs.docker.com/reference/cli/docker/container/run/#env
    """
    for name, value in variables.items():
        if len(value.splitlines()) > 1 or value.endswith(("\n", "\r")):
            raise _unwritable(name, value, "a line end, which an --env-file has no way to write")
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _in_slurm(variables: Mapping[str, str]) -> str:
    """Return lines for a job script, to stand after its #SBATCH lines.

    A value with a comma is cut in `--export=NAME=value`, and `srun` starts its tasks without the
    script's own variables under `--export=NONE`: https://slurm.schedmd.com/srun.html.
    """
    return _in_shell(variables) + "export SLURM_EXPORT_ENV=ALL\n"


def _in_k8s(variables: Mapping[str, str]) -> str:
    """Return the `env` list of a container in a pod's YAML, in which `$$` stands for `$`.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables
    """
    lines = ["env:\n"]
    for name, value in variables.items():
        quoted = json.dumps(value.replace("$", "$$"), ensure_ascii=False)
        # JSON's own escapes would not do for the rest: YAML has no surrogate pairs, and takes
        # U+0085, U+2028 and U+2029 for ends of a line.
        text = "".join(c if c.isprintable() else f"\\U{ord(c):08X}" for c in quoted)
        lines.append(f"  - name: {name}\n    value: {text}\n")
    return "".join(lines)


def _in_json(variables: Mapping[str, str]) -> str:
    return json.dumps(dict(variables), indent=2, ensure_ascii=False) + "\n"


def _unwritable(name: str, value: str, what: str) -> ProfileError:
    todo = "use --format sh or --format json"
    return ProfileError.about(what, key=name, found=shown(value), todo=todo)


class EnvFormat(StrEnum):
    """What is to read the variables."""

    SH = "sh"
    DOTENV = "dotenv"
    JSON = "json"
    DOCKER = "docker"
    SLURM = "slurm"
    K8S = "k8s"


_WRITERS: dict[EnvFormat, Callable[[Mapping[str, str]], str]] = {
    EnvFormat.SH: _in_shell,
    EnvFormat.DOTENV: _in_dotenv,
    EnvFormat.JSON: _in_json,
    EnvFormat.DOCKER: _in_docker,
    EnvFormat.SLURM: _in_slurm,
    EnvFormat.K8S: _in_k8s,
}


def written(variables: Mapping[str, str], form: EnvFormat) -> str:
    """Return `variables` in the format `form`; raises `ProfileError` for a value it cannot hold."""
    return _WRITERS[form](variables)
