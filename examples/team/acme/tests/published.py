"""The digests of all profiles and pieces, for each published version of this pack.

After an intended change, raise `version` in pyproject.toml and run this file.
"""

import json
import sys
import tomllib
from pathlib import Path

import torchrepro

import acme_profiles

ROOT = Path(__file__).parent.parent
FILE = ROOT / "published.json"
FOLDER = Path(acme_profiles.__file__).parent
FILES = [path.relative_to(FOLDER) for path in FOLDER.rglob("*.yaml")]
NAMES = sorted(f"acme/{path.with_suffix('').as_posix()}" for path in FILES)


def version() -> str:
    """Return the version in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]["version"]


def published() -> dict[str, dict[str, str]]:
    """Return the pinned digests: version -> name -> digest."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def main() -> None:
    """Pin the digests of this version; exit if it is pinned with different digests."""
    pins = published()
    digests = {name: torchrepro.load(name).digest for name in NAMES}
    if pins.get(version(), digests) != digests:
        sys.exit(
            f"{version()} has different digests: raise the version in pyproject.toml, or, "
            f"if {version()} is not published yet, remove it from {FILE.name}"
        )
    FILE.write_text(json.dumps(pins | {version(): digests}, indent=2) + "\n", encoding="utf-8")
    print(f"{FILE.name} contains the digests of {version()}")


if __name__ == "__main__":
    main()
