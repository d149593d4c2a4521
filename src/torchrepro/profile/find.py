"""Which file a name means."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem, near, shown, some
from torchrepro.profile.folder import SUFFIXES, Folder, Found, is_name
from torchrepro.profile.packs import (
    VARIABLE,
    folders_for,
    incomplete_packs,
    missing_folders,
    package,
    search_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PACKAGE = "pkg://"


class UnknownProfileError(ProfileError):
    """A name means no file."""


def find(
    name: str,
    folders: Sequence[Folder] = (),
    asked_by: str = "",
    beside: Sequence[Folder] = (),
    without: Iterable[Path] = (),
) -> Found:
    """Return the file that `name` means, without importing or running anything.

    `name` is a name in one of `folders` or on the search path, a path to a YAML file, or
    ``pkg://package.path/name``. `asked_by` is the ``file:line`` of a defaults list, in which paths
    are refused; such a list looks first in the folders `beside` its own file, and past the files
    `without` it: a profile may inherit from another one of its own name. Raises `ProfileError`
    for a name that means no file, or two.
    """
    try:
        if name.startswith(PACKAGE):
            return _in_package(name, asked_by)
        if name.endswith(SUFFIXES) and not asked_by and Path(name).is_file():
            return _at_path(name, Path(name))  # a file that is there is meant by its own name
        found = _by_name(name, folders, beside, set(without)) if is_name(name) else None
        if found:
            return found
        if not asked_by and name:
            path = Path(name).expanduser()
            if _looks_like_a_path(name) or path.exists():
                return _at_path(name, path)
    except ProfileError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # Too long for the file system, the home of nobody, an impossible character.
        what = f"unknown profile '{shown(name)}': no file can have that name ({error})"
        raise UnknownProfileError(Problem(what, asked_by)) from None
    raise _unknown(name, (*beside, *folders, *search_path()), asked_by)


def _by_name(
    name: str, folders: Sequence[Folder], beside: Sequence[Folder], without: set[Path]
) -> Found | None:
    everywhere = (*folders, *folders_for(name))
    # A folder of the search path answers with all others: its names may be taken there.
    places = {(folder.path, folder.prefix) for folder in everywhere}
    own = [folder for folder in beside if (folder.path, folder.prefix) not in places]
    return _in(own, name, without) or _one_of(everywhere, name, without)


def _in(folders: Iterable[Folder], name: str, without: set[Path]) -> Found | None:
    for folder in folders:
        file = folder.file(name)
        if file and file not in without:
            return Found(name, file, folder)
    return None


def _one_of(folders: Sequence[Folder], name: str, without: set[Path]) -> Found | None:
    """Return the file that is called `name`; raises `ProfileError` if there are two of them."""
    found = [one for folder in folders if (one := _in([folder], name, without))]
    for one, two in combinations(found, 2):
        if not _are_the_same(one.path, two.path):
            raise ProfileError(
                Problem(
                    f"two profiles are called '{name}'",
                    legal=f"{one.path} ({one.folder.origin}), or {two.path} ({two.folder.origin})",
                    todo="name the one you mean by its path, or rename one of them",
                )
            )
    return found[0] if found else None


def _are_the_same(one: Path, two: Path) -> bool:
    """Whether two files are one, or a copy of each other."""
    return one.samefile(two) or (
        one.stat().st_size == two.stat().st_size and one.read_bytes() == two.read_bytes()
    )


def _looks_like_a_path(name: str) -> bool:
    return name.endswith(SUFFIXES) or name.startswith(("/", "./", "../", "~"))


def _at_path(name: str, path: Path) -> Found:
    if not path.exists():
        siblings = path.parent.glob("*") if path.parent.is_dir() else ()
        close = near(path.name, (entry.name for entry in siblings))
        raise UnknownProfileError(
            Problem("no such file", found=name, near=str(path.parent / close) if close else "")
        )
    return Found(path.stem, path.absolute(), Folder(path.absolute().parent, str(path.parent)))


def _in_package(name: str, asked_by: str) -> Found:
    where, _, rest = name.removeprefix(PACKAGE).partition("/")
    its = package(where)
    # A folder of the working directory looks like a package too, and may hold anything.
    may_be_read = its.regular or not asked_by
    if not its.folders or not may_be_read:
        raise UnknownProfileError(
            Problem("no such package is installed here", asked_by, found=name)
        )
    folders = tuple(Folder(root, f"package {where}") for root in its.folders)
    found = _in(folders, rest, set()) if is_name(rest) else None
    if found is None:
        raise _unknown(name, folders, asked_by)
    return Found(found.path.stem, found.path, found.folder)


def _unknown(name: str, folders: Sequence[Folder], asked_by: str) -> UnknownProfileError:
    names = sorted({known for folder in folders for known in folder.names()})
    missing = [f"{VARIABLE} names {shown(text)}, which is no folder" for text in missing_folders()]
    missing += [
        f"{origin}: {problem.what}" for pack, origin, problem in incomplete_packs() if not pack
    ]
    todo = "`torchrepro list` shows what is on the search path; a file is named by its path"
    return UnknownProfileError(
        Problem(
            f"unknown profile '{shown(name)}'",
            asked_by,
            legal=some(names),
            near=near(name, names),
            todo="; ".join([*missing, todo]),
        )
    )
