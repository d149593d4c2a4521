"""Where seeding meets torch's DataLoader: the start of an iteration.

An iteration starts with ``DataLoader.__iter__``, which is wrapped while anything asks for it.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet, finalize

from torchrepro.imports import AfterImport
from torchrepro.seeding import drawing
from torchrepro.seeding.loading import ExplicitLoading, Loading, SeededSampler
from torchrepro.seeding.reader_hook import seeded_readers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

LOADERS = {
    "torch.utils.data": ("DataLoader", ("__iter__",)),
    "torchdata.stateful_dataloader": ("StatefulDataLoader", ("__iter__", "state_dict")),
}
"""Module -> class whose methods start an iteration, without calling another's."""

_STARTS: Mapping[str, Callable[[Any], bool]] = {
    # torchdata starts an iteration when it is asked for a state before the first batch.
    "__iter__": lambda loader: not getattr(loader, "_initial_iter_for_state_dict", False),
    "state_dict": lambda loader: loader._iterator is None,  # noqa: SLF001 - see above
}
"""Method -> whether calling it now starts an iteration."""


@dataclass(slots=True)
class _State:
    """What the hook does at present."""

    automatic: bool = False
    """Whether loaders whose author seeded nothing are seeded."""

    forced_workers: int | None = None
    """The number of workers of every loader, where a profile says so."""

    explicit: WeakSet[ExplicitLoading] = field(default_factory=WeakSet)
    """The seeding of the loaders made with `dataloader_kwargs`, while they are alive."""


@dataclass(slots=True)
class Register:
    """The loaders seen since a seed came in force, and how far they have come."""

    loadings: WeakKeyDictionary[Any, Loading] = field(default_factory=WeakKeyDictionary)
    """The loaders whose author seeded nothing, each with what seeds it."""

    begun: int = 0
    """How many such loaders there were: the next one's number."""

    resumed: dict[str, int] = field(default_factory=dict)
    """Such loaders of a snapshot that have not appeared yet, each with its next epoch."""

    named: dict[str, int] = field(default_factory=dict)
    """Names of other loaders in a snapshot, not made again yet, each with its next epoch."""


_state = _State()
_register = Register()
_originals: dict[tuple[type, str], Callable[..., Any]] = {}
_finder: list[AfterImport] = []


@dataclass(frozen=True, slots=True)
class SeedingPolicy:
    """Whether loaders whose author seeded nothing are seeded: `auto` or `none`."""

    def read(self) -> str:
        return "auto" if _state.automatic else "none"

    def write(self, value: str) -> None:
        _state.automatic = value == "auto"
        _mark(_register)
        _settle()

    save = read
    restore = write


def present_register() -> Register:
    """Return the register of loaders that belongs to the seed in force."""
    return _register


def put_register(register: Register) -> None:
    """Make `register` the one in use: an empty one with a new seed, the old one with its undo."""
    global _register  # noqa: PLW0603 - one piece of process state, and this its only writer
    for loading in _register.loadings.values():
        loading.active = False
    _register = register
    _mark(register)


def _mark(register: Register) -> None:
    """Tell workers that live on whether their loader is seeded at present."""
    for loading in register.loadings.values():
        loading.active = _state.automatic


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
    _state.explicit.add(loading)
    finalize(loading, _settle)
    _settle()


def first_epoch(name: str) -> int:
    """Return the epoch with which a new loader called `name` goes on: 0 unless it is resumed."""
    return _register.named.pop(name, 0)


def loading_of(loader: Any) -> Loading | None:
    """Return what seeds `loader`: its own, or the profile's where its author seeded nothing."""
    own = getattr(loader, "worker_init_fn", None)
    if isinstance(own, Loading):
        return own
    if not _state.automatic or own is not None or getattr(loader, "generator", None) is not None:
        return None
    if drawing.is_loading():
        return None  # a dataset's own loader draws from what its sample draws from
    if loader not in _register.loadings:
        if getattr(loader, "_iterator", None) is not None:
            return None  # its workers started before the profile was in force
        _register.loadings[loader] = _next_loading()
    return _register.loadings[loader]


def _next_loading() -> Loading:
    """Return the seeding of a loader seen for the first time: a resumed one, else a new one."""
    if _register.resumed:
        name = next(iter(_register.resumed))
        return Loading(name, _register.resumed.pop(name))
    _register.begun += 1
    return Loading(f"dataloader-{_register.begun - 1}")


def epochs() -> dict[str, Any]:
    """Return how far every seeded loader has come, as plain JSON values."""
    seen = {loading.name: loading.next_epoch for loading in _register.loadings.values()}
    named = {loading.name: loading.next_epoch for loading in _state.explicit}
    return {
        "begun": _register.begun,
        "next_epoch": {**_register.resumed, **seen},
        "named": {**_register.named, **named},
    }


def set_epochs(saved: dict[str, Any]) -> None:
    """Have every seeded loader go on where `epochs` found it.

    A loader that does not exist yet gets its place when its turn comes.
    """
    _register.begun, _register.resumed = saved["begun"], dict(saved["next_epoch"])
    for loading in _register.loadings.values():
        loading.next_epoch = _register.resumed.pop(loading.name, loading.next_epoch)
    _register.named = dict(saved["named"])
    for explicit in _state.explicit:
        explicit.next_epoch = saved["named"].get(explicit.name, explicit.next_epoch)
        _register.named.pop(explicit.name, None)


def _settle() -> None:
    """Hook every loader class that is there, or none, as the present state asks."""
    # The set itself counts what is going away at this moment.
    explicit = any(True for _ in _state.explicit)
    if not (_state.automatic or explicit or _state.forced_workers is not None):
        for (kind, method), original in _originals.items():
            setattr(kind, method, original)
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
    name, methods = LOADERS[module]
    kind = getattr(sys.modules[module], name)
    for method in methods:
        if (kind, method) not in _originals:
            _originals[kind, method] = getattr(kind, method)
            setattr(kind, method, _seeding(method, getattr(kind, method)))


def _seeding(method: str, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def start(loader: Any) -> Any:
        if not _STARTS[method](loader):
            return original(loader)
        with ExitStack() as until_begun:
            if _state.forced_workers is not None:
                until_begun.enter_context(_with(loader, num_workers=_state.forced_workers))
                until_begun.enter_context(_with(loader, timeout=0))
            loading = loading_of(loader)
            if loading is not None:
                until_begun.enter_context(_begun(loader, loading))
            return original(loader)

    return start


@contextmanager
def _begun(loader: Any, loading: Loading) -> Iterator[None]:
    """Begin an epoch of `loader`: what it builds within the block is seeded."""
    loading.begin()
    sampler = "sampler" if loader.batch_sampler is None else "batch_sampler"
    outside = drawing.enter()
    try:
        # In the main process an IterableDataset is read as by the only worker of a loader.
        drawing.draw_from(drawing.worker_stream(loading.stream, 0))
        if isinstance(loading, ExplicitLoading):
            loading.start_order(loader.generator)
        seeded = SeededSampler(getattr(loader, sampler), loading, loader.generator)
        with (
            _with(loader, **{sampler: seeded}),
            _with(loader, worker_init_fn=loading),
            # A worker that is forked here must find torch's own readers.
            nullcontext() if loader.num_workers else seeded_readers(loading.stream),
        ):
            yield
    finally:
        drawing.leave(outside)


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
