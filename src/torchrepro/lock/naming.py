"""How a lock names its profile, so that it is found from wherever the lock is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem
from torchrepro.profile.folder import SUFFIXES


def from_its_lock(lock: Path, profile: str) -> str:
    """Return `profile` as the file `lock` names it: a relative path from the lock's own folder."""
    if not _is_relative_path(profile):
        return profile
    try:
        return Path(os.path.relpath(profile, lock.parent)).as_posix()
    except ValueError:  # on another drive of Windows there is no way from one to the other
        return str(Path(profile).absolute())


def named_in(lock: Path, named: Any) -> tuple[str, list[str]]:
    """Return the profile and the overrides that `lock` names, as they are found from here.

    Raises `ProfileError` if it does not name them.
    """
    its = named if isinstance(named, dict) else {}
    profile, overrides = its.get("profile"), its.get("overrides")
    texts = isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)
    if not isinstance(profile, str) or not profile or not isinstance(overrides, list) or not texts:
        raise ProfileError(
            Problem("damaged: it does not say of which profile it is", str(lock), "named")
        )
    return (str(lock.parent / profile) if _is_relative_path(profile) else profile), overrides


def refuse_lost(profile: str) -> None:
    """Raise `ProfileError` for the path of a profile at which there is no file."""
    if profile.endswith(SUFFIXES) and "://" not in profile and not os.path.exists(profile):  # noqa: PTH110 - never raises
        raise ProfileError(
            Problem("the profile's file is not there", found=os.path.normpath(profile))
        )


def _is_relative_path(profile: str) -> bool:
    is_path = profile.endswith(SUFFIXES) or profile.startswith(("./", "../"))
    return is_path and "://" not in profile and not os.path.isabs(profile) and profile[0] != "~"  # noqa: PTH117 - the text of a name
