"""Which profile and which pieces the latest of Hydra's compositions has chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.profile.compose import compose
from torchrepro.profile.composition import Composition
from torchrepro.profile.folder import PIECES, is_piece
from torchrepro.profile.load import SECTION
from torchrepro.profile.origin import Origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.profile.folder import Folder

GROUP = SECTION
CALLBACK = "torchrepro"  # its name among the callbacks of an app, and in its defaults list


class Choice:
    """Names of profiles and pieces, in the order in which they lie on top of each other."""

    def __init__(self) -> None:
        self.profiles: list[str] = []
        self._pieces: list[str] = []
        self._folders: tuple[Folder, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is chosen."""
        return bool(self.profiles or self._pieces)

    def clear(self) -> None:
        """Forget all of it."""
        self.profiles.clear()
        self._pieces.clear()

    def forget(self, group: str) -> None:
        """Forget what was chosen of `group`, because an override has deleted it afterwards."""
        if group == GROUP:
            self.profiles.clear()
        if group == f"{GROUP}.{PIECES}":
            self._pieces.clear()

    def add(self, name: str, folders: tuple[Folder, ...]) -> None:
        """Note that `name` was chosen, to be looked up in `folders` first.

        Hydra asks for the last entry of a defaults list first.
        """
        chosen = self._pieces if is_piece(name) else self.profiles
        if name not in chosen:
            chosen.insert(0, name)
        self._folders = folders

    @property
    def overrides(self) -> list[str]:
        """The pieces, as an override lays them on top of a profile."""
        return _laid(self._pieces)

    def compose(self) -> Composition:
        """Return the profile with its pieces, or the pieces alone; raises `ProfileError`."""
        if self.profiles:
            return compose(self.profiles[0], self.overrides, self._folders)
        if self._pieces:
            composition = compose(self._pieces[0], _laid(self._pieces[1:]), self._folders)
            composition.call(", ".join(self._pieces), Origin(f"+{GROUP}/{PIECES}"))
            return composition
        return Composition()


def _laid(pieces: Sequence[str]) -> list[str]:
    return [f"{PIECES}=[{','.join(pieces)}]"] if pieces else []


chosen = Choice()
"""What the source is asked for as Hydra composes, and the callback reads afterwards."""
