"""The packs that installed distributions declare, read from their metadata as data.

Not by `importlib.metadata.entry_points`: one broken line of one distribution ends it for all of
them, and ten megabytes of lines take it ten seconds. What the files look like:
https://packaging.python.org/en/latest/specifications/entry-points.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, distributions
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.messages import printable
from torchrepro.profile.folder import PIECES, is_name

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY_POINTS = "torchrepro.profiles"
MOST = 16
"""Packs that one distribution may declare."""

_NAME = re.compile(r"^Name:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Declared:
    """One line of the entry points of a distribution."""

    pack: str
    value: str
    """The package that holds the profiles, as the line names it."""

    owner: str
    """The distribution, as messages show it."""

    distribution: Distribution
    too_many: bool = False
    """Whether the distribution declares more packs than anybody can mean."""

    @property
    def package(self) -> str:
        """The dotted name of the package: without what a line may hold besides."""
        module, _, inner = self.value.partition("[")[0].partition(":")
        return ".".join(filter(None, (module.strip(), inner.strip())))

    @property
    def source(self) -> Path | None:
        """The project in which the pack is written, if it is installed for editing."""
        return _source(self.distribution)

    def owns(self, folder: Path) -> bool:
        """Whether `folder`, found as this package, came with the distribution itself.

        A line may name any package that is installed, or a folder that is at hand.
        """
        source = self.source
        root = source or Path(str(self.distribution.locate_file("")))
        if not folder.resolve().is_relative_to(root.resolve()):
            return False
        installed = _text(self.distribution, "RECORD")
        inside = self.package.replace(".", "/")
        return (
            source is not None
            or not installed
            or any(line.startswith(f"{inside}/") for line in installed.splitlines())
        )


def declared() -> list[Declared]:
    """Return every pack that can be named; a distribution that is found twice counts once."""
    owners: set[str] = set()
    found: list[Declared] = []
    for distribution in distributions():
        text = _text(distribution, "entry_points.txt")
        if ENTRY_POINTS not in text:
            continue
        owner = _owner(distribution)
        if owner not in owners:
            found += _packs(text, owner, distribution)
        owners.add(owner)
    return found


def _packs(text: str, owner: str, distribution: Distribution) -> list[Declared]:
    lines = dict(islice(_lines_of_the_group(text), MOST + 1))
    packs = [
        Declared(pack, value, owner, distribution)
        for pack, value in lines.items()
        if is_name(pack) and "/" not in pack and pack != PIECES
    ]
    if len(lines) <= MOST:
        return packs
    return [replace(pack, too_many=True) for pack in packs[:1]]


def _lines_of_the_group(text: str) -> Iterator[tuple[str, str]]:
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            group = line.strip("[]").strip()
        elif group == ENTRY_POINTS and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield name.strip(), value.strip()


def _owner(distribution: Distribution) -> str:
    """Return the name in the header of the metadata, which may hold anything."""
    metadata = _text(distribution, "METADATA") or _text(distribution, "PKG-INFO")
    found = _NAME.search(metadata.partition("\n\n")[0])
    return printable(found[1]) if found else "a distribution without a name"


def _source(distribution: Distribution) -> Path | None:
    """Return the folder in which a pack that is installed for editing is written, if it is one.

    Whoever publishes a distribution can also write that it is to be edited, so the folder has to
    declare packs itself. https://packaging.python.org/en/latest/specifications/direct-url
    """
    text = _text(distribution, "direct_url.json")
    if "editable" not in text:
        return None
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        content = json.loads(text)
        editable = content["dir_info"]["editable"] is True
        folder = Path(url2pathname(urlsplit(content["url"]).path))
        project = (folder / "pyproject.toml", folder / "setup.cfg", folder / "setup.py")
        texts = [file.read_text("utf-8") for file in project if editable and file.is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return None  # no such folder: what it declares is judged like any other installation
    return folder if any(ENTRY_POINTS in written for written in texts) else None


def _text(distribution: Distribution, file: str) -> str:
    """Return a file of the metadata; what is no text says nothing."""
    try:
        return distribution.read_text(file) or ""
    except (UnicodeDecodeError, OSError):
        return ""
