"""Where profiles live, and which file a name means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torchrepro.errors import Problem, ProfileError, near, shown, some

SHIPPED = Path(__file__).parent.parent / "conf" / "repro"

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of profiles on the search path, and how messages call it."""

    path: Path
    origin: str

    def file(self, name: str) -> Path | None:
        """Return the file that holds the profile `name`, if this folder has it."""
        stem = name.removesuffix(".yaml").removesuffix(".yml")
        candidates = (self.path / f"{stem}{suffix}" for suffix in _SUFFIXES)
        return next((path for path in candidates if path.is_file()), None)

    def names(self) -> list[str]:
        """Return the names of the profiles in this folder, sorted."""
        files = (path for path in self.path.rglob("*") if path.suffix in _SUFFIXES)
        return sorted(path.relative_to(self.path).with_suffix("").as_posix() for path in files)


@dataclass(frozen=True, slots=True)
class Found:
    """The file that a name means."""

    name: str
    path: Path
    origin: str

    @property
    def where(self) -> str:
        """The file as messages show it: relative to the working directory if it is below it."""
        if self.path.is_relative_to(SHIPPED):
            return f"torchrepro:{self.path.relative_to(SHIPPED)}"
        try:
            return str(self.path.relative_to(Path.cwd()))
        except (ValueError, OSError):
            return str(self.path)


def search_path() -> tuple[Folder, ...]:
    """Return the folders in which a bare name is looked up, first match wins."""
    return (Folder(SHIPPED, "torchrepro"),)


def find(name: str, folders: tuple[Folder, ...], asked_by: str = "") -> Found:
    """Return the file that `name` means, without importing or running anything.

    `name` is a name in one of `folders`, a path to a YAML file, or ``pkg://package.path/name``;
    `asked_by` is the ``file:line`` of a defaults list, in which paths are refused.
    Raises `ProfileError` for a name that means no file.
    """
    try:
        return _found(name, folders, asked_by)
    except ProfileError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # Too long for the file system, the home of nobody, an impossible character.
        what = f"unknown profile '{shown(name)}': no file can have that name ({error})"
        raise ProfileError(Problem(what, asked_by)) from None


def _found(name: str, folders: tuple[Folder, ...], asked_by: str) -> Found:
    if name.startswith("pkg://"):
        return _in_package(name, asked_by)
    if _NAME.fullmatch(name) and ".." not in name:
        for folder in folders:
            file = folder.file(name)
            if file:
                return Found(name, file, folder.origin)
    if not asked_by and name:
        path = Path(name).expanduser()
        if _looks_like_a_path(name) or path.exists():
            return _at_path(name, path)
    raise _unknown(name, folders, asked_by)


def _looks_like_a_path(name: str) -> bool:
    return name.endswith(_SUFFIXES) or name.startswith(("/", "./", "../", "~"))


def _at_path(name: str, path: Path) -> Found:
    if not path.exists():
        siblings = path.parent.glob("*") if path.parent.is_dir() else ()
        close = near(path.name, (entry.name for entry in siblings))
        raise ProfileError(
            Problem("no such file", found=name, near=str(path.parent / close) if close else "")
        )
    return Found(path.stem, path.absolute(), str(path.parent))


def _in_package(name: str, asked_by: str) -> Found:
    package, _, rest = name.removeprefix("pkg://").partition("/")
    roots = package_folders(package)
    if not roots:
        raise ProfileError(Problem("no such package is installed here", asked_by, found=name))
    folders = tuple(Folder(root, f"package {package}") for root in roots)
    if _NAME.fullmatch(rest) and ".." not in rest:
        for folder in folders:
            file = folder.file(rest)
            if file:
                return Found(file.stem, file, folder.origin)
    raise _unknown(name, folders, asked_by)


def package_folders(package: str) -> list[Path]:
    """Return the folders of `package` without importing it or a parent of it."""
    top, *inner = package.replace("/", ".").split(".")
    try:
        spec = find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        return []
    roots = [
        Path(root).joinpath(*inner) for root in (spec and spec.submodule_search_locations) or ()
    ]
    return [root for root in roots if root.is_dir()]


def _unknown(name: str, folders: tuple[Folder, ...], asked_by: str) -> ProfileError:
    names = sorted({known for folder in folders for known in folder.names()})
    return ProfileError(
        Problem(
            f"unknown profile '{name}'",
            asked_by,
            legal=some(names),
            near=near(name, names),
            todo="`torchrepro list` shows what is on the search path; a file is named by its path",
        )
    )
