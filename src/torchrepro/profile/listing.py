"""What is on the search path."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torchrepro.errors import ProfileError
from torchrepro.profile.compose import compose
from torchrepro.profile.find import search_path


@dataclass(frozen=True, slots=True)
class Listed:
    """One profile on the search path."""

    name: str
    guarantee: str
    origin: str
    description: str

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain JSON values."""
        return asdict(self)


def listed() -> list[Listed]:
    """Return every profile on the search path; a broken one says so in its description."""
    entries = []
    for folder in search_path():
        for name in folder.names():
            try:
                values = compose(name).values
            except ProfileError as error:
                entries.append(Listed(name, "-", folder.origin, f"refused: {error.problems[0]}"))
                continue
            guarantee = str(values.get("guarantee", "seeded"))
            entries.append(
                Listed(name, guarantee, folder.origin, str(values.get("description", "")))
            )
    return entries
