"""What a new pack may be called, and what its parts are called after it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem, shown
from torchrepro.profile.declared import ENTRY_POINTS
from torchrepro.profile.folder import PIECES
from torchrepro.profile.packs import DISTRIBUTION

if TYPE_CHECKING:
    from pathlib import Path

LEGAL = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
LONGEST = 40  # characters; the name is typed on command lines
RESERVED = {
    PIECES: "the folder of pieces is called so",
    DISTRIBUTION: "torchrepro's own profiles need no prefix",
}


@dataclass(frozen=True, slots=True)
class PackName:
    """The name of a pack: what the names of its profiles begin with."""

    text: str

    @property
    def module(self) -> str:
        """The package that holds the profiles."""
        return f"{self.text.replace('-', '_')}_profiles"

    @property
    def distribution(self) -> str:
        """What an index calls the pack."""
        return f"{self.text.replace('_', '-')}-profiles"


def pack_name(folder: Path) -> PackName:
    """Return the name of a pack that is to be written into `folder`, whose last part it is.

    Raises `ProfileError` for one that no pack can have, or that is taken.
    """
    text = folder.name
    if not LEGAL.fullmatch(text) or len(text) > LONGEST:
        raise ProfileError(
            Problem(
                "not the name of a pack",
                found=shown(text or str(folder)),
                legal=f"words of a-z and 0-9, joined by - or _, at most {LONGEST} characters",
                near=_mended(text),
            )
        )
    name = PackName(text)
    why = RESERVED.get(text) or _taken(name)
    if why:
        raise ProfileError(Problem(f"a pack cannot be called that: {why}", found=text))
    return name


def _mended(text: str) -> str:
    """Return the legal name that is closest to `text`, if there is one."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    mended = "-".join(words)[:LONGEST].rstrip("-")
    return mended if LEGAL.fullmatch(mended) else ""


def _taken(name: PackName) -> str:
    """Return what is installed already under a name that the pack would have, in words."""
    for entry in entry_points(group=ENTRY_POINTS, name=name.text):
        owner = entry.dist.name if entry.dist else entry.value
        return f"{owner} is installed, and its profiles are called {name.text}/..."
    if find_spec(name.module) is not None:
        return f"a module {name.module} is installed"
    try:
        return f"a distribution {distribution(name.distribution).name} is installed"
    except PackageNotFoundError:
        return ""
