"""Manifests and locks, read back from their files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.manifest.contents import FORMAT
from torchrepro.messages import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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
