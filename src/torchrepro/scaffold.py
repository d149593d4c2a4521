"""Write new files from templates: a pack of profiles, or a first program with its profile."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from shlex import join
from shutil import which

from torchrepro.ground.errors import Problem, ProfileError, shown
from torchrepro.profile.search_path import DISTRIBUTION, ENTRY_POINTS, PIECES, SUFFIXES

TEMPLATES = Path(__file__).with_name("templates")
VERSION = "0.1.0"
_SUFFIX = ".jinja"
_DOT = re.compile("^dot-")  # "dot-" becomes ".": many tools skip files that begin with a dot

LEGAL = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
LONGEST = 40  # characters; users type the name on command lines
RESERVED = {
    PIECES: "this is the name of the folder for pieces",
    DISTRIBUTION: "it is reserved for the profiles of torchrepro, which need no prefix",
}


@dataclass(frozen=True, slots=True)
class NewPack:
    """A pack of profiles; the name of each profile begins with the name of the pack."""

    folder: Path
    name: str
    files: tuple[str, ...] = ()  # paths in the folder, sorted
    profiles: tuple[str, ...] = ()  # names of profiles and pieces in the installed pack, sorted

    @property
    def module(self) -> str:
        """The name of the Python package that contains the profiles."""
        return f"{self.name.replace('-', '_')}_profiles"

    @property
    def distribution(self) -> str:
        """The name of the pack in a package index."""
        return f"{self.name.replace('_', '-')}-profiles"


def write_pack(folder: Path) -> NewPack:
    """Write a pack into `folder`, which must be new or empty; the pack has the folder's name.

    Raises `ProfileError`, and leaves no file behind, if the name or the folder cannot be used.
    """
    from torchrepro.profile.document import parse_document
    from torchrepro.profile.load import compose_document, validate
    from torchrepro.profile.schema import json_schema

    name = folder.name
    if not LEGAL.fullmatch(name) or len(name) > LONGEST:
        near = "-".join(re.findall(r"[a-z0-9]+", name.lower()))[:LONGEST].rstrip("-")
        legal = f"words of a-z and 0-9, joined by - or _, at most {LONGEST} characters"
        near = near if LEGAL.fullmatch(near) else ""
        raise ProfileError.about(
            "not the name of a pack", found=shown(name or str(folder)), legal=legal, near=near
        )
    pack = NewPack(folder, name)
    why = RESERVED.get(name) or _taken(pack)
    if why:
        raise ProfileError.about(f"a pack cannot have this name: {why}", found=name)
    texts = _rendered(
        "pack", name=name, module=pack.module, distribution=pack.distribution, version=VERSION
    )
    root = f"src/{pack.module}/"
    digests = {}
    for path in sorted(path for path in texts if path.endswith(SUFFIXES)):
        composition = compose_document(parse_document(texts[path], path))
        installed = f"{name}/{path.removeprefix(root).rpartition('.')[0]}"
        digests[installed] = validate(composition).digest
    texts["published.json"] = json.dumps({VERSION: digests}, indent=2) + "\n"
    texts["profile.schema.json"] = json.dumps(json_schema(), indent=2) + "\n"
    try:
        used = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise _unwritable(folder, error, "name another folder") from None
    if used:
        todo = "name another folder, or remove its files"
        raise ProfileError.about("the folder exists and is not empty", found=str(folder), todo=todo)
    _write(folder, texts, "name another folder")
    return NewPack(folder, name, tuple(sorted(texts)), tuple(digests))


def _taken(pack: NewPack) -> str:
    for entry in entry_points(group=ENTRY_POINTS, name=pack.name):
        owner = entry.dist.name if entry.dist else entry.value
        return f"{owner} is installed and its profiles are called {pack.name}/..."
    if find_spec(pack.module) is not None:
        return f"a module {pack.module} is installed"
    try:
        return f"a distribution {distribution(pack.distribution).name} is installed"
    except PackageNotFoundError:
        return ""


def this_python() -> str:
    """Return `python` if that starts this interpreter, else the path of this interpreter."""
    python = which("python")
    is_ours = python is not None and Path(python).parent == Path(sys.executable).parent
    return "python" if is_ours else sys.executable


QUICKSTART = ("conf/repro/mine.yaml", "train.py")
"""The profile and the program that `write_quickstart` writes."""


def write_quickstart(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Write a program and a profile into `folder`; create the folder if needed.

    Returns the paths of both files, and command lines to try, each with a description. Raises
    `ProfileError`, and leaves no file behind, if a file exists or cannot be written.
    """
    todo = "name another folder"
    texts = _rendered("quickstart")
    profile, program = paths = [folder / name for name in QUICKSTART]
    problems = [
        Problem("exists already and is not overwritten", found=str(path), todo=todo)
        for path in paths
        if path.is_symlink() or path.exists()
    ]
    if problems:
        raise ProfileError(problems)
    _write(folder, texts, todo)
    command = ["--", this_python(), str(program)]
    todo_next = {
        ("verify",): "two runs without a profile: they diverge, and torchrepro shows where",
        ("verify", str(profile)): "two runs under your profile: bitwise the same",
        ("run", str(profile)): "one run under your profile, for everyday use",
    }
    lines = {join(["torchrepro", *words, *command]): text for words, text in todo_next.items()}
    return [program, profile], lines


def _rendered(template: str, **values: str) -> dict[str, str]:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES / template),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - no HTML; the only value is a name that was checked
    )
    texts = {}
    for path in environment.list_templates(filter_func=lambda path: path.endswith(_SUFFIX)):
        parts = path.removesuffix(_SUFFIX).replace("MODULE", values.get("module", "")).split("/")
        target = "/".join(_DOT.sub(".", part) for part in parts)
        texts[target] = environment.get_template(path).render(values)
    return texts


def _write(folder: Path, texts: Mapping[str, str], todo: str) -> None:
    with ExitStack() as undo:
        try:
            for name, text in texts.items():
                file = folder / name
                for parent in reversed([folder for folder in file.parents if not folder.exists()]):
                    parent.mkdir()
                    undo.callback(parent.rmdir)
                with file.open("x", encoding="utf-8") as stream:
                    undo.callback(file.unlink)
                    stream.write(text)
        except OSError as error:
            raise _unwritable(folder, error, todo) from None
        undo.pop_all()


def _unwritable(folder: Path, error: OSError, todo: str) -> ProfileError:
    return ProfileError.about(f"cannot be written: {error.strerror}", found=str(folder), todo=todo)
