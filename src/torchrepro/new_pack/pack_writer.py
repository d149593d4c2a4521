"""Write the folder of a new pack of profiles from the templates beside this file."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem, shown
from torchrepro.profile.search_path import DISTRIBUTION, ENTRY_POINTS, PIECES, SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping


TEMPLATE = Path(__file__).parent / "template"
SUFFIX = ".jinja"
VERSION = "0.1.0"
SCHEMA_FILE = "profile.schema.json"
PUBLISHED = "published.json"
_DOT = "dot-"  # stands for a dot, because many tools do not copy files that begin with one

LEGAL = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
LONGEST = 40  # characters; the name is typed on command lines
RESERVED = {
    PIECES: "that is the name of the folder of pieces",
    DISTRIBUTION: "torchrepro's own profiles need no prefix",
}


@dataclass(frozen=True, slots=True)
class PackName:
    """The name of a pack, with which the names of its profiles begin."""

    text: str

    @property
    def module(self) -> str:
        """The package that holds the profiles."""
        return f"{self.text.replace('-', '_')}_profiles"

    @property
    def distribution(self) -> str:
        """What an index calls the pack."""
        return f"{self.text.replace('_', '-')}-profiles"


@dataclass(frozen=True, slots=True)
class NewPack:
    """A pack that was written."""

    folder: Path
    name: PackName
    files: tuple[str, ...]
    """Paths in the folder, sorted."""

    profiles: tuple[str, ...]
    """The names of its profiles and pieces once it is installed, sorted."""


def pack_name(folder: Path) -> PackName:
    """Return the name of the pack to be written into `folder`, which is the folder's last part.

    Raises `ProfileError` for a name that no pack can have, or that is taken.
    """
    text = folder.name
    if not LEGAL.fullmatch(text) or len(text) > LONGEST:
        raise ProfileError(
            Problem(
                "not the name of a pack",
                found=shown(text or str(folder)),
                legal=f"words of a-z and 0-9, joined by - or _, at most {LONGEST} characters",
                near=_mended(text),
            )
        )
    name = PackName(text)
    why = RESERVED.get(text) or _taken(name)
    if why:
        raise ProfileError(Problem(f"a pack cannot have this name: {why}", found=text))
    return name


def _mended(text: str) -> str:
    """Return the legal name that is closest to `text`, if there is one."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    mended = "-".join(words)[:LONGEST].rstrip("-")
    return mended if LEGAL.fullmatch(mended) else ""


def _taken(name: PackName) -> str:
    """Return in words what is installed already under a name that the pack would have."""
    for entry in entry_points(group=ENTRY_POINTS, name=name.text):
        owner = entry.dist.name if entry.dist else entry.value
        return f"{owner} is installed, and its profiles are called {name.text}/..."
    if find_spec(name.module) is not None:
        return f"a module {name.module} is installed"
    try:
        return f"a distribution {distribution(name.distribution).name} is installed"
    except PackageNotFoundError:
        return ""


def write_pack(folder: Path) -> NewPack:
    """Write a pack named after the last part of `folder`, which has to be new or empty.

    Raises `ProfileError`, and leaves nothing behind, if the name or the folder cannot be used.
    """
    from torchrepro.profile.json_schema import json_schema

    name = pack_name(folder)
    _refuse_used(folder)
    texts = _rendered(name)
    digests = _digests(name, texts)
    texts[PUBLISHED] = json.dumps({VERSION: digests}, indent=2) + "\n"
    texts[SCHEMA_FILE] = json.dumps(json_schema(), indent=2) + "\n"
    _write(folder, texts)
    return NewPack(folder, name, tuple(sorted(texts)), tuple(digests))


def _refuse_used(folder: Path) -> None:
    try:
        used = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise _unwritable(folder, error) from None
    if used:
        raise ProfileError(
            Problem(
                "the folder exists and is not empty",
                found=str(folder),
                todo="name another folder, or remove what is in it",
            )
        )


def _rendered(name: PackName) -> dict[str, str]:
    """Return the text of every file under its path in the pack."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATE),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - no HTML; the only value is a name that was checked
    )
    values = {"name": name.text, "module": name.module, "distribution": name.distribution}
    templates = environment.list_templates(filter_func=lambda path: path.endswith(SUFFIX))
    return {
        _place(path, name): environment.get_template(path).render(values, version=VERSION)
        for path in templates
    }


def _place(template: str, name: PackName) -> str:
    """Return where the file of a template lies in the pack."""
    parts = template.removesuffix(SUFFIX).replace("MODULE", name.module).split("/")
    return "/".join(re.sub(f"^{_DOT}", ".", part) for part in parts)


def _digests(name: PackName, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of every profile and piece, by its name once it is installed."""
    from torchrepro.profile.compose import compose_document
    from torchrepro.profile.document import parse_document
    from torchrepro.profile.load import validate

    root = f"src/{name.module}/"
    digests = {}
    for path in sorted(path for path in texts if path.endswith(SUFFIXES)):
        composition = compose_document(parse_document(texts[path], path))
        installed = f"{name.text}/{path.removeprefix(root).rpartition('.')[0]}"
        digests[installed] = validate(composition).digest
    return digests


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write all files, or none: what was made is removed again if one cannot be written."""
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        for path, text in texts.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(made[-1] if made else folder, ignore_errors=True)
        if not made:
            folder.mkdir(exist_ok=True)  # it was there before, and empty
        raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> ProfileError:
    what = f"cannot be written: {error.strerror}"
    return ProfileError(Problem(what, found=str(folder), todo="name another folder"))
