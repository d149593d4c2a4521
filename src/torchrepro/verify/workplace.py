"""The folder that recordings and logs of a verification go into."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.trace.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Workplace:
    """A folder that was named, or a temporary one."""

    def __init__(self, folder: Path, *, temporary: bool) -> None:
        self.folder = folder
        self._temporary = temporary

    def clear(self) -> str:
        """Remove a temporary folder; return the path of one that stays, and else nothing."""
        if not self._temporary:
            return str(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        return ""


@contextmanager
def workplace(folder: str, say: Callable[[str], object]) -> Iterator[Workplace]:
    """Make the folder, a temporary one if none is named; say where it is if the block fails.

    Raises `TraceError` for one in which there is something.
    """
    if folder:
        Request(folder).prepare_folder()
    place = Path(folder or tempfile.mkdtemp(prefix="torchrepro-verify-")).absolute()
    try:
        yield Workplace(place, temporary=not folder)
    except BaseException:
        if any(place.iterdir()):
            say(f"\nwhat was recorded until then, and what the command printed, is in {place}\n")
        else:
            say("\n")  # ends the line that a run had begun
            if not folder:
                place.rmdir()
        raise
