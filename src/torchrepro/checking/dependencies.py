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

from torchrepro.ground.redaction import cleaner, sounds_secret
from torchrepro.lock import file_notes
from torchrepro.lock.diff import OF_A_RUN, Difference
from torchrepro.lock.file_notes import LISTED, READ, VARIABLE, WRITTEN, Use
from torchrepro.lock.repository import is_of_environment
from torchrepro.manifest.contents import secrets_here

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
        before = {READ: held.data, LISTED: held.listed} if held else {}
        past = [
            Use(kind, str(path_of(name, root)), 0, 0) for kind in before for name in before[kind]
        ]
        kinds: dict[str, dict[str, Use]] = {}
        for use in (*past, *file_notes.noted(log)):
            kinds.setdefault(use.path, {}).setdefault(use.kind, use)
        written = {path for path, its in kinds.items() if WRITTEN in its}
        around = {str(parent) for path in written for parent in Path(path).parents}
        names: dict[str, str] = {}
        variables: dict[str, str] = {}
        clean = cleaner(secrets_here())
        for path, its in sorted(kinds.items()):
            name = path if VARIABLE in its else _name(path, root)
            parts = Path(name).parts
            if any(map(sounds_secret, parts)) or clean(name) != name:
                continue
            if VARIABLE in its:
                variables[path] = "set" if its[VARIABLE].size else "not set"
            elif (
                name not in without
                and not any(part.startswith(".") and part != ".cache" for part in parts)
                and not file_notes.is_of_cache(path)
                and not is_of_environment(Path(path), root)
            ):
                names[path] = name
        read = (path for path in names if READ in kinds[path] and path not in written)
        data, left_out = _digests(p for p in read if kinds[p][READ].changed / 1e9 < began)
        listed = (path for path in names if LISTED in kinds[path] and path not in around)
        return cls(
            {names[path]: its for path, its in data.items()},
            {names[path]: _digest_of_names(path) for path in listed if Path(path).is_dir()},
            variables if len(variables) <= _MOST_VARIABLES else {},
            left_out,
        )

    @classmethod
    def held_by(cls, contents: Mapping[str, Any]) -> Dependencies:
        return cls(**{key: contents[key] for key in cls._fields if key in contents})

    def to_json(self) -> dict[str, Any]:
        return {key: its for key, its in self._asdict().items() if its or key != "left_out"}

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
        digest = xxhash.xxh3_64()
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
    names = sorted({*os.listdir(folder)} - {*file_notes.LEFT_OUT})  # noqa: PTH208 - names
    return xxhash.xxh3_64(repr(names).encode()).hexdigest()


def _name(path: str, root: Path) -> str:
    for folder, before in ((f"{root}/", ""), (f"{Path.home()}/", "~/")):
        if path.startswith(folder):
            return before + path.removeprefix(folder)
    return path


def path_of(name: str, root: Path) -> Path:
    """Return where a file is that a lock names."""
    return root / Path(name).expanduser()
