"""What a manifest holds; writing one, and reading it back."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.manifest.environment import VARIABLES, hardware, repository, software
from torchrepro.messages import Problem
from torchrepro.profile.resolved import plain
from torchrepro.redaction import secret_values, shareable, without_secrets
from torchrepro.seeding import streams
from torchrepro.seeding.seeding_calls import seeding_calls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omegaconf import DictConfig

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.report import Report


FORMAT = 2
FILE = "repro.json"
"""What the file of a manifest is called, wherever it is kept."""

RECORDED = tuple(
    sorted(
        {knob.name.removeprefix("env.") for knob in CATALOGUE if knob.name.startswith("env.")}
        | {row.name for row in VARIABLES}
    )
)
"""The variables that a manifest may record: those that steer numbers, and never another.

Those of the catalogue are knobs; the others have their reasons in `VARIABLES`.
"""


def manifest(resolved: ResolvedProfile, report: Report) -> dict[str, Any]:
    """Return the manifest of a run under `resolved` as plain JSON values, without any secret.

    What the run has done with random numbers so far is part of it: the streams it drew from and
    the places from which it seeded a generator itself.
    """
    secrets = secrets_here(resolved)
    more = {
        "streams": list(streams.drawn_streams()),
        "seeding_calls": [asdict(call) for call in seeding_calls()],
        "command_line": shareable(sys.orig_argv, secrets),
    }
    cleaned: dict[str, Any] = without_secrets(_gathered(resolved, report) | more, secrets)
    return cleaned


def common_contents(resolved: ResolvedProfile, report: Report) -> dict[str, Any]:
    """Return what a manifest and a lock have in common as plain JSON values, without any secret.

    Asks the libraries that are loaded and no others; never fails because of the machine.
    """
    cleaned: dict[str, Any] = without_secrets(_gathered(resolved, report), secrets_here(resolved))
    return cleaned


def _gathered(resolved: ResolvedProfile, report: Report) -> dict[str, Any]:
    return {
        "manifest": FORMAT,
        "profile": plain(resolved.values),
        "digest": resolved.digest,
        "origins": {key: origin.to_json() for key, origin in resolved.origins.items()},
        "notes": [],  # none since a profile is of one schema only; a lock has every part
        "report": report.to_json(),
        "versions": software(),
        "hardware": hardware(),
        "environment": {name: os.environ[name] for name in RECORDED if name in os.environ},
        "repository": repository(),
    }


def secrets_here(*profiles: ResolvedProfile) -> tuple[str, ...]:
    """Return the values that must not leave: in this process's variables and in the profiles'."""
    of_each = [os.environ, *(resolved.environment() for resolved in profiles)]
    found = {value for variables in of_each for value in secret_values(variables)}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def write_manifest(folder: Path, contents: Mapping[str, Any]) -> Path:
    """Write a manifest into `folder`, which is made if it is not there, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_text(as_text(contents), encoding="utf-8")
    return path


def as_text(contents: Mapping[str, Any]) -> str:
    """Return a manifest or a lock as the text of its file: the same for the same contents."""
    return json.dumps(contents, indent=2, sort_keys=True) + "\n"


LARGEST = 16 * 2**20
"""Bytes above which a file is no manifest."""

DEEPEST = 40
"""Levels of nesting above which a file is no manifest."""

KINDS: Mapping[str, int] = {"lock": 1, "manifest": FORMAT}
"""What such a file may be, told by the key that holds its format, and the newest format known."""


def read_contents(path: Path) -> tuple[str, dict[str, Any]]:
    """Return what the file is, ``lock`` or ``manifest``, and what it holds.

    Raises `ProfileError` for a file that is neither, or of a newer format.
    """
    contents = _json(path)
    kind = next((kind for kind in KINDS if kind in contents), "")
    if not kind or not isinstance(contents.get("profile"), dict):
        raise ProfileError(
            Problem(
                "neither a manifest nor a lock: it holds no `profile`",
                str(path),
                todo="name a manifest (.hydra/repro.json) or write a lock: torchrepro lock "
                "PROFILE -o FILE",
            )
        )
    for key in KINDS:
        _check_format(key, contents.get(key, KINDS[key]), path)
    return kind, contents


def _check_format(kind: str, found: Any, path: Path) -> None:
    newest = KINDS[kind]
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ProfileError(
            Problem("no format", str(path), kind, str(found)[:80], legal=f"1 to {newest}")
        )
    if found > newest:
        raise ProfileError(
            Problem(
                f"a {kind} of a newer format",
                str(path),
                kind,
                str(found),
                legal=f"1 to {newest}",
                todo="upgrade torchrepro",
            )
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST:
            raise ProfileError(Problem("too large for a manifest or a lock", str(path)))
        contents = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(Problem(f"cannot be read: {error.strerror}", str(path))) from None
    except RecursionError:
        raise ProfileError(Problem("nested too deep", str(path))) from None
    except ValueError as error:
        raise ProfileError(Problem(f"not JSON: {error}", str(path))) from None
    if _too_deep(contents):
        raise ProfileError(Problem("nested too deep", str(path)))
    return contents if isinstance(contents, dict) else {}


def _too_deep(value: Any) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(DEEPEST):
        level = [
            entry
            for each in level
            for entry in (each.values() if isinstance(each, dict) else each)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return False
    return True


_IF_HYDRA_WRITES_NOTHING = ".hydra"


def hydra_folder(config: DictConfig) -> Path:
    """Return the folder in which Hydra keeps the config of a job, of which `config` is its part.

    See https://hydra.cc/docs/configure_hydra/intro (hydra.runtime.output_dir, output_subdir).
    """
    subdir = config.output_subdir or _IF_HYDRA_WRITES_NOTHING
    return Path(config.runtime.output_dir) / subdir
