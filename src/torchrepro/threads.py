"""Which other threads run torch: a policy is in force for them as well."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from torchrepro.callers import package

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def other_threads_in_torch() -> list[str]:
    """Return the names of the other Python threads whose code uses torch at this moment."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    # Private by its name only: documented, and the one way to see what a thread is doing.
    running = sys._current_frames()  # noqa: SLF001 - see above
    return [
        thread.name
        for thread in threading.enumerate()
        if thread is not threading.current_thread()
        and _uses(torch, list(_stack(running.get(thread.ident or 0))))
    ]


def _uses(torch: Any, stack: list[FrameType]) -> bool:
    """Whether a stack shows a program that uses torch, rather than a thread of torch's own."""
    packages = [package(frame) for frame in stack]
    of_program = [
        frame
        for frame, owner in zip(stack, packages, strict=True)
        if owner != "torch" and owner not in sys.stdlib_module_names
    ]
    in_torch = "torch" in packages
    return any(in_torch or frame.f_globals.get("torch") is torch for frame in of_program)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
