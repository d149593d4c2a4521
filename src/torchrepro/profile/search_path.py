"""Which file the name of a profile means: folders, the user's own, and those of installed packs.

A pack is a Python package with YAML files and an entry point in the group `torchrepro.profiles`,
whose name begins the names of its profiles and whose value is the package, as in
``team = "acme_profiles"``. It is found by its metadata and never imported:
https://packaging.python.org/en/latest/specifications/entry-points. The distributions are read one
by one: `importlib.metadata.entry_points` fails for all of them where one of them is broken.
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

from torchrepro.ground.errors import ProfileError
from torchrepro.ground.messages import Problem, near, printable, shown, some

DISTRIBUTION = "torchrepro"
SHIPPED = Path(__file__).parent.parent / "conf" / "repro"
VARIABLE = "TORCHREPRO_PATH"  # names further folders of profiles, separated as in PATH

ENTRY_POINTS = "torchrepro.profiles"
PACKAGE = "pkg://"
PIECES = "with"  # folder of the pieces in a folder of profiles: `with/dropout-zero`

NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
SUFFIXES = (".yaml", ".yml")
_PACKAGE = re.compile(r"[\w.]+(:[\w.]+)?")

MANY = 1000  # files and folders in a folder of profiles that are read for a list of names
DEEPEST = 8


class UnknownProfileError(ProfileError):
    """A name that means no file."""


class ProfileFolder(NamedTuple):
    """A folder of profiles, and how messages call it."""

    path: Path
    origin: str
    prefix: str = ""  # begins the names of its profiles: ``team/`` in a pack that is called team
    package: str = ""  # the distribution that the folder belongs to
    source: Path | None = None  # the project that holds its files, if it is installed for editing

    def file(self, name: str) -> Path | None:
        """Return the file that holds the profile `name`, if this folder has it.

        Raises `ProfileError` for a file that lies elsewhere, behind a link.
        """
        if not name.startswith(self.prefix):
            return None
        stem = name.removeprefix(self.prefix).removesuffix(".yaml").removesuffix(".yml")
        candidates = (self.path / f"{stem}{suffix}" for suffix in SUFFIXES) if stem else ()
        present = [path for path in candidates if path.is_file()]
        if len(present) > 1:
            what = f"two profiles are called '{name}'"
            legal = f"{present[0].name}, or {present[1].name}"
            raise ProfileError.about(what, self.origin, legal=legal, todo="remove one of them")
        found = present[0] if present else None
        home = (self.source or self.path).resolve()  # editing may mean links into the project
        if found is not None and not found.resolve().is_relative_to(home):
            raise ProfileError.about(
                "a link points outside the folder of profiles",
                str(found),
                todo="put the profile itself there: what lies outside is not read",
            )
        return found

    def has_group(self, group: str) -> bool:
        """Whether `group`, as in ``team/with``, is a folder in this one."""
        inside = f"{group}/".removeprefix(self.prefix)
        is_here = f"{group}/".startswith(self.prefix) and is_name(group)
        return is_here and (self.path / inside).is_dir()

    def names(self) -> list[str]:
        """Return the names of the profiles in this folder, sorted; of a huge folder, the first."""
        names, left, folders = set(), MANY, [(self.path, 0)]
        while folders and left > 0:
            here, depth = folders.pop()
            # A folder that cannot be read has no names. Links are not followed.
            with suppress(OSError), os.scandir(here) as entries:
                found = sorted(islice(entries, left), key=lambda entry: entry.name)
                left -= len(found)
                for entry in found:
                    path = Path(entry.path)
                    if entry.is_dir(follow_symlinks=False) and depth < DEEPEST:
                        folders.append((path, depth + 1))
                    if path.suffix in SUFFIXES and entry.is_file():  # no pipe, device, broken link
                        names.add(path.relative_to(self.path).with_suffix("").as_posix())
        return sorted(f"{self.prefix}{name}" for name in names if is_name(name))


class ProfileFile(NamedTuple):
    """The file that a name means."""

    name: str
    path: Path
    folder: ProfileFolder

    @property
    def where(self) -> str:
        """The file as messages show it: in its distribution, or from the working directory."""
        if self.folder.package:
            inside = self.path.relative_to(self.folder.path)
            return f"{self.folder.package}:{inside}"
        try:
            return str(self.path.relative_to(Path.cwd()))
        except (ValueError, OSError):
            return str(self.path)


class Pack(NamedTuple):
    """A pack that a distribution declares, or a distribution that cannot be read."""

    owner: str  # the distribution, as messages show it
    distribution: Distribution
    name: str = ""  # what the names of its profiles begin with; empty where that cannot be read
    value: str = ""  # the package that holds the profiles, as the entry point names it

    @property
    def package(self) -> str:
        """The dotted name of the package, or an empty string for a value that names none."""
        return ".".join(self.value.split(":")) if _PACKAGE.fullmatch(self.value) else ""

    def folders(self) -> list[ProfileFolder]:
        """Return the folders of the pack, each with what its names begin with.

        They came with the distribution itself: an entry point may name any installed package, or a
        folder of the working directory.
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
        """What is wrong with a pack that has no folders."""
        where = f"entry point of {self.owner}"
        if not self.name:
            what = "its entry points cannot be read"
            return Problem(what, where, todo="uninstall it, or tell its author")
        why = "is not a folder here; packages in zip files are not read"
        if package_folders(self.package)[0]:
            why = "did not come with it: only its own is read"
        what = f"the pack '{self.name}' names a package that {why}"
        todo = "install it again, or tell its author"
        return Problem(what, where, found=self.value, todo=todo)


def find(
    name: str,
    folders: Sequence[ProfileFolder] = (),
    named_at: str = "",
    beside: Sequence[ProfileFolder] = (),
    without: Container[Path] = (),
) -> ProfileFile:
    """Return the file that `name` means, without importing or running anything.

    `name` is a name in one of `folders` or on the search path, a path to a YAML file, or
    ``pkg://package.path/name``. `named_at` is the ``file:line`` of the defaults list that names it,
    where paths are refused; the folders `beside` that file are searched first, and the files in
    `without` are ignored: a profile may inherit from another one of the same name. Raises
    `ProfileError` for a name that means no file, or two.
    """
    try:
        if name.startswith(PACKAGE):
            package, _, rest = name.removeprefix(PACKAGE).partition("/")
            roots, regular = package_folders(package)
            # Any folder of the working directory is importable too, and may hold anything.
            if not roots or (named_at and not regular):
                what = "no such package is installed here"
                raise UnknownProfileError.about(what, named_at, found=name)
            inside = [ProfileFolder(root, f"package {package}") for root in roots]
            files = _files(rest, inside) if is_name(rest) else []
            if not files:
                raise _unknown(name, inside, named_at)
            return files[0]._replace(name=files[0].path.stem)
        if name.endswith(SUFFIXES) and not named_at and Path(name).is_file():
            return _at_path(name, Path(name))  # a file that is there is meant by its own name
        if is_name(name):
            everywhere = (*folders, *folders_for(name))
            # A folder of the search path answers with all others: its names may be taken there.
            places = {(folder.path, folder.prefix) for folder in everywhere}
            own = [folder for folder in beside if (folder.path, folder.prefix) not in places]
            files = _files(name, own, without)[:1] or _files(name, everywhere, without)
            for one, two in combinations(files, 2):
                if not cmp(one.path, two.path, shallow=False):
                    raise ProfileError.about(
                        f"two profiles are called '{name}'",
                        legal=f"{one.path} ({one.folder.origin}), or {two.path} "
                        f"({two.folder.origin})",
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
        # Too long for the file system, the home of an unknown user, an impossible character.
        what = f"unknown profile '{shown(name)}': no file can have that name ({error})"
        raise UnknownProfileError.about(what, named_at) from None
    raise _unknown(name, (*beside, *folders, *search_path()), named_at)


def _files(
    name: str, folders: Iterable[ProfileFolder], without: Container[Path] = ()
) -> list[ProfileFile]:
    found = ((folder, folder.file(name)) for folder in folders)
    return [
        ProfileFile(name, file, folder) for folder, file in found if file and file not in without
    ]


def _at_path(name: str, path: Path) -> ProfileFile:
    if not path.exists():
        siblings = path.parent.glob("*") if path.parent.is_dir() else ()
        close = near(path.name, (entry.name for entry in siblings))
        beside = str(path.parent / close) if close else ""
        todo = "" if close else "torchrepro list shows the profiles that can be named"
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
    """Return every folder in which a bare name is searched for."""
    return (*_fixed_folders(), *(folder for pack in packs() for folder in pack.folders()))


def folders_for(name: str) -> tuple[ProfileFolder, ...]:
    """Return the folders of the search path that may hold `name`.

    Packs are asked only for names that begin with theirs, because finding them means reading the
    metadata of all that is installed. Raises `ProfileError` for a pack that is incomplete.
    """
    pack, slash, _ = name.partition("/")
    may_be_a_pack = slash and pack not in ("", PIECES)
    meant = [each for each in packs() if each.name == pack] if may_be_a_pack else []
    problems = [each.problem for each in meant if not each.folders()]
    if problems:
        raise ProfileError(problems)
    return (*_fixed_folders(), *(folder for each in meant for folder in each.folders()))


def incomplete_packs() -> list[Pack]:
    """Return every pack whose package is not there, or whose distribution cannot be read."""
    return [each for each in packs() if not each.folders()]


def missing_folders() -> list[str]:
    """Return what TORCHREPRO_PATH names and is not a folder."""
    return [text for text, path in _named_folders() if not path.is_dir()]


def packs() -> list[Pack]:
    """Return every pack that can be named, and every distribution whose packs cannot be read.

    A distribution that is found twice counts once.
    """
    found: dict[str, list[Pack]] = {}
    for distribution in distributions():
        text = _text(distribution, "entry_points.txt")
        if ENTRY_POINTS not in text:
            continue
        owner = ""
        with suppress(TypeError, ValueError, PackageNotFoundError):  # metadata may hold anything
            owner = printable(str(distribution.metadata["Name"] or ""))
        owner = owner or "a distribution without a name"
        if owner in found:
            continue
        found[owner] = [Pack(owner, distribution)]  # unless its lines can be read
        with suppress(TypeError, ValueError, AttributeError):  # a line may be anything as well
            lines = distribution.entry_points.select(group=ENTRY_POINTS)
            values = {line.name: line.value for line in lines}
            names = [n for n in values if is_name(n) and "/" not in n and n != PIECES]
            found[owner] = [Pack(owner, distribution, name, values[name]) for name in names]
    return [pack for of_one in found.values() for pack in of_one]


def package_folders(name: str) -> tuple[list[Path], bool]:
    """Return the folders of the package `name`, which is not imported, nor is a parent of it.

    And whether its top is a regular package rather than any folder that is importable.
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
    """Whether `text` has the form of a profile's name: words and slashes, no `..`."""
    return bool(NAME.fullmatch(text)) and ".." not in text


def is_piece(name: str) -> bool:
    """Whether `name` means a piece that is laid on top of a profile."""
    return PIECES in name.split("/")[:-1]


def piece_named(name: str) -> str:
    """Return the name on the search path of the piece `name`: ``team/zero`` is team/with/zero."""
    pack, _, last = name.rpartition("/")
    return name if is_piece(name) else "/".join(filter(None, (pack, PIECES, last)))


def piece_short_name(name: str) -> str:
    """Return what `with=[...]` calls a piece: ``team/zero`` for team/with/zero."""
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
    # The project folder of a distribution that is installed for editing. Any published one can
    # claim to be editable, so the folder has to declare packs itself.
    # https://packaging.python.org/en/latest/specifications/direct-url
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
        return None  # judged like any other installation
    return folder if any(ENTRY_POINTS in written for written in texts) else None


def _text(distribution: Distribution, file: str) -> str:
    try:
        return distribution.read_text(file) or ""
    except (UnicodeDecodeError, OSError):
        return ""
