"""Which loaders are seeded, under what name, and how far each has come."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torchrepro.seeding import drawing
from torchrepro.seeding.loading import ExplicitLoading, Loading


@dataclass(slots=True)
class Register:
    """The loaders seen since a seed came in force, and how far they have come."""

    loadings: WeakKeyDictionary[Any, Loading] = field(default_factory=WeakKeyDictionary)
    """The loaders whose author seeded nothing, each with what seeds it."""

    begun: Counter[str] = field(default_factory=Counter)
    """How many such loaders there were of each kind of dataset."""

    resumed: dict[str, int] = field(default_factory=dict)
    """Such loaders of a snapshot that have not appeared yet, each with its next epoch."""

    named: dict[str, int] = field(default_factory=dict)
    """Names of other loaders in a snapshot, not made again yet, each with its next epoch."""


@dataclass(slots=True)
class _State:
    """What the register is asked to do at present."""

    automatic: bool = False
    """Whether loaders whose author seeded nothing are seeded."""

    register: Register = field(default_factory=Register)
    explicit: WeakSet[ExplicitLoading] = field(default_factory=WeakSet)
    """The seeding of the loaders made with `dataloader_kwargs`, while they are alive."""


_state = _State()


def automatic() -> bool:
    """Whether loaders whose author seeded nothing are seeded."""
    return _state.automatic


def set_automatic(seeded: bool) -> None:  # noqa: FBT001 - the state itself
    """Seed loaders whose author seeded nothing, or leave them alone."""
    _state.automatic = seeded
    _mark(_state.register)


def add(loading: ExplicitLoading) -> None:
    """Know of a loader made with `dataloader_kwargs`, for as long as it is alive."""
    _state.explicit.add(loading)


def has_explicit() -> bool:
    """Whether a loader made with `dataloader_kwargs` is alive."""
    return any(True for _ in _state.explicit)  # the set itself counts what is just going away


def present_register() -> Register:
    """Return the register of loaders that belongs to the seed in force."""
    return _state.register


def put_register(register: Register) -> None:
    """Make `register` the one in use: an empty one with a new seed, the old one with its undo."""
    for loading in _state.register.loadings.values():
        loading.active = False
    _state.register = register
    _mark(register)


def _mark(register: Register) -> None:
    """Tell workers that live on whether their loader is seeded at present."""
    for loading in register.loadings.values():
        loading.active = _state.automatic


def first_epoch(name: str) -> int:
    """Return the epoch with which a new loader called `name` goes on: 0 unless it is resumed."""
    return _state.register.named.pop(name, 0)


def loading_of(loader: Any) -> Loading | None:
    """Return what seeds `loader`: its own, or the profile's where its author seeded nothing."""
    own = getattr(loader, "worker_init_fn", None)
    if isinstance(own, Loading):
        return own
    if not _state.automatic or not _can_be_seeded(loader):
        return None
    known = _state.register.loadings
    if loader not in known:
        if getattr(loader, "_iterator", None) is not None:
            return None  # its workers started before the profile was in force
        known[loader] = _next_loading(_kind(loader.dataset))
    return known[loader]


def author_seeds(loader: Any) -> bool:
    """Whether the author of `loader` gave it a generator or a `worker_init_fn`."""
    given = (getattr(loader, name, None) for name in ("worker_init_fn", "generator"))
    return any(value is not None for value in given)


def bind(loader: Any, name: str) -> None:
    """Have `loader`, seeded by the profile, go on as the loader called `name`."""
    present = loading_of(loader)
    if present is not None and not isinstance(present, ExplicitLoading) and present.name != name:
        _state.register.loadings[loader] = Loading(name, present.next_epoch)


def _can_be_seeded(loader: Any) -> bool:
    from torch.utils.data import DataLoader

    if not isinstance(loader, DataLoader) or type(loader).__hash__ is None or author_seeds(loader):
        return False
    if drawing.is_loading():
        return False  # a dataset's own loader draws from what its sample draws from
    if not {"sampler", "batch_sampler"} <= vars(loader).keys():
        return False  # a class that makes them up has no place where seeding could step in
    if threading.current_thread() is not threading.main_thread():
        # Seeding goes through the global generators, from which other threads draw meanwhile.
        warnings.warn(
            "a DataLoader is iterated outside of the main thread: dataloader.seeding leaves it "
            "as its author made it; give it torchrepro.dataloader_kwargs(name)",
            stacklevel=5,
        )
        return False
    return True


def _kind(dataset: Any) -> str:
    """Return what loaders over alike datasets have in common, whatever order they are used in."""
    try:
        length = str(len(dataset))
    except Exception:  # noqa: BLE001 - a dataset without a length raises what its author likes
        length = "?"
    return f"{type(dataset).__name__}[{length}]"


def _next_loading(kind: str) -> Loading:
    """Return the seeding of a loader seen for the first time: a resumed one, else a new one."""
    register = _state.register
    for name in register.resumed:
        if name.rpartition("#")[0] == kind:
            return Loading(name, register.resumed.pop(name))
    register.begun[kind] += 1
    return Loading(f"{kind}#{register.begun[kind]}")


def epochs() -> dict[str, Any]:
    """Return how far every seeded loader has come, as plain JSON values."""
    register = _state.register
    seen = {loading.name: loading.next_epoch for loading in register.loadings.values()}
    named = {loading.name: loading.next_epoch for loading in _state.explicit}
    return {
        "begun": dict(register.begun),
        "next_epoch": {**register.resumed, **seen},
        "named": {**register.named, **named},
    }


def set_epochs(saved: dict[str, Any]) -> None:
    """Have every seeded loader go on where `epochs` found it.

    A loader that does not exist yet gets its place when its turn comes, and so does one that
    `epochs` had not seen.
    """
    register = _state.register
    register.begun, register.resumed = Counter(saved["begun"]), dict(saved["next_epoch"])
    for loader, loading in list(register.loadings.items()):
        if loading.name in register.resumed:
            loading.next_epoch = register.resumed.pop(loading.name)
        else:
            del register.loadings[loader]
    register.named = dict(saved["named"])
    for explicit in _state.explicit:
        explicit.next_epoch = saved["named"].get(explicit.name, explicit.next_epoch)
        register.named.pop(explicit.name, None)
