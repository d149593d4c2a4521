"""Ends the process with a status of failure after every exit handler has run."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


class ExitStatus:
    """Ends the process with the status `value`, if it has one, once nothing refers to it any more.

    It is made to be an argument of an exit handler. Python lets go of the arguments once all
    handlers have run, then flushes what is left in standard output
    (https://github.com/python/cpython/blob/main/Modules/atexitmodule.c). An exception in a handler
    is printed and changes no status, and leaving from within one would keep those of others from
    running.

    With which status the program was about to end cannot be known here: Python keeps that of
    ``sys.exit(5)`` to itself until the process is gone. A status of failure stays one, as `value`.
    """

    value: int | None = None

    def __del__(self) -> None:
        if self.value is None:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or never there
                stream.flush()
        os._exit(self.value)
