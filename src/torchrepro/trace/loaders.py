"""The loaders that a program iterates, as its trace tells of them.

What is read of an iterator of torch's is private. A fact that a newer torch no longer has there is
left out, and so is a loader whose objects raise where they are looked at.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from torchrepro.seeding.loader_hook import author_worker_init
from torchrepro.trace.frames import source_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from torchrepro.trace.frames import Place

_OF_DATAPIPES = "_sharding_worker_init_fn"  # torch's own, around that of the author


def workers_of(iterator: Any) -> int:
    """Return how many worker processes load for an iterator of a loader."""
    return int(getattr(iterator, "_num_workers", 0))


class IteratedLoaders:
    """The loaders that were iterated, each once for every line that iterates it."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, Mapping[str, Any]] = {}

    def see(self, iterator: Any, place: Place) -> None:
        """Note the loader behind `iterator`, which `place` has asked for a batch."""
        with suppress(Exception):  # a class of the program's may raise what it likes
            its = _known_of(iterator, place)
            self._seen[tuple(its.values())] = its

    def meta(self) -> Mapping[str, Any]:
        """Return what is known as part of a trace's meta."""
        return {"loaders": list(self._seen.values())}


def _known_of(iterator: Any, place: Place) -> Mapping[str, Any]:
    dataset = getattr(iterator, "_dataset", None)
    return {
        "where": source_of(place),
        "workers": workers_of(iterator),
        "dataset": type(dataset).__name__,
        "iterable": isinstance(dataset, IterableDataset),
        "worker_init_fn": _own_init(getattr(iterator, "_worker_init_fn", None)),
    }


def _own_init(init: Any) -> str | None:
    """Return name and place of the author's `worker_init_fn`; None without one."""
    if isinstance(init, partial) and getattr(init.func, "__name__", "") == _OF_DATAPIPES:
        init = init.args[0]
    init = author_worker_init(init)
    if init is None:
        return None
    while isinstance(init, partial):
        init = init.func
    function = getattr(init, "__func__", init)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"
