"""A working directory at another path in which everything lies where the program expects it."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torchrepro.errors import TraceError
from torchrepro.messages import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST = 20_000
"""Entries of the working directory and of the folders above it that are linked at most."""


@contextmanager
def mirrored(folder: Path) -> Iterator[Path]:
    """Make a folder at another path that holds links to all that is in `folder`.

    So do the folders above it, up to the root: relative paths lead to the same files, ``../data``
    included, and only the name of the place is another. New files that a program writes into it
    vanish with it. A symbolic link to the folder as a whole would not do: the system resolves it
    (https://man7.org/linux/man-pages/man2/getcwd.2.html). Raises `TraceError` where a folder
    cannot be read, or the links cannot be made.
    """
    with TemporaryDirectory(prefix="torchrepro-elsewhere-", ignore_cleanup_errors=True) as top:
        mirror, original = Path(top), Path(folder.anchor)
        for part in folder.parts[1:]:
            _link(original, mirror, besides=(part, Path(top).name))
            mirror, original = mirror / part, original / part
            mirror.mkdir()
        _link(original, mirror, besides=(Path(top).name,))
        yield mirror


def too_large(folder: Path) -> str:
    """Return why `folder` cannot be mirrored, or an empty string."""
    try:
        entries = sum(1 for each in (folder, *folder.parents) for _ in each.iterdir())
    except OSError as error:
        return f"{error.filename} cannot be listed"
    return f"there are {entries:,} files to link" if entries > MOST else ""


def _link(original: Path, mirror: Path, besides: tuple[str, ...]) -> None:
    try:
        for entry in original.iterdir():
            if entry.name not in besides:
                (mirror / entry.name).symlink_to(entry)
    except OSError as error:
        raise TraceError(
            Problem(f"cannot be had at another path: {error.strerror}", found=str(original))
        ) from None
