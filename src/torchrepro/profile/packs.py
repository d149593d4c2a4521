"""The places that hold profiles: those shipped, folders of the user, packs that are installed.

A pack is a Python package with YAML files and an entry point in the group `torchrepro.profiles`,
whose name begins the names of its profiles and whose value is the package, as in
``team = "acme_profiles"``. It is found by its metadata and never imported:
https://packaging.python.org/en/latest/specifications/entry-points.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem
from torchrepro.profile.declared import Declared, declared
from torchrepro.profile.folder import PIECES, SHIPPED, Folder

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "TORCHREPRO_PATH"
"""Variable that names further folders of profiles, separated as in PATH."""

DISTRIBUTION = "torchrepro"


@dataclass(frozen=True, slots=True)
class Package:
    """A package that is installed, as the import system sees it without importing it."""

    folders: tuple[Path, ...]
    regular: bool
    """Whether its top is a package that was made to be one: not any folder at hand."""


def search_path() -> tuple[Folder, ...]:
    """Return every folder in which a bare name is looked up."""
    return (*_always(), *(folder for pack in declared() for folder in _folders_of(pack)))


def folders_for(name: str) -> tuple[Folder, ...]:
    """Return the folders of the search path that may hold `name`.

    Packs are asked only for names that begin with theirs, because finding them means reading the
    metadata of all that is installed. Raises `ProfileError` for a pack that is not whole.
    """
    pack, slash, _ = name.partition("/")
    may_be_a_pack = slash and pack not in ("", PIECES)
    packs = [each for each in declared() if each.pack == pack] if may_be_a_pack else []
    problems = [_problem(each) for each in packs if not _folders_of(each)]
    if problems:
        raise ProfileError(problems)
    return (*_always(), *(folder for each in packs for folder in _folders_of(each)))


def incomplete_packs() -> list[tuple[str, str, Problem]]:
    """Return every pack whose package is not there: its name, its origin, and the problem.

    And every distribution whose packs cannot be read, without a name.
    """
    return [
        (each.pack, f"package {each.owner}", _problem(each))
        for each in declared()
        if not _folders_of(each)
    ]


def missing_folders() -> list[str]:
    """Return what TORCHREPRO_PATH names and is no folder."""
    return [text for text in _named_folders() if not Path(text).expanduser().is_dir()]


def package(name: str) -> Package:
    """Return what is known of the package `name` without importing it or a parent of it."""
    top, *inner = name.replace("/", ".").split(".")
    try:
        spec = find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return Package((), regular=False)
    roots = (Path(root).joinpath(*inner) for root in spec.submodule_search_locations or ())
    return Package(tuple(r for r in roots if r.is_dir()), regular=spec.origin is not None)


def _always() -> Iterator[Folder]:
    yield Folder(SHIPPED, DISTRIBUTION, package=DISTRIBUTION)
    for text in _named_folders():
        path = Path(text).expanduser().absolute()
        if path.is_dir():
            yield Folder(path, f"{VARIABLE}: {text}")


def _named_folders() -> list[str]:
    return [text for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]


def _folders_of(pack: Declared) -> list[Folder]:
    if pack.complaint:
        return []
    return [
        Folder(path, f"package {pack.owner}", f"{pack.pack}/", pack.owner, pack.source)
        for path in package(pack.package).folders
        if pack.owns(path)
    ]


def _problem(pack: Declared) -> Problem:
    where = f"entry point of {pack.owner}"
    if pack.complaint:
        return Problem(pack.complaint, where, todo="uninstall it, or tell its author")
    elsewhere = any(package(pack.package).folders)
    return Problem(
        f"the pack '{pack.pack}' names a package that "
        + (
            "did not come with it: only its own is read"
            if elsewhere
            else "is no folder that is found here; what lies in a zip file is not read"
        ),
        where,
        found=pack.value,
        todo="install it again, or tell its author",
    )
