import json
from pathlib import Path


class Journal:
    """One line for each run that was started in this folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, **settings: object) -> int:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        with self.path.open("a") as file:
            file.write(json.dumps({"member": len(lines), **settings}) + "\n")
        return len(lines)
