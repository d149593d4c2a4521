"""Doing something first on every thread that Python starts from now on."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def on_threads_started(first: Callable[[], None]) -> Iterator[None]:
    """Call `first` on each thread that `threading` starts within the block, before its own code.

    A thread calls its profile function at its first call of anything, which is the one public way
    to be there first; one that is set already gets its place back.
    https://docs.python.org/3/library/threading.html#threading.setprofile
    """
    before = threading.getprofile()

    def begin(frame: Any, event: Any, argument: Any) -> None:
        sys.setprofile(before)
        first()
        if before is not None:
            before(frame, event, argument)

    threading.setprofile(begin)
    try:
        yield
    finally:
        if threading.getprofile() is begin:
            threading.setprofile(before)
