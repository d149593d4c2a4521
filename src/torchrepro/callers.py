"""Which code, and which line of the program, a call came from."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

address = id
"""The function itself, and quick: another may stand in for it among the built-in ones."""

_PATHS = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
_OWN = str(Path(__file__).parent)
_LIBRARIES = (*_PATHS, "<frozen ")  # the last is Python's import machinery


def frames(innermost: FrameType | None = None) -> Iterator[FrameType]:
    """Return `innermost` and the frames that called it, outwards; without it, the caller's own."""
    # Documented, if only for CPython; `inspect` takes 100 times as long.
    return _outwards(innermost or sys._getframe(1))  # noqa: SLF001 - see above


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def package(frame: FrameType) -> str:
    """Return the top-level package whose code `frame` runs; empty for code of no module."""
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_library(file: str) -> bool:
    """Whether code of `file` is a library's, or torchrepro's own, and not the program's."""
    return file.startswith(_LIBRARIES) or file.startswith(_OWN)


def line(frame: FrameType) -> str:
    """Return the ``file:line`` that `frame` runs."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def program_place(frame: FrameType) -> str:
    """Return ``file:line`` of the nearest caller that is the program's, or of `frame`."""
    return line(next((f for f in frames(frame) if not is_library(f.f_code.co_filename)), frame))


def place(frame: FrameType) -> str:
    """Return ``file:line`` of the nearest caller that is no library, or of `frame` if all are."""
    callers = (f for f in frames(frame) if not f.f_code.co_filename.startswith(_LIBRARIES))
    return line(next(callers, frame))
