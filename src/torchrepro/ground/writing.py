"""Write a file completely or not at all, and never through a link that leads elsewhere.

Other people write to a repository. They could put a link at the path of the file or of a temporary
file, and so choose which of the user's files is overwritten.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from torchrepro.ground.errors import ProfileError

_ADDED = 8  # random bytes in the name of the temporary file


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that no reader ever sees a part of it, even after a crash.

    The content is first written to a temporary file in the same folder. The temporary file has a
    random name, so no link can have the same name. A link at `path` is replaced. Raises `OSError`.
    """
    temporary = path.with_name(f".{path.name}.{os.urandom(_ADDED).hex()}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            with suppress(OSError):  # a file system may have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_in_place(path: Path, text: str, what: str = "the lock") -> None:
    """Write `text` atomically to `path`, or to the file that a link at `path` points to.

    Raises `ProfileError` if the file cannot be written, or if the link leads out of the repository
    (or, outside repositories, the folder) that contains `path`. Messages call the file `what`.
    """
    target, folder = path.resolve(), path.parent.resolve()
    repositories = (root for root in (folder, *folder.parents) if (root / ".git").exists())
    home = next(repositories, folder)
    try:
        if folder == Path("/dev") or (target.exists() and not target.is_file()):
            path.write_text(text, encoding="utf-8")  # a device, such as /dev/stdout
            return
        if path.is_symlink() and not target.is_relative_to(home):
            problem, todo = f"a link that leads out of {home}", "name the file itself"
            raise ProfileError.about(problem, found=f"{path} -> {target}", todo=todo)
        length = len(target.name) + 2 + 2 * _ADDED  # of the name of a temporary file
        for name in os.listdir(target.parent):  # noqa: PTH208 - names
            if name.startswith(f".{target.name}.") and len(name) == length:
                _remove_abandoned(target.with_name(name))
        write_atomically(target, text.encode())
    except OSError as error:
        problem = f"{what} cannot be written: {error.strerror}"
        raise ProfileError.about(problem, found=str(target), todo="name another file") from None


def _remove_abandoned(temporary: Path) -> None:
    # If the file is not locked, its writer was killed before it could remove the file.
    with suppress(OSError):
        descriptor = os.open(temporary, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()
        finally:
            os.close(descriptor)
