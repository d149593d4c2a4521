"""Which profile and which pieces somebody has chosen, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.profile.compose import compose
from torchrepro.profile.composition import Composition
from torchrepro.profile.folder import PIECES, is_piece
from torchrepro.profile.origin import Origin

if TYPE_CHECKING:
    from torchrepro.profile.folder import Folder


class Choice:
    """Names of profiles and pieces, in the order in which they were chosen."""

    def __init__(self) -> None:
        self.profiles: list[str] = []
        self._pieces: list[str] = []
        self._folders: tuple[Folder, ...] = ()

    def clear(self) -> None:
        """Forget all of it."""
        self.profiles.clear()
        self._pieces.clear()

    def add(self, name: str, folders: tuple[Folder, ...]) -> None:
        """Note that `name` was chosen, to be looked up in `folders` first."""
        chosen = self._pieces if is_piece(name) else self.profiles
        if name not in chosen:
            chosen.append(name)
        self._folders = folders

    @property
    def overrides(self) -> list[str]:
        """The pieces, as an override lays them on top of a profile."""
        return [f"{PIECES}=[{','.join(self._pieces)}]"] if self._pieces else []

    def compose(self) -> Composition:
        """Return the profile with its pieces, or the pieces alone; raises `ProfileError`."""
        if self.profiles:
            return compose(self.profiles[0], self.overrides, self._folders)
        if self._pieces:
            composition = compose(self._pieces[0], self.overrides, self._folders)
            composition.call(", ".join(self._pieces), Origin(f"+repro/{PIECES}"))
            return composition
        return Composition()
