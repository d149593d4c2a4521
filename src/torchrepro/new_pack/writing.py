"""Write the folder of a new pack from the templates beside this file."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import ProfileError
from torchrepro.messages import Problem
from torchrepro.new_pack.naming import PackName, pack_name
from torchrepro.profile.folder import SUFFIXES

if TYPE_CHECKING:
    from collections.abc import Mapping

TEMPLATE = Path(__file__).parent / "template"
SUFFIX = ".jinja"
VERSION = "0.1.0"
SCHEMA_FILE = "profile.schema.json"
PUBLISHED = "published.json"
_HIDDEN = "dot-"  # a file that begins with a dot would be left out of many a copy of the templates


@dataclass(frozen=True, slots=True)
class NewPack:
    """A pack that was written."""

    folder: Path
    name: PackName
    files: tuple[str, ...]
    """Paths in the folder, sorted."""

    profiles: tuple[str, ...]
    """What its profiles and pieces are called once it is installed, sorted."""


def write_pack(folder: Path) -> NewPack:
    """Write a pack called after the last part of `folder`, which has to be new or empty.

    Raises `ProfileError`, and leaves nothing behind, if the name or the folder cannot be used.
    """
    name = pack_name(folder)
    _refuse_used(folder)
    texts = _rendered(name)
    digests = _digests(name, texts)
    texts[PUBLISHED] = json.dumps({VERSION: digests}, indent=2) + "\n"
    texts[SCHEMA_FILE] = schema_text()
    _write(folder, texts)
    return NewPack(folder, name, tuple(sorted(texts)), tuple(digests))


def schema_text() -> str:
    """Return the JSON Schema of a profile as `torchrepro schema` prints it."""
    from torchrepro.profile.json_schema import json_schema

    return json.dumps(json_schema(), indent=2) + "\n"


def _refuse_used(folder: Path) -> None:
    try:
        used = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise _unwritable(folder, error) from None
    if used:
        raise ProfileError(
            Problem(
                "the folder is there and not empty",
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
    return "/".join(
        f".{part.removeprefix(_HIDDEN)}" if part.startswith(_HIDDEN) else part for part in parts
    )


def _digests(name: PackName, texts: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of every profile and piece under the name that it has once installed."""
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
    return ProfileError(Problem(f"cannot be written: {error.strerror}", found=str(folder)))
