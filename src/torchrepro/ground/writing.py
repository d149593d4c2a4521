"""Writing a file: completely or not at all, and through no link that leads elsewhere.

A repository is made by others. A link in it, under the name of the file or of one beside it, would
choose which file of the user is overwritten.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from torchrepro.ground.errors import ProfileError

_ADDED = 8  # random bytes in the name of a file beside the one that is written


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that no reader ever finds a part of it, even after a crash.

    It is first written beside `path` under a name that nobody can guess, so that no link that lies
    there leads it elsewhere. A link at `path` itself is replaced. Raises `OSError`.
    """
    beside = path.with_name(f".{path.name}.{os.urandom(_ADDED).hex()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(beside, flags, 0o666), "wb") as file:
            with suppress(OSError):  # a file system may have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)


def write_in_place(path: Path, text: str, what: str = "the lock") -> None:
    """Write a file that is the old one or the new one at any moment, where its name leads.

    Raises `ProfileError`, also for a link that leads out of the repository or folder that it is in.
    """
    place, folder = path.resolve(), path.parent.resolve()
    repositories = (each for each in (folder, *folder.parents) if (each / ".git").exists())
    home = next(repositories, folder)
    try:
        if folder == Path("/dev") or (place.exists() and not place.is_file()):
            path.write_text(text, encoding="utf-8")  # as /dev/stdout
            return
        if path.is_symlink() and not place.is_relative_to(home):
            problem, todo = f"a link that leads out of {home}", "name the file itself"
            raise ProfileError.about(problem, found=f"{path} -> {place}", todo=todo)
        for name in os.listdir(place.parent):  # noqa: PTH208 - names
            if name.startswith(f".{place.name}.") and len(name) == len(place.name) + 2 + 2 * _ADDED:
                _remove_left(place.with_name(name))
        write_atomically(place, text.encode())
    except OSError as error:
        problem = f"{what} cannot be written: {error.strerror}"
        raise ProfileError.about(problem, found=str(place), todo="name another file") from None


def _remove_left(beside: Path) -> None:
    # A process that was killed as it wrote the file has left it, and no longer holds it.
    with suppress(OSError):
        descriptor = os.open(beside, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            beside.unlink()
        finally:
            os.close(descriptor)
