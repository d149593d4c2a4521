"""What a manifest holds, and writing one."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchrepro.hidden import secret_values, without_secrets
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.manifest.command_line import shareable
from torchrepro.manifest.hardware import hardware
from torchrepro.manifest.repository import repository
from torchrepro.manifest.variables import VARIABLES
from torchrepro.manifest.versions import software
from torchrepro.profile.resolved import plain
from torchrepro.seeding import seed_plan
from torchrepro.seeding.calls import seeding_calls

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torchrepro.profile.resolved import Resolved
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


def manifest(resolved: Resolved, report: Report) -> dict[str, Any]:
    """Return the manifest of a run under `resolved` as plain JSON values, without any secret.

    What the run has done with random numbers so far is part of it: the streams it drew from and
    the places from which it seeded a generator itself.
    """
    secrets = secrets_here(resolved)
    more = {
        "streams": list(seed_plan.drawn()),
        "seeding_calls": [asdict(call) for call in seeding_calls()],
        "command_line": shareable(sys.orig_argv, secrets),
    }
    cleaned: dict[str, Any] = without_secrets(_gathered(resolved, report) | more, secrets)
    return cleaned


def common_contents(resolved: Resolved, report: Report) -> dict[str, Any]:
    """Return what a manifest and a lock have in common as plain JSON values, without any secret.

    Asks the libraries that are loaded and no others; never fails because of the machine.
    """
    cleaned: dict[str, Any] = without_secrets(_gathered(resolved, report), secrets_here(resolved))
    return cleaned


def _gathered(resolved: Resolved, report: Report) -> dict[str, Any]:
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


def secrets_here(*profiles: Resolved) -> tuple[str, ...]:
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
