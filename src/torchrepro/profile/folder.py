"""Folders of profiles, and the files in them."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIPPED = Path(__file__).parent.parent / "conf" / "repro"
PIECES = "with"
"""Folder of the pieces in a folder of profiles: `with/dropout-zero`."""

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
SUFFIXES = (".yaml", ".yml")
MANY = 1000
"""Files and folders in a folder of profiles that are looked at for a list of names."""

DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of profiles, and how messages call it."""

    path: Path
    origin: str
    prefix: str = ""
    """What the names of its profiles begin with: ``team/`` in a pack that is called team."""

    package: str = ""
    """The distribution that the folder belongs to."""

    source: Path | None = None
    """The project in which its files are written, if it is installed for editing."""

    def file(self, name: str) -> Path | None:
        """Return the file that holds the profile `name`, if this folder has it.

        Raises `ProfileError` for a file that lies elsewhere, behind a link.
        """
        if not name.startswith(self.prefix):
            return None
        stem = name.removeprefix(self.prefix).removesuffix(".yaml").removesuffix(".yml")
        candidates = (self.path / f"{stem}{suffix}" for suffix in SUFFIXES) if stem else ()
        present = [path for path in candidates if path.is_file()]
        if len(present) > 1:
            what = f"two profiles are called '{name}'"
            legal = f"{present[0].name}, or {present[1].name}"
            raise ProfileError(Problem(what, self.origin, legal=legal, todo="remove one of them"))
        found = present[0] if present else None
        home = (self.source or self.path).resolve()  # editing may mean links into the project
        if found is not None and not found.resolve().is_relative_to(home):
            raise ProfileError(
                Problem(
                    "a link leads out of the folder of profiles",
                    str(found),
                    todo="put the profile itself there: what lies outside is not read",
                )
            )
        return found

    def has_group(self, group: str) -> bool:
        """Whether `group`, as in ``team/with``, is a folder in this one."""
        inside = f"{group}/".removeprefix(self.prefix)
        is_here = f"{group}/".startswith(self.prefix) and is_name(group)
        return is_here and (self.path / inside).is_dir()

    def names(self) -> list[str]:
        """Return the names of the profiles in this folder, sorted; of a huge folder, the first."""
        files = (path for path in _inside(self.path) if path.suffix in SUFFIXES)
        names = {path.relative_to(self.path).with_suffix("").as_posix() for path in files}
        return sorted(f"{self.prefix}{name}" for name in names if is_name(name))


@dataclass(frozen=True, slots=True)
class Found:
    """The file that a name means."""

    name: str
    path: Path
    folder: Folder

    @property
    def where(self) -> str:
        """The file as messages show it: by its package, or relative to the working directory."""
        if self.folder.package:
            inside = self.path.relative_to(self.folder.path)
            return f"{self.folder.package}:{inside}"
        try:
            return str(self.path.relative_to(Path.cwd()))
        except (ValueError, OSError):
            return str(self.path)


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` and the folders in it, links not followed, up to `MANY`."""
    left = MANY
    folders = [(folder, 0)]
    while folders and left > 0:
        here, depth = folders.pop()
        with suppress(OSError), os.scandir(here) as entries:  # one that is closed has no names
            found = sorted(islice(entries, left), key=lambda entry: entry.name)
            left -= len(found)
            for entry in found:
                if entry.is_file():  # no pipe, no device, no link that leads nowhere
                    yield Path(entry.path)
                elif entry.is_dir(follow_symlinks=False) and depth < DEEPEST:
                    folders.append((Path(entry.path), depth + 1))


def is_name(text: str) -> bool:
    """Whether `text` has the form of a profile's name: words and slashes, nothing that climbs."""
    return bool(NAME.fullmatch(text)) and ".." not in text


def is_piece(name: str) -> bool:
    """Whether `name` means a piece that is laid on top of a profile."""
    return PIECES in name.split("/")[:-1]


def piece_named(name: str) -> str:
    """Return the name on the search path of the piece `name`: ``team/zero`` is team/with/zero."""
    pack, _, last = name.rpartition("/")
    return name if is_piece(name) else "/".join(filter(None, (pack, PIECES, last)))


def piece_asked_for(name: str) -> str:
    """Return what `with=[...]` calls a piece: ``team/zero`` for team/with/zero."""
    return "/".join(part for part in name.split("/") if part != PIECES)
