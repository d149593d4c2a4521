"""Packs that look installed: a package and its metadata, in a folder on `sys.path`."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


@dataclass(frozen=True)
class InstalledPack:
    """The paths of a pack: its site folder, its package, its metadata."""

    site: Path
    package: Path
    metadata: Path


@dataclass(frozen=True)
class Link:
    """A link in place of a file; `to` may be relative to the link."""

    to: str


@dataclass(frozen=True)
class Pipe:
    """A named pipe in place of a file: reading it blocks."""


def install(site, name, files, *, package="", entry_points=None, metadata=None, version="1.0"):
    """Write a distribution `name` into the folder `site`, as an installer would leave it.

    `files` maps paths in its package to text, bytes, None for a folder, a `Link` or a `Pipe`; a
    path that begins with / is relative to `site`. The pack is called `team`, unless `entry_points`
    names another. Returns an `InstalledPack`.
    """
    package = package or name.replace("-", "_")
    pack = InstalledPack(site, site / package, site / f"{package}-{version}.dist-info")
    declared = (
        f"[torchrepro.profiles]\nteam = {package}\n" if entry_points is None else entry_points
    )
    about = METADATA.format(name=name, version=version) if metadata is None else metadata
    inside = {path: _place(pack, path) for path in {"__init__.py": "", **files}}
    for path, content in {"__init__.py": "", **files}.items():
        _write(inside[path], content)
    _write(pack.metadata / "entry_points.txt", declared)
    _write(pack.metadata / "METADATA", about)
    _write(pack.metadata / "INSTALLER", "pip\n")
    record = "".join(f"{path.relative_to(site)},,\n" for path in inside.values())
    if not (pack.metadata / "RECORD").exists():
        _write(pack.metadata / "RECORD", record)
    return pack


def _place(pack, path):
    return pack.site / path[1:] if path.startswith("/") else pack.package / path


def _write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.mkdir()
    elif isinstance(content, Link):
        path.symlink_to(content.to)
    elif isinstance(content, Pipe):
        os.mkfifo(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def installed_pack(tmp_path, monkeypatch):
    """Install a pack for this test, in this process and its children; see `install`.

    The end of the test removes its modules from `sys.modules`.
    """
    known = set(sys.modules)

    def installed_pack(name, files, **options):
        site = tmp_path / "sites" / name
        pack = install(site, name, files, **options)
        monkeypatch.syspath_prepend(site)
        before = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), before))))
        importlib.invalidate_caches()
        return pack

    yield installed_pack
    for module in set(sys.modules) - known:
        if (tmp_path / "sites").as_posix() in str(getattr(sys.modules[module], "__file__", "")):
            del sys.modules[module]
