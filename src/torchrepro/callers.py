"""Which code, and which line of the program, a call came from."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

address = id
"""The function itself, and quick: another may stand in for it among the built-in ones."""

_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
_OWN = str(Path(__file__).parent)
_LIBRARIES = (*_PATHS, "<frozen ")  # the last is Python's import machinery


def package(frame: FrameType) -> str:
    """Return the top-level package whose code `frame` runs; empty for code of no module."""
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_library(file: str) -> bool:
    """Whether code of `file` is a library's, or torchrepro's own, and not the program's."""
    return file.startswith(_LIBRARIES) or file.startswith(_OWN)


def program_place(frame: FrameType) -> str:
    """Return ``file:line`` of the nearest caller that is the program's, or of `frame`."""
    caller: FrameType | None = frame
    while caller is not None and is_library(caller.f_code.co_filename):
        caller = caller.f_back
    found = caller or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"


def place(frame: FrameType) -> str:
    """Return ``file:line`` of the nearest caller that is no library, or of `frame` if all are."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith(_LIBRARIES):
        caller = caller.f_back
    found = caller or frame
    return f"{found.f_code.co_filename}:{found.f_lineno}"
