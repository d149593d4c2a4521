"""Which code, and which line of the program, a call came from."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

address = id  # the function itself, and quick: another may stand in for it among the built-in ones

_MANY = 1000
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    # Also those of a Python below this environment, of the user, and Debian's.
    *(each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")),
    "<frozen ",  # Python's import machinery
    str(Path(__file__).parent.parent),  # ours
)
"""Beginnings of the files that are not the program's."""


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
    return file.startswith(_LIBRARIES)


def program_files() -> list[str]:
    """Return the files of the modules that the program has imported and that are no library's."""
    modules = [getattr(each, "__file__", None) for each in [*sys.modules.values()]]
    files = {file for file in modules if isinstance(file, str) and file.startswith(os.sep)}
    return sorted(file for file in files if not is_library(file))[:_MANY]


def line(frame: FrameType) -> str:
    """Return the ``file:line`` that `frame` runs."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def call_text(frame: FrameType) -> str:
    """Return the text of the call that `frame` makes; empty if it has several lines, or none."""
    from linecache import getline

    first, last, start, end = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    if first is None or first != last:
        return ""
    return getline(frame.f_code.co_filename, first).encode()[start:end].decode(errors="replace")


def program_place(frame: FrameType) -> str:
    """Return ``file:line`` of the nearest caller that is the program's, or of `frame`."""
    return line(next((f for f in frames(frame) if not is_library(f.f_code.co_filename)), frame))
