import json
import secrets
import socket
import uuid
from pathlib import Path


class Experiment:
    def __init__(self, tags: list[str]) -> None:
        self.id = uuid.uuid4().hex
        self.token = secrets.token_hex(8)
        self.tags = tags
        self.history: list[float] = []

    def finish(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / f"{self.id}.json").write_text(
            json.dumps(
                {
                    "id": self.id,
                    "token": self.token,
                    "host": socket.gethostname(),
                    "tags": self.tags,
                    "loss": self.history,
                }
            )
        )
