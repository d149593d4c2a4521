"""Writing a lock, reading it back whole, and the name of the profile in it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.imports import import_torch
from torchrepro.manifest.contents import (
    FORMAT,
    as_text,
    common_contents,
    read_contents,
    secrets_here,
)
from torchrepro.messages import some
from torchrepro.planner import Plan, make_plan
from torchrepro.profile.load import resolve
from torchrepro.profile.overrides import key_of
from torchrepro.profile.resolved import ResolvedProfile
from torchrepro.profile.search_path import SUFFIXES
from torchrepro.redaction import HIDDEN, without_secrets

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.report import Report


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


def read_whole(path: Path) -> tuple[str, dict[str, Any]]:
    """Return what `read_contents` does; a lock that is damaged is refused.

    Raises `ProfileError` for a lock without one of `PARTS`: it would forbid less than it was
    written to forbid.
    """
    kind, contents = read_contents(path)
    lacking = list(_lacking(contents)) if kind == "lock" else []
    if lacking:
        raise ProfileError.about(
            f"damaged: these parts are missing: {some(lacking)}",
            str(path),
            todo="lock again: torchrepro lock PROFILE -o FILE",
        )
    return kind, contents


def true_digest(contents: Mapping[str, Any]) -> str | None:
    """Return the digest of the profile in a lock; None where a part of it was redacted."""
    profile = contents["profile"]
    return None if HIDDEN in json.dumps(profile) else ResolvedProfile.of(profile).digest


def _lacking(contents: Mapping[str, Any]) -> Iterator[str]:
    for part, inner in PARTS.items():
        if part not in contents:
            yield part
        elif isinstance(contents[part], dict):
            yield from (f"{part}.{key}" for key in inner if key not in contents[part])


def named_in(lock: Path, named: Any) -> tuple[str, list[str]]:
    """Return the profile and the overrides that `lock` names, as they are found from here.

    Raises `ProfileError` if it does not name them.
    """
    its = named if isinstance(named, dict) else {}
    profile, overrides = its.get("profile"), its.get("overrides")
    given: list[Any] = overrides if isinstance(overrides, list) else [None]
    if not (isinstance(profile, str) and profile and all(isinstance(o, str) for o in given)):
        raise ProfileError.about("damaged: it does not name its profile", str(lock), "named")
    return (str(lock.parent / profile) if _is_relative_path(profile) else profile), given


def refuse_lost_file(profile: str) -> None:
    """Raise `ProfileError` for the path of a profile at which there is no file."""
    if profile.endswith(SUFFIXES) and "://" not in profile and not os.path.exists(profile):  # noqa: PTH110 - never raises
        raise ProfileError.about(
            "the profile's file does not exist", found=os.path.normpath(profile)
        )


def _is_relative_path(profile: str) -> bool:
    is_path = profile.endswith(SUFFIXES) or profile.startswith(("./", "../"))
    return is_path and "://" not in profile and not os.path.isabs(profile) and profile[0] != "~"  # noqa: PTH117 - the text of a name


def write_lock(path: Path, profile: str, overrides: Sequence[str]) -> Report:
    """Write what a run of `profile` would be here, and return the report on it.

    Imports torch and applies nothing. Raises `ProfileError` for a profile that is not valid, an
    override that holds a secret, and a file that cannot be written or is no lock. Raises
    `ApplyError` if a strict profile could not be applied here.
    """
    _refuse_another_file(path)
    resolved = resolve(profile, overrides)
    _refuse_secrets(resolved, overrides)
    named = {"profile": _relative_to_lock(path, profile), "overrides": list(overrides)}
    plan = plan_of_a_run(resolved)
    plan.refuse_if_stopping()
    its = common_contents(resolved, plan.report)
    for row in its["report"]["knobs"]:
        del row["before"]  # the state of this process, such as a random seed
    text = as_text({"lock": FORMAT, "named": named, **its})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProfileError.about(
            f"the lock cannot be written: {error.strerror}",
            found=str(path),
            todo="name another file: --output FILE",
        ) from None
    return plan.report


def _relative_to_lock(lock: Path, profile: str) -> str:
    """Return `profile` as the file `lock` names it: a relative path from the lock's own folder."""
    if not _is_relative_path(profile):
        return profile
    try:
        return Path(os.path.relpath(profile, lock.parent)).as_posix()
    except ValueError:  # another drive of Windows has no relative path
        return str(Path(profile).absolute())


def plan_of_a_run(resolved: ResolvedProfile) -> Plan:
    """Return the plan for a run of `resolved` that `torchrepro run` starts here; imports torch."""
    import_torch()
    return make_plan(resolved, closed={})


def _refuse_secrets(resolved: ResolvedProfile, overrides: Sequence[str]) -> None:
    """Raise `ProfileError` for an override with a secret, which the lock would show."""
    secrets = secrets_here(resolved)
    for text in overrides:
        if without_secrets(text, secrets) != text:
            raise ProfileError.about(
                "an override that may hold a secret, and a lock is shared",
                key=key_of(text),
                todo="put it into the environment of the run instead",
            )


def _refuse_another_file(path: Path) -> None:
    """Raise `ProfileError` if another file than a lock would be overwritten."""
    if not path.exists():
        return
    try:
        kind = read_contents(path)[0]
    except ProfileError:
        kind = ""
    if kind != "lock" and (path.is_dir() or path.stat().st_size):
        raise ProfileError.about(
            "exists already and is not a lock",
            found=str(path),
            todo="name another file, or remove it",
        )
