"""Finds dependencies of a run that neither git nor the locked environment contains.

They are files that git does not track, folders that the run listed, and environment variables that
it read. A lock stores names and digests, but skips names that may contain a secret. A changed
dependency does not violate the lock. If results differ, changed dependencies may be the cause.
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
from torchrepro.lock.diff import RUN_DEPENDENCIES, Difference
from torchrepro.lock.file_notes import LISTED, READ, VARIABLE, WRITTEN, Use
from torchrepro.lock.repository import is_of_environment
from torchrepro.manifest.contents import known_secrets

MOST_FILES, MOST_BYTES, MOST_SECONDS = 1_000, 20 * 10**9, 10.0  # limits for computing digests
_MOST_VARIABLES = 100  # a program that reads more iterates over all of them
_BLOCK = 2**20


class Dependencies(NamedTuple):
    data: Mapping[str, str] = {}  # files, each with a digest
    listed: Mapping[str, str] = {}  # folders, each with a digest of the names in it
    variables: Mapping[str, str] = {}  # each `set` or `not set`
    left_out: str = ""  # the limit that was reached, so that some files may be missing; or empty

    @classmethod
    def of(
        cls,
        root: Path,
        uses: Iterable[Use],
        began: float,
        without: Set[str],
        locked: Dependencies | None = None,
    ) -> Dependencies:
        """Return the dependencies in the `uses` of a run and in `locked`, in their present state.

        Omits the files in `without`, files that the run wrote, and names that may be secret.
        """
        past: list[Use] = []
        if locked:
            past += [Use(READ, str(path_of(name, root)), 0, 0) for name in locked.data]
            past += [Use(LISTED, str(path_of(name, root)), 0, 0) for name in locked.listed]
        kinds = file_notes.first_uses((*past, *uses))
        written = {path for path, by_kind in kinds.items() if WRITTEN in by_kind}
        parents = {str(parent) for path in written for parent in Path(path).parents}
        names: dict[str, str] = {}
        variables: dict[str, str] = {}
        clean = cleaner(known_secrets())
        for path, by_kind in sorted(kinds.items()):
            name = path if VARIABLE in by_kind else _name(path, root)
            parts = Path(name).parts
            if any(map(sounds_secret, parts)) or clean(name) != name:
                continue
            if VARIABLE in by_kind:
                variables[path] = "set" if by_kind[VARIABLE].size else "not set"
            elif (
                name not in without
                and not any(part.startswith(".") and part != ".cache" for part in parts)
                and not file_notes.is_of_cache(path)
                and not is_of_environment(Path(path), root)
            ):
                names[path] = name
        read = (path for path in names if READ in kinds[path] and path not in written)
        data, left_out = _digests(p for p in read if kinds[p][READ].changed / 1e9 < began)
        listed = (path for path in names if LISTED in kinds[path] and path not in parents)
        return cls(
            {names[path]: digest for path, digest in data.items()},
            {names[path]: _digest_of_names(path) for path in listed if Path(path).is_dir()},
            variables if len(variables) <= _MOST_VARIABLES else {},
            left_out,
        )

    @classmethod
    def held_by(cls, contents: Mapping[str, Any]) -> Dependencies:
        return cls(**{key: contents[key] for key in cls._fields if key in contents})

    def to_json(self) -> dict[str, Any]:
        return {key: it for key, it in self._asdict().items() if it or key != "left_out"}

    def differing(self, now: Dependencies, root: Path) -> Iterator[Difference]:
        """Yield the dependencies whose locked state certainly differs from the state in `now`."""
        for section in RUN_DEPENDENCIES:
            locked_states, states = getattr(self, section), getattr(now, section)
            for name in sorted({*locked_states, *states}):
                before, after = locked_states.get(name), states.get(name)
                is_gone = section != "variables" and not path_of(name, root).exists()
                is_known = before is not None or not self.left_out
                if before != after and is_known and (after is not None or is_gone):
                    yield Difference(section, name, before, after)


def _digests(paths: Iterable[str]) -> tuple[dict[str, str], str]:
    """Return a digest of each file, and in words the limit that was reached, if any."""
    digests, size, until = dict[str, str](), 0, time.monotonic() + MOST_SECONDS
    for path in paths:
        digest = xxhash.xxh3_64()
        with suppress(OSError), open(path, "rb") as file:  # noqa: PTH123 - a text
            size += os.fstat(file.fileno()).st_size
            if len(digests) == MOST_FILES:
                return digests, f"{MOST_FILES:,} files"
            if size > MOST_BYTES:
                return digests, f"{MOST_BYTES / 1e9:.0f} GB"
            while block := file.read(_BLOCK):
                if time.monotonic() > until:
                    return digests, f"{MOST_SECONDS:g} s of reading"
                digest.update(block)
            digests[path] = digest.hexdigest()
    return digests, ""


def _digest_of_names(folder: str) -> str:
    names = sorted({*os.listdir(folder)} - {*file_notes.SKIPPED_FOLDERS})  # noqa: PTH208 - names
    return xxhash.xxh3_64(repr(names).encode()).hexdigest()


def _name(path: str, root: Path) -> str:
    for folder, prefix in ((f"{root}/", ""), (f"{Path.home()}/", "~/")):
        if path.startswith(folder):
            return prefix + path.removeprefix(folder)
    return path


def path_of(name: str, root: Path) -> Path:
    """Return the path of the file or folder that a lock lists under `name`."""
    return root / Path(name).expanduser()
