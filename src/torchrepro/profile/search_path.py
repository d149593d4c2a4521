"""Find the file of a profile by name: in torchrepro's folder, in the user's folders, and in packs.

A pack is a Python package with YAML files and an entry point in the group `torchrepro.profiles`,
as in ``team = "acme_profiles"``. The name of the entry point is the prefix of the profiles' names,
and its value is the package. Packs are found by their metadata and never imported:
https://packaging.python.org/en/latest/specifications/entry-points. Distributions are read one by
one, because `importlib.metadata.entry_points` fails for all distributions if one is broken.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from filecmp import cmp
from importlib.metadata import Distribution, PackageNotFoundError, distributions
from importlib.util import find_spec
from itertools import combinations, islice
from pathlib import Path
from typing import NamedTuple

from torchrepro.ground.errors import Problem, ProfileError, near, printable, shown, some

DISTRIBUTION = "torchrepro"
SHIPPED = Path(__file__).parent.parent / "conf" / "repro"
VARIABLE = "TORCHREPRO_PATH"  # more folders of profiles, separated as in PATH

ENTRY_POINTS = "torchrepro.profiles"
PACKAGE = "pkg://"
PIECES = "with"  # folder of the pieces in a folder of profiles: `with/dropout-zero`

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
SUFFIXES = (".yaml", ".yml")
_PACKAGE = re.compile(r"[\w.]+(:[\w.]+)?")

MANY = 1000  # the most files and folders that are read to list names
DEEPEST = 8


class UnknownProfileError(ProfileError):
    """No file has the name of the requested profile."""


class ProfileFolder(NamedTuple):
    """A folder that contains profiles, and the folder's name in messages."""

    path: Path
    origin: str
    prefix: str = ""  # of the names of its profiles: ``team/`` in the pack `team`
    package: str = ""  # the distribution that the folder belongs to
    source: Path | None = None  # the folder of the project, if installed as editable

    def file(self, name: str) -> Path | None:
        """Return the file of the profile `name`, or None if this folder does not have it.

        Raises `ProfileError` for two files of this name, or for a link to a file outside the
        folder.
        """
        if not name.startswith(self.prefix):
            return None
        stem = name.removeprefix(self.prefix).removesuffix(".yaml").removesuffix(".yml")
        candidates = (self.path / f"{stem}{suffix}" for suffix in SUFFIXES) if stem else ()
        present = [path for path in candidates if path.is_file()]
        if len(present) > 1:
            message = f"two profiles are called '{name}'"
            legal = f"{present[0].name}, or {present[1].name}"
            raise ProfileError.about(message, self.origin, legal=legal, todo="remove one of them")
        if not present:
            return None
        (file,) = present
        home = (self.source or self.path).resolve()  # an editable pack may link into its project
        if not file.resolve().is_relative_to(home):
            raise ProfileError.about(
                "a link points outside the folder of profiles",
                str(file),
                todo="replace the link by the profile itself: files outside are not read",
            )
        return file

    def has_group(self, group: str) -> bool:
        """Return whether this folder contains the folder `group`, such as ``team/with``."""
        inside = f"{group}/".removeprefix(self.prefix)
        is_here = f"{group}/".startswith(self.prefix) and is_name(group)
        return is_here and (self.path / inside).is_dir()

    def names(self) -> list[str]:
        """Return the sorted names of the profiles in this folder. Reads only part of a huge one."""
        names, left, folders = set(), MANY, [(self.path, 0)]
        while folders and left > 0:
            folder, depth = folders.pop()
            # A folder that cannot be read has no names. Links are not followed.
            with suppress(OSError), os.scandir(folder) as scan:
                entries = sorted(islice(scan, left), key=lambda entry: entry.name)
                left -= len(entries)
                for entry in entries:
                    path = Path(entry.path)
                    if entry.is_dir(follow_symlinks=False) and depth < DEEPEST:
                        folders.append((path, depth + 1))
                    if path.suffix in SUFFIXES and entry.is_file():  # no pipe, device, broken link
                        names.add(path.relative_to(self.path).with_suffix("").as_posix())
        return sorted(f"{self.prefix}{name}" for name in names if is_name(name))


class ProfileFile(NamedTuple):
    """The file that was found for the name of a profile, and the folder of the file."""

    name: str
    path: Path
    folder: ProfileFolder

    @property
    def where(self) -> str:
        """The path for messages, relative to the distribution or to the working directory."""
        if self.folder.package:
            inside = self.path.relative_to(self.folder.path)
            return f"{self.folder.package}:{inside}"
        try:
            return str(self.path.relative_to(Path.cwd()))
        except (ValueError, OSError):
            return str(self.path)


class Pack(NamedTuple):
    """A pack that a distribution declares, or a distribution with unreadable entry points."""

    owner: str  # the distribution, as messages show it
    distribution: Distribution
    name: str = ""  # the prefix of its profiles' names; empty if it cannot be read
    value: str = ""  # the package with the profiles, as the entry point names it

    @property
    def package(self) -> str:
        """The dotted name of the package, or an empty string if `value` is not a dotted name."""
        return ".".join(self.value.split(":")) if _PACKAGE.fullmatch(self.value) else ""

    def folders(self) -> list[ProfileFolder]:
        """Return the folders of the pack, each with the prefix of the names in it.

        Only folders of the distribution itself count, because an entry point can name any other
        installed package, or a folder of the working directory.
        """
        if not self.name:
            return []
        source = _source(self.distribution)
        root = (source or Path(str(self.distribution.locate_file("")))).resolve()
        installed = _text(self.distribution, "RECORD").splitlines()
        inside = f"{self.package.replace('.', '/')}/"
        if installed and not source and not any(line.startswith(inside) for line in installed):
            return []
        return [
            ProfileFolder(path, f"package {self.owner}", f"{self.name}/", self.owner, source)
            for path in package_folders(self.package)[0]
            if path.resolve().is_relative_to(root)
        ]

    @property
    def problem(self) -> Problem:
        """The problem to report for a pack without folders."""
        entry_point = f"entry point of {self.owner}"
        if not self.name:
            message = "its entry points cannot be read"
            return Problem(message, entry_point, todo="uninstall it, or inform its author")
        why = "is not a folder here; packages in zip files are not read"
        if package_folders(self.package)[0]:
            why = "did not come with it: only a package of the same distribution is read"
        message = f"the pack '{self.name}' names a package that {why}"
        todo = "install it again, or inform its author"
        return Problem(message, entry_point, found=self.value, todo=todo)


def find(
    name: str,
    folders: Sequence[ProfileFolder] = (),
    named_at: str = "",
    beside: Sequence[ProfileFolder] = (),
    without: Container[Path] = (),
) -> ProfileFile:
    """Return the file of the profile `name`, without importing or running anything.

    `name` is a name in one of `folders` or on the search path, a path to a YAML file, or
    ``pkg://package.path/name``. `named_at` is the ``file:line`` of the defaults list that contains
    `name`. A defaults list must not contain paths. The folders in `beside` are searched first. The
    files in `without` are ignored, since a profile may inherit from another profile of the same
    name. Raises `ProfileError` if no file has the name, or if two different files have it.
    """
    try:
        if name.startswith(PACKAGE):
            package, _, rest = name.removeprefix(PACKAGE).partition("/")
            roots, regular = package_folders(package)
            # Any folder of the working directory is importable, too, so a file must not name it.
            if not roots or (named_at and not regular):
                message = "no such package is installed here"
                raise UnknownProfileError.about(message, named_at, found=name)
            inside = [ProfileFolder(root, f"package {package}") for root in roots]
            files = _files(rest, inside) if is_name(rest) else []
            if not files:
                raise _unknown(name, inside, named_at)
            return files[0]._replace(name=files[0].path.stem)
        if name.endswith(SUFFIXES) and not named_at and Path(name).is_file():
            return _at_path(name, Path(name))  # an existing file comes before the search path
        if is_name(name):
            everywhere = (*folders, *folders_for(name))
            # All folders on the search path have equal priority, also if one is in `beside`.
            searched = {(folder.path, folder.prefix) for folder in everywhere}
            first = [folder for folder in beside if (folder.path, folder.prefix) not in searched]
            files = _files(name, first, without)[:1] or _files(name, everywhere, without)
            for left, right in combinations(files, 2):
                if not cmp(left.path, right.path, shallow=False):
                    raise ProfileError.about(
                        f"two profiles are called '{name}'",
                        legal=f"{left.path} ({left.folder.origin}), or {right.path} "
                        f"({right.folder.origin})",
                        todo="name the one you mean by its path, or rename one of them",
                    )
            if files:
                return files[0]
        if not named_at and name:
            path = Path(name).expanduser()
            is_a_path = name.endswith(SUFFIXES) or name.startswith(("/", "./", "../", "~"))
            if is_a_path or path.exists():
                return _at_path(name, path)
    except ProfileError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        # The name is too long for the file system, has `~` of an unknown user, or a NUL character.
        message = f"unknown profile '{shown(name)}': no file can have that name ({error})"
        raise UnknownProfileError.about(message, named_at) from None
    raise _unknown(name, (*beside, *folders, *search_path()), named_at)


def _files(
    name: str, folders: Iterable[ProfileFolder], without: Container[Path] = ()
) -> list[ProfileFile]:
    candidates = ((folder, folder.file(name)) for folder in folders)
    return [
        ProfileFile(name, file, folder)
        for folder, file in candidates
        if file and file not in without
    ]


def _at_path(name: str, path: Path) -> ProfileFile:
    if not path.exists():
        siblings = path.parent.glob("*") if path.parent.is_dir() else ()
        close = near(path.name, (entry.name for entry in siblings))
        beside = str(path.parent / close) if close else ""
        todo = "" if close else "torchrepro list shows the names of profiles"
        raise UnknownProfileError.about("no such file", found=name, near=beside, todo=todo)
    return ProfileFile(
        path.stem, path.absolute(), ProfileFolder(path.absolute().parent, str(path.parent))
    )


def _unknown(name: str, folders: Iterable[ProfileFolder], named_at: str) -> UnknownProfileError:
    names = sorted({known for folder in folders for known in folder.names()})
    missing = [f"{VARIABLE} names {shown(text)}, which is no folder" for text in missing_folders()]
    nameless = [pack for pack in incomplete_packs() if not pack.name]
    missing += [f"package {pack.owner}: {pack.problem.what}" for pack in nameless]
    todo = "`torchrepro list` shows what is on the search path; a file is named by its path"
    return UnknownProfileError.about(
        f"unknown profile '{shown(name)}'",
        named_at,
        legal=some(names),
        near=near(name, names),
        todo="; ".join([*missing, todo]),
    )


def search_path() -> tuple[ProfileFolder, ...]:
    """Return every folder that is searched for the names of profiles."""
    return (*_fixed_folders(), *(folder for pack in packs() for folder in pack.folders()))


def folders_for(name: str) -> tuple[ProfileFolder, ...]:
    """Return the folders of the search path that may contain `name`.

    Searches for a pack only if `name` has a prefix such as ``team/``, because the search reads the
    metadata of all installed distributions. Raises `ProfileError` for a pack without folders.
    """
    prefix, slash, _ = name.partition("/")
    may_be_a_pack = slash and prefix not in ("", PIECES)
    meant = [pack for pack in packs() if pack.name == prefix] if may_be_a_pack else []
    problems = [pack.problem for pack in meant if not pack.folders()]
    if problems:
        raise ProfileError(problems)
    return (*_fixed_folders(), *(folder for pack in meant for folder in pack.folders()))


def incomplete_packs() -> list[Pack]:
    """Return every pack without folders. The `problem` of a pack is the reason."""
    return [pack for pack in packs() if not pack.folders()]


def missing_folders() -> list[str]:
    """Return the entries of the variable TORCHREPRO_PATH that are not folders."""
    return [text for text, path in _named_folders() if not path.is_dir()]


def packs() -> list[Pack]:
    """Return every pack with a valid name, and a nameless pack per unreadable distribution.

    A distribution that Python finds twice counts once.
    """
    by_owner: dict[str, list[Pack]] = {}
    for distribution in distributions():
        text = _text(distribution, "entry_points.txt")
        if ENTRY_POINTS not in text:
            continue
        owner = ""
        with suppress(TypeError, ValueError, PackageNotFoundError):  # metadata may be invalid
            owner = printable(str(distribution.metadata["Name"] or ""))
        owner = owner or "a distribution without a name"
        if owner in by_owner:
            continue
        by_owner[owner] = [Pack(owner, distribution)]  # replaced if its entry points can be read
        with suppress(TypeError, ValueError, AttributeError):  # an entry point may be invalid
            lines = distribution.entry_points.select(group=ENTRY_POINTS)
            values = {line.name: line.value for line in lines}
            names = [n for n in values if is_name(n) and "/" not in n and n != PIECES]
            by_owner[owner] = [Pack(owner, distribution, name, values[name]) for name in names]
    return [pack for declared in by_owner.values() for pack in declared]


def package_folders(name: str) -> tuple[list[Path], bool]:
    """Return the folders of the package `name`, and whether its top-level package is regular.

    A regular package has an `__init__.py`. A folder without it can be a package, too.
    This function does not import the package or its parents.
    """
    top, *inner = name.replace("/", ".").split(".")
    try:
        spec = find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return [], False
    roots = (Path(root).joinpath(*inner) for root in spec.submodule_search_locations or ())
    return [root for root in roots if root.is_dir()], spec.origin is not None


def is_name(text: str) -> bool:
    """Return whether `text` can name a profile: words separated by slashes, without `..`."""
    return bool(NAME.fullmatch(text)) and ".." not in text


def is_piece(name: str) -> bool:
    """Return whether `name` is the name of a piece, which can be added to a profile."""
    return PIECES in name.split("/")[:-1]


def piece_named(name: str) -> str:
    """Return the full name of the piece `name`: ``team/with/zero`` for ``team/zero``."""
    pack, _, last = name.rpartition("/")
    return name if is_piece(name) else "/".join(filter(None, (pack, PIECES, last)))


def piece_short_name(name: str) -> str:
    """Return the name of a piece for `with=[...]`: ``team/zero`` for ``team/with/zero``."""
    return "/".join(part for part in name.split("/") if part != PIECES)


def _fixed_folders() -> Iterator[ProfileFolder]:
    yield ProfileFolder(SHIPPED, DISTRIBUTION, package=DISTRIBUTION)
    for text, path in _named_folders():
        if path.is_dir():
            yield ProfileFolder(path, f"{VARIABLE}: {text}")


def _named_folders() -> list[tuple[str, Path]]:
    texts = filter(None, os.environ.get(VARIABLE, "").split(os.pathsep))
    return [(text, Path(text).expanduser().absolute()) for text in texts]


def _source(distribution: Distribution) -> Path | None:
    """Return the project folder of an editable distribution, or None.

    Any distribution can claim in its metadata to be editable, so the project itself must declare
    packs: https://packaging.python.org/en/latest/specifications/direct-url.
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
        return None  # treated like any other installation
    return folder if any(ENTRY_POINTS in written for written in texts) else None


def _text(distribution: Distribution, file: str) -> str:
    try:
        return distribution.read_text(file) or ""
    except (UnicodeDecodeError, OSError):
        return ""
