"""The packs that installed distributions declare, read from their metadata as data.

Each distribution is asked by itself: `importlib.metadata.entry_points` fails for all of them where
one of them is broken. What the files look like:
https://packaging.python.org/en/latest/specifications/entry-points.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions
from pathlib import Path

from torchrepro.messages import printable
from torchrepro.profile.folder import PIECES, is_name

ENTRY_POINTS = "torchrepro.profiles"
MOST = 16
"""Packs that one distribution may declare."""

LARGEST = 100_000
"""Characters of entry points that are read; more would take `importlib.metadata` seconds."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A pack that a distribution declares, or a distribution that cannot be read."""

    owner: str
    """The distribution, as messages show it."""

    distribution: Distribution
    pack: str = ""
    """What the names of its profiles begin with; empty where that cannot be read."""

    value: str = ""
    """The package that holds the profiles, as the entry point names it."""

    complaint: str = ""
    """Why no pack of the distribution is read, if so."""

    @property
    def package(self) -> str:
        """The dotted name of the package, or an empty string for a value that names none."""
        line = EntryPoint(self.pack, self.value, ENTRY_POINTS)
        try:
            return ".".join(filter(None, (line.module, line.attr)))
        except (AttributeError, ValueError):
            return ""

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
    """Return every pack that can be named, and every distribution whose packs cannot be read.

    A distribution that is found twice counts once.
    """
    owners: set[str] = set()
    found: list[Declared] = []
    for distribution in distributions():
        text = _text(distribution, "entry_points.txt")
        if ENTRY_POINTS not in text:
            continue
        owner = _owner(distribution)
        if owner not in owners:
            found += _packs(len(text), owner, distribution)
        owners.add(owner)
    return found


def _packs(size: int, owner: str, distribution: Distribution) -> list[Declared]:
    unreadable = Declared(owner, distribution, complaint="its entry points cannot be read")
    if size > LARGEST:
        return [unreadable]
    try:
        values = {e.name: e.value for e in distribution.entry_points.select(group=ENTRY_POINTS)}
    except (TypeError, ValueError, AttributeError):  # a line that has not the form of one
        return [unreadable]
    names = [name for name in values if is_name(name) and "/" not in name and name != PIECES]
    if len(values) > MOST:
        many = f"one distribution declares more than {MOST} packs"
        return [replace(unreadable, pack=name, complaint=many) for name in names[:1]]
    return [Declared(owner, distribution, name, values[name]) for name in names]


def _owner(distribution: Distribution) -> str:
    """Return the name in the metadata, which may hold anything."""
    try:
        name = distribution.metadata["Name"]
    except (TypeError, ValueError, PackageNotFoundError):
        name = None
    return printable(str(name)) if name else "a distribution without a name"


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
