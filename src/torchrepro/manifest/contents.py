"""What a manifest holds, and writing one."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torchrepro.hidden import (
    HIDDEN,
    knob_value,
    secret_values,
    sounds_secret,
    without_secrets,
)
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.manifest.command_line import told
from torchrepro.manifest.hardware import hardware
from torchrepro.manifest.repository import repository
from torchrepro.manifest.versions import software
from torchrepro.seeding import seed_plan
from torchrepro.seeding.calls import seeding_calls

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torchrepro.profile.resolved import Resolved
    from torchrepro.report import Report

FORMAT = 2
RECORDED = tuple(
    sorted(
        {knob.name.removeprefix("env.") for knob in CATALOGUE if knob.name.startswith("env.")}
        | {"CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "WORLD_SIZE"}
    )
)
"""The variables that a manifest may record: those that steer numbers, and never another."""


def manifest(resolved: Resolved, report: Report) -> dict[str, Any]:
    """Return the manifest of a run under `resolved` as plain JSON values, without any secret.

    What the run has done with random numbers so far is part of it: the streams it drew from and
    the places from which it seeded a generator itself.
    """
    secrets = secrets_here(resolved)
    more = {
        "streams": list(seed_plan.drawn()),
        "seeding_calls": [asdict(call) for call in seeding_calls()],
        "command_line": told(sys.orig_argv, secrets),
    }
    return described(resolved, report) | dict(without_secrets(more, secrets))


def described(resolved: Resolved, report: Report) -> dict[str, Any]:
    """Return what a manifest and a lock have in common as plain JSON values, without any secret.

    Asks the libraries that are loaded and no others; never fails because of the machine.
    """
    its = {
        "manifest": FORMAT,
        "profile": _plain(resolved.values),
        "digest": resolved.digest,
        "origins": {key: origin.to_json() for key, origin in resolved.origins.items()},
        "notes": list(resolved.notes),
        "report": report.to_json(),
        "versions": software(),
        "hardware": hardware(),
        "environment": {name: os.environ[name] for name in RECORDED if name in os.environ},
        "repository": repository(),
    }
    cleaned: dict[str, Any] = without_secrets(its, secrets_here(resolved))
    _hide_by_name(cleaned)
    return cleaned


def secrets_here(resolved: Resolved) -> tuple[str, ...]:
    """Return the values that must not leave: in this process's variables and in the profile's."""
    return secret_values({**os.environ, **resolved.environment()})


def write_manifest(path: Path, resolved: Resolved, report: Report) -> None:
    """Write the manifest to `path`, whose folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(manifest(resolved, report)), encoding="utf-8")


def as_text(contents: Mapping[str, Any]) -> str:
    """Return a manifest or a lock as the text of its file: the same for the same contents."""
    return json.dumps(contents, indent=2, sort_keys=True) + "\n"


def _plain(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(dict(values), default=dict))


def _hide_by_name(its: dict[str, Any]) -> None:
    """Leave out the values of variables of the profile's own whose names sound secret."""
    extra = its["profile"].get("env_extra", {})
    for name in filter(sounds_secret, extra):
        extra[name] = HIDDEN
    for row in its["report"]["knobs"]:
        if knob_value(row["knob"], "") == HIDDEN:
            row |= {"before": HIDDEN, "after": HIDDEN, "why": ""}
    for key, origin in its["origins"].items():
        if key.startswith("env_extra.") and sounds_secret(key.removeprefix("env_extra.")):
            origin |= {"set_by": origin["set_by"].partition("=")[0], "replaced": []}
