"""What a command is doing, on standard error while it does it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPORTING = "importing torch"


class Progress:
    """Lines that stay, and on a terminal also what is true for the moment and then erased."""

    def __init__(self) -> None:
        self._for_now = ""
        self.is_watched = sys.stderr is not None and sys.stderr.isatty()
        """Whether anybody sees what is true for the moment."""

    def say(self, text: str) -> None:
        """Write text that stays, at once, also within a line."""
        self.erase()
        _write(text)

    def for_now(self, text: str) -> None:
        """Show text until the next one."""
        if self.is_watched:
            self.erase()
            self._for_now = text
            _write(text)

    def erase(self) -> None:
        """Take away what was true for the moment."""
        back = "\b" * len(self._for_now)
        if back:
            _write(f"{back}{' ' * len(back)}{back}")
        self._for_now = ""


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show on a terminal what the block does, for as long as it takes."""
    progress = Progress()
    progress.for_now(f"{what} ...")
    try:
        yield
    finally:
        progress.erase()


def _write(text: str) -> None:
    if sys.stderr is not None:  # closed, as in some services
        sys.stderr.write(text)
        sys.stderr.flush()
