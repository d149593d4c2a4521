"""Where seeding meets torch's DataLoader: the start of an iteration.

An iteration starts with ``DataLoader.__iter__``, which is wrapped while anything asks for it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, finalize

from torchrepro.imports import AfterImport
from torchrepro.seeding import fetching
from torchrepro.seeding.loading import ExplicitLoading, Loading, SeededSampler
from torchrepro.seeding.reader_hook import seeded_readers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOADERS = {"torch.utils.data": "DataLoader", "torchdata.stateful_dataloader": "StatefulDataLoader"}
"""Module -> class whose `__iter__` starts an iteration, without calling another's."""


@dataclass(slots=True)
class _State:
    """What the hook does at present."""

    automatic: bool = False
    """Whether loaders whose author seeded nothing are seeded."""

    forced_workers: int | None = None
    """The number of workers of every loader, where a profile says so."""

    explicit: int = 0
    """How many loaders made with `dataloader_kwargs` are alive."""

    begun: int = 0
    """How many loaders were seeded for their author: the next one's number."""

    resumed: dict[str, int] = field(default_factory=dict)
    """Loaders of a snapshot that have not appeared yet, each with the epoch it goes on with."""


_state = _State()
_loadings: WeakKeyDictionary[Any, Loading] = WeakKeyDictionary()
_originals: dict[type, Callable[..., Any]] = {}
_finder: list[AfterImport] = []


@dataclass(frozen=True, slots=True)
class SeedingPolicy:
    """Whether loaders whose author seeded nothing are seeded: `auto` or `none`."""

    def read(self) -> str:
        return "auto" if _state.automatic else "none"

    def write(self, value: str) -> None:
        for loading in _loadings.values():
            loading.active = False
        _loadings.clear()
        _state.automatic, _state.begun, _state.resumed = value == "auto", 0, {}
        _settle()

    def save(self) -> Any:
        return _state.automatic, _state.begun, _state.resumed, dict(_loadings)

    def restore(self, saved: Any) -> None:
        automatic, begun, resumed, loadings = saved
        self.write("auto" if automatic else "none")
        _state.begun, _state.resumed = begun, resumed
        for loader, loading in loadings.items():
            loading.active = True
            _loadings[loader] = loading


@dataclass(frozen=True, slots=True)
class WorkersPolicy:
    """How many workers every loader uses, whatever its author said."""

    def read(self) -> int | None:
        return _state.forced_workers

    def write(self, value: int | None) -> None:
        _state.forced_workers = value
        _settle()

    save = read
    restore = write


def watch(loading: ExplicitLoading) -> None:
    """Seed the loader that uses `loading`, for as long as it is alive."""
    _state.explicit += 1
    finalize(loading, _let_go)
    _settle()


def loading_of(loader: Any) -> Loading | None:
    """Return what seeds `loader`: its own, or the profile's where its author seeded nothing."""
    own = getattr(loader, "worker_init_fn", None)
    if isinstance(own, Loading):
        return own
    if not _state.automatic or own is not None or getattr(loader, "generator", None) is not None:
        return None
    if loader not in _loadings:
        if getattr(loader, "_iterator", None) is not None:
            return None  # its workers started before the profile was in force
        _loadings[loader] = _next_loading()
    return _loadings[loader]


def _next_loading() -> Loading:
    """Return the seeding of a loader seen for the first time: a resumed one, else a new one."""
    if _state.resumed:
        name = next(iter(_state.resumed))
        return Loading(name, _state.resumed.pop(name))
    _state.begun += 1
    return Loading(f"dataloader-{_state.begun - 1}")


def epochs() -> dict[str, Any]:
    """Return how far the loaders that the profile seeds have come, as plain JSON values."""
    by_name = {loading.name: loading.next_epoch for loading in _loadings.values()}
    return {"begun": _state.begun, "next_epoch": {**_state.resumed, **by_name}}


def set_epochs(saved: dict[str, Any]) -> None:
    """Have the loaders that the profile seeds go on where `epochs` found them.

    A loader that does not exist yet gets its place when its turn comes.
    """
    _state.begun, _state.resumed = saved["begun"], dict(saved["next_epoch"])
    for loading in _loadings.values():
        loading.next_epoch = _state.resumed.pop(loading.name, loading.next_epoch)


def _let_go() -> None:
    _state.explicit -= 1
    _settle()


def _settle() -> None:
    """Hook every loader class that is there, or none, as the present state asks."""
    if not (_state.automatic or _state.explicit or _state.forced_workers is not None):
        for kind, original in _originals.items():
            kind.__iter__ = original  # type: ignore[attr-defined]
        _originals.clear()
        for finder in _finder:
            sys.meta_path.remove(finder)
        _finder.clear()
        return
    if not _finder:
        _finder.append(AfterImport(LOADERS, _hook))
        sys.meta_path.insert(0, _finder[0])
    for module in LOADERS:
        if module in sys.modules:
            _hook(module)


def _hook(module: str) -> None:
    kind = getattr(sys.modules[module], LOADERS[module])
    if kind not in _originals:
        _originals[kind] = kind.__iter__
        kind.__iter__ = _seeding(kind.__iter__)


def _seeding(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def iterate(loader: Any) -> Any:
        with ExitStack() as until_begun:
            if _state.forced_workers is not None:
                until_begun.enter_context(_with(loader, num_workers=_state.forced_workers))
                until_begun.enter_context(_with(loader, timeout=0))
            loading = loading_of(loader)
            if loading is not None:
                until_begun.enter_context(_begun(loader, loading))
            return original(loader)

    return iterate


@contextmanager
def _begun(loader: Any, loading: Loading) -> Iterator[None]:
    """Begin an epoch of `loader`: what it builds within the block is seeded."""
    loading.begin()
    sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
    outside = fetching.enter()
    try:
        # In the main process an IterableDataset is read as by the only worker of a loader.
        fetching.draw_from(fetching.worker_stream(loading.stream, 0))
        seeded = SeededSampler(getattr(loader, sampler), loading)
        with (
            _with(loader, **{sampler: seeded}),
            _with(loader, worker_init_fn=loading),
            # A worker that is forked here must find torch's own readers.
            nullcontext() if loader.num_workers else seeded_readers(loading.stream),
        ):
            yield
    finally:
        fetching.leave(outside)


@contextmanager
def _with(loader: Any, **attributes: Any) -> Iterator[None]:
    """Give `loader` other attributes for the length of the block.

    Through its dict, because a DataLoader forbids to assign some of them.
    """
    before = {name: vars(loader)[name] for name in attributes}
    vars(loader).update(attributes)
    try:
        yield
    finally:
        vars(loader).update(before)
