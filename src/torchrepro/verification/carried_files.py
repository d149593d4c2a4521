"""Files that one run wrote and the next one read, which make two runs of a program differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.messages import printable
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrepro.verification.result import Run


@dataclass(frozen=True, slots=True)
class CarriedFile:
    """A file that a run read as the run before it had left it."""

    path: str
    written: str
    """The line of the program that wrote it, as ``file:line``; empty where that was not heard."""
    read: str
    """The line that first read it in the later run."""


def carried(first: Run, second: Run) -> tuple[CarriedFile, ...]:
    """Return the files that `second` read as they had been written since `first` began.

    The runs are those of one command, one after the other. Empty where one was not recorded up to
    its end.
    """
    if not (first.recorded and second.recorded):
        return ()
    earlier, later = (_facts_of(run) for run in (first, second))
    if not (earlier and later):
        return ()
    begun, ended = (min(meta["began"] for meta in side) for side in (earlier, later))
    written = {each["path"]: each["written"] for meta in earlier for each in meta["files"]}
    read = {
        each["path"]: each["read"]
        for meta in later
        for each in meta["files"]
        if each["read"] and begun <= each["changed"] < ended
    }
    return tuple(
        CarriedFile(printable(path), printable(written.get(path, "")), printable(where))
        for path, where in read.items()
    )


def _facts_of(run: Run) -> list[Mapping[str, Any]]:
    found = []
    for trace in read_run(run.folder, records=False):
        trace.close()
        if trace.meta.get("began") is not None and trace.meta.get("files") is not None:
            found.append(trace.meta)
    return found
