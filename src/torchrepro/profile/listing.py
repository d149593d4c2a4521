"""What is on the search path."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.profile.compose import compose
from torchrepro.profile.folder import is_piece
from torchrepro.profile.origin import versioned
from torchrepro.profile.packs import incomplete_packs, search_path

if TYPE_CHECKING:
    from torchrepro.messages import Problem
    from torchrepro.profile.folder import Folder

NOTHING = "-"
PROFILE, PIECE = "profile", "piece"


@dataclass(frozen=True, slots=True)
class Listed:
    """One profile, or one piece to lay on top of profiles, on the search path."""

    name: str
    guarantee: str
    origin: str
    description: str
    kind: str = PROFILE

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values."""
        return {key: value for key, value in asdict(self).items() if key != "kind"}


def listed() -> list[Listed]:
    """Return every profile and piece on the search path; a broken one says so."""
    entries = [_listed(name, folder) for folder in search_path() for name in folder.names()]
    broken = [
        Listed(f"{pack}/" if pack else NOTHING, NOTHING, origin, f"refused: {_first_line(problem)}")
        for pack, origin, problem in incomplete_packs()
    ]
    return entries + broken


def _first_line(problem: Problem) -> str:
    return str(problem).partition("\n")[0]


def _listed(name: str, folder: Folder) -> Listed:
    origin = f"package {versioned(folder.package)}" if folder.package else folder.origin
    kind = PIECE if is_piece(name) else PROFILE
    try:
        values = compose(name).values
    except ProfileError as error:
        return Listed(name, NOTHING, origin, f"refused: {_first_line(error.problems[0])}", kind)
    promised = str(values.get("guarantee", NOTHING if kind == PIECE else "seeded"))
    return Listed(name, promised, origin, str(values.get("description", "")), kind)
