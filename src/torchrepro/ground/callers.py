"""Frames of the call stack, and the line of the program that made a call."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

address = id  # the original `id`: torchrepro replaces the built-in to observe who calls it

_MANY = 1000
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    # Also folders of the base Python of a virtual environment, of the user, and of Debian.
    *(folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")),
    "<frozen ",  # Python's import machinery
    str(Path(__file__).parent.parent),  # ours
)
"""Prefixes of the files that do not belong to the program."""


def frames(innermost: FrameType | None = None) -> Iterator[FrameType]:
    """Yield the frame `innermost`, by default the caller's, and then each outer frame."""
    # `_getframe` is documented for CPython; `inspect` takes 100 times as long.
    return _outwards(innermost or sys._getframe(1))  # noqa: SLF001 - see above


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def package(frame: FrameType) -> str:
    """Return the top-level package whose code `frame` runs; empty for code without a module."""
    name = frame.f_globals.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else ""


def is_library(file: str) -> bool:
    """Whether `file` belongs to a library, or to torchrepro, and not to the program."""
    return file.startswith(_LIBRARIES)


def program_files() -> list[str]:
    """Return the files of imported modules that belong to the program, at most 1000."""
    paths = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    files = {path for path in paths if isinstance(path, str) and path.startswith(os.sep)}
    return sorted(file for file in files if not is_library(file))[:_MANY]


def line(frame: FrameType) -> str:
    """Return the current ``file:line`` of `frame`."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def call_text(frame: FrameType) -> str:
    """Return the source text of the call that `frame` makes; empty if it spans several lines."""
    from linecache import getline

    first, last, start, end = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    if first is None or first != last:
        return ""
    return getline(frame.f_code.co_filename, first).encode()[start:end].decode(errors="replace")


def program_line(frame: FrameType) -> str:
    """Return ``file:line`` of the nearest caller in the program, or else of `frame` itself."""
    return line(next((f for f in frames(frame) if not is_library(f.f_code.co_filename)), frame))
