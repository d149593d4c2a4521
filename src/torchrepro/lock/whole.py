"""Locks that are whole: with every part, and as they were written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.hidden import HIDDEN
from torchrepro.manifest.reading import read_contents
from torchrepro.messages import Problem, some
from torchrepro.profile.resolved import Resolved

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PARTS: Mapping[str, tuple[str, ...]] = {
    "named": ("profile", "overrides"),
    "profile": (),
    "digest": (),
    "origins": (),
    "notes": (),
    "report": ("knobs",),
    "versions": ("python", "torch"),
    "hardware": ("system", "machine", "cpu", "threads"),
    "environment": (),
    "repository": (),
    "manifest": (),
}
"""Every part that a lock is written with, and what is in it on every machine."""

AGAIN = "lock again: torchrepro lock PROFILE -o FILE"


def read_whole(path: Path) -> tuple[str, dict[str, Any]]:
    """Return what `read_contents` does; a lock that is damaged is refused.

    Raises `ProfileError` for a lock without one of `PARTS`: it would hold a run to less than it
    was written for.
    """
    kind, contents = read_contents(path)
    if kind == "lock":
        _refuse_damaged(str(path), contents)
    return kind, contents


def true_digest(contents: Mapping[str, Any]) -> str | None:
    """Return the digest of the profile that a lock holds; None where some of it is hidden."""
    profile = contents["profile"]
    return None if HIDDEN in json.dumps(profile) else Resolved.of(profile).digest


def _refuse_damaged(name: str, contents: Mapping[str, Any]) -> None:
    lacking = list(_lacking(contents))
    if lacking:
        what = f"damaged: parts of it are not there: {some(lacking)}"
        raise ProfileError(Problem(what, name, todo=AGAIN))


def _lacking(contents: Mapping[str, Any]) -> Iterator[str]:
    for part, inner in PARTS.items():
        if part not in contents:
            yield part
        elif isinstance(contents[part], dict):
            yield from (f"{part}.{key}" for key in inner if key not in contents[part])
