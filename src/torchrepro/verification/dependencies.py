"""What a run depended on besides the files of its repository and its environment.

These are files that git does not track, folders whose names were read, and variables. A lock holds
them as digests and names, without any name that may be a secret. Nobody is held to them: they are
compared where numbers differ, before anything is blamed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from torchrepro.errors import ProfileError
from torchrepro.lock.diff import OF_A_RUN, Difference
from torchrepro.manifest.contents import secrets_here
from torchrepro.redaction import cleaner, sounds_secret
from torchrepro.verdict.render import counted
from torchrepro.verification.file_notes import (
    LEFT_OUT,
    LISTED,
    READ,
    VARIABLE,
    WRITTEN,
    Use,
    is_of_cache,
    noted,
)
from torchrepro.verification.repository import is_of_environment

MOST_FILES, MOST_BYTES, MOST_SECONDS = 1_000, 20 * 10**9, 10.0  # that are read for digests
_MOST_VARIABLES = 100  # who reads more has read them all
_BLOCK = 2**20


class Dependencies(NamedTuple):
    data: Mapping[str, str] = {}  # files, each with a digest
    listed: Mapping[str, str] = {}  # folders, each with a digest of the names in it
    variables: Mapping[str, str] = {}  # each with whether it was set
    left_out: str = ""  # the bound that was reached: there may be more

    @classmethod
    def of(
        cls, root: Path, log: Path, began: float, without: Set[str], held: Dependencies | None
    ) -> Dependencies:
        """Return what a run that began then has noted in `log`, and how what is `held` is now.

        It is without the files in `without`, what the run wrote, and what sounds secret.
        """
        kinds: dict[str, dict[str, Use]] = {}
        for name, kind in (
            *((name, READ) for name in (held.data if held else ())),
            *((name, LISTED) for name in (held.listed if held else ())),
        ):
            path = str(path_of(name, root))
            kinds.setdefault(path, {})[kind] = Use(kind, path, 0, 0)
        for use in noted(log):
            kinds.setdefault(use.path, {}).setdefault(use.kind, use)
        written = {path for path, its in kinds.items() if WRITTEN in its}
        around = {str(parent) for path in written for parent in Path(path).parents}
        clean = cleaner(secrets_here())
        names, variables = dict[str, str](), dict[str, str]()
        for path, its in sorted(kinds.items()):
            name, place = _name(path, root), Path(path)
            hidden = any(part[0] == "." != part and part != ".cache" for part in place.parts)
            if VARIABLE in its and not sounds_secret(path) and clean(path) == path:
                variables[path] = "set" if its[VARIABLE].size else "not set"
            elif not (
                hidden
                or name in without
                or any(map(sounds_secret, Path(name).parts))
                or clean(name) != name
                or is_of_cache(path)
                or is_of_environment(place, root)
            ):
                names[path] = name
        data, left_out = _digests(
            path
            for path in names
            if READ in kinds[path]
            and path not in written
            and kinds[path][READ].changed / 1e9 < began
        )
        listed = {
            names[path]: _digest_of_names(path)
            for path in names
            if LISTED in kinds[path] and path not in around and Path(path).is_dir()
        }
        if len(variables) > _MOST_VARIABLES:
            variables = {}
        return cls({names[path]: its for path, its in data.items()}, listed, variables, left_out)

    @classmethod
    def from_json(cls, contents: Mapping[str, Any], where: str) -> Dependencies:
        """Return those that a lock holds; raises `ProfileError` for damaged ones."""
        sections: dict[str, Any] = {key: contents.get(key, {}) for key in OF_A_RUN}
        for key, its in sections.items():
            if not isinstance(its, dict) or not all(isinstance(e, str) for e in its.values()):
                raise ProfileError.about("damaged: no names with their states", where, key)
        return cls(**sections, left_out=str(contents.get("left_out", "")))

    def to_json(self) -> dict[str, Any]:
        return {key: its for key, its in self._asdict().items() if its or key != "left_out"}

    @property
    def lines(self) -> Iterator[str]:
        amounts = counted(len(self.data), "file"), counted(len(self.listed), "folder")
        amount = f"{', '.join(amounts)}, {counted(len(self.variables), 'variable')}"
        if self.data or self.listed or self.variables:
            yield f"  it also depends on {amount}, whose names it holds (lock --json shows them)"
        if self.left_out:
            yield f"  no more files after {self.left_out} outside of git: these are not held"

    def differing(self, now: Dependencies, root: Path) -> Iterator[Difference]:
        """Yield what is known to differ now, and what `now` alone depends on."""
        for section in OF_A_RUN:
            mine, its = getattr(self, section), getattr(now, section)
            for name in sorted({*mine, *its}):
                before, here = mine.get(name), its.get(name)
                is_gone = section != "variables" and not path_of(name, root).exists()
                is_known = before is not None or not self.left_out
                if before != here and is_known and (here is not None or is_gone):
                    yield Difference(section, name, before, here)


def _digests(paths: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return a digest of each file, and the bound that was reached before the end of them."""
    found, size, until = dict[str, str](), 0, time.monotonic() + MOST_SECONDS
    for path in paths:
        digest = xxhash.xxh3_128()
        with suppress(OSError), open(path, "rb") as file:  # noqa: PTH123 - a text
            size += os.fstat(file.fileno()).st_size
            if len(found) == MOST_FILES:
                return found, f"{MOST_FILES:,} files"
            if size > MOST_BYTES:
                return found, f"{MOST_BYTES / 1e9:.0f} GB"
            while block := file.read(_BLOCK):
                if time.monotonic() > until:
                    return found, f"{MOST_SECONDS:g} s of reading"
                digest.update(block)
            found[path] = digest.hexdigest()
    return found, ""


def _digest_of_names(folder: str) -> str:
    names = sorted(name for name in os.listdir(folder) if name not in LEFT_OUT)  # noqa: PTH208
    return xxhash.xxh3_128(repr(names).encode()).hexdigest()


def _name(path: str, root: Path) -> str:
    for folder, before in ((f"{root}/", ""), (f"{Path.home()}/", "~/")):
        if path.startswith(folder):
            return before + path.removeprefix(folder)
    return path


def path_of(name: str, root: Path) -> Path:
    """Return where a file is that a lock names."""
    return root / Path(name).expanduser()
