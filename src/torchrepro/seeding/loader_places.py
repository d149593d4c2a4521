"""Where the seeded loaders of a run are, and how another run goes on there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.seeding.loader import (
    ExplicitLoading,
    Loading,
    Place,
    bind_loader,
    is_kept,
    loaders,
    loading_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.seeding.loader import LateStart


@dataclass(frozen=True, slots=True)
class SameEpochs:
    """Tells samplers the epochs that were saved, in the epoch that was interrupted.

    For a framework that tells them every later epoch by itself.
    """

    epoch: int
    saved: tuple[int, ...]

    def __call__(self, loading: Loading) -> tuple[int, ...]:
        return self.saved if loading.epoch == self.epoch else ()


@dataclass(frozen=True, slots=True)
class CountedEpochs(SameEpochs):
    """Tells samplers the epochs that were saved, and counts on from there.

    For a framework that begins to count at 0 again when a run is resumed.
    """

    def __call__(self, loading: Loading) -> tuple[int, ...]:
        return tuple(epoch + loading.epoch - self.epoch for epoch in self.saved)


def saved_place(loader: Any) -> dict[str, Any] | None:
    """Return the place of `loader` as plain JSON values.

    None where it is not seeded, and before its first iteration: to ask gives it no name.
    """
    loading = known_loading(loader)
    return None if loading is None else _saved(loading)


def _saved(loading: Loading) -> dict[str, Any]:
    place = loading.place
    samplers = [epoch + place.epoch - loading.epoch for epoch in loading.sampler_epochs]
    saved = {"name": loading.name, **place._asdict(), "samplers": samplers}
    if not loading.is_iterated:
        return saved
    return {**saved, "given_seed": loading.given_seed, "batch_size": loading.batch_size}


def take_up(loader: Any, saved: Mapping[str, Any]) -> Loading | None:
    """Have `loader` go on where `saved_place` found it, and return what seeds it.

    None where nothing does: it then begins an epoch of its own.
    """
    bind_loader(loader, saved["name"])
    loading = loading_of(loader)
    if loading is not None:
        loading.go_to(Place(saved["epoch"], saved["batches"]))
        _go_on_in_epoch(loading, saved)
        loading.told_epochs = SameEpochs(saved["epoch"], tuple(saved["samplers"]))
    return loading


def known_loading(loader: Any) -> Loading | None:
    """Return what seeds `loader`, as `loading_of` does; None before its first iteration as well.

    To ask for it does not give a loader its name, which depends on the order of first iterations.
    """
    own = getattr(loader, "worker_init_fn", None)
    return own if isinstance(own, Loading) else _registered(loader)


def _registered(loader: Any) -> Loading | None:
    """Return what seeds `loader` by the profile; None for what is no loader of torch as well."""
    return loaders.register.loadings.get(loader) if is_kept(loader) else None


def count_on(loader: Any) -> None:
    """Have the samplers of `loader`, which was taken up, count later epochs from there as well."""
    loading = loading_of(loader)
    if loading is not None and isinstance(loading.told_epochs, SameEpochs):
        loading.told_epochs = CountedEpochs(loading.told_epochs.epoch, loading.told_epochs.saved)


def stand_for(loader: Any, other: Any, late: LateStart | None) -> Loading | None:
    """Have `other` iterate the epochs of `loader` in its place, each with a `late` start, if any.

    Returns what seeds both; None where nothing seeds `loader`.
    """
    loading = loading_of(loader)
    if loading is None:
        return None
    if not isinstance(loading, ExplicitLoading):  # that one is the other's `worker_init_fn` as well
        loaders.register.loadings[other] = loading
    if late is not None:
        loaders.late[other] = late
    return loading


def hand_on(loader: Any) -> None:
    """Have the next loader that appears over a dataset alike go on where `loader` is.

    For one that is not iterated again. One with workers that live on is, and keeps its place.
    """
    if getattr(loader, "_iterator", None) is not None:
        return
    loading = _registered(loader)
    if loading is not None:
        del loaders.register.loadings[loader]
        loaders.register.resumed[loading.name] = loading.next_epoch


def interrupted() -> list[dict[str, Any]]:
    """Return the places of the loaders that the program is in the middle of."""
    # A loader that stands for another one has its seeding.
    seeded = dict.fromkeys((*loaders.register.loadings.values(), *loaders.explicit))
    return [_saved(each) for each in seeded if each.is_iterated]


def begin_again(places: list[dict[str, Any]], before_first_batch: Callable[[], None]) -> None:
    """Have each loader of `interrupted` begin its epoch again, at its first batch.

    `before_first_batch` is called before that. A loader that does not exist yet begins so when its
    turn comes. Later epochs of its samplers are counted from there.
    """
    register = loaders.register
    present = {each.name: each for each in (*register.loadings.values(), *loaders.explicit)}
    for saved in places:
        name, epoch = saved["name"], saved["epoch"]
        begin = partial(_begin_again, saved=saved, before_first_batch=before_first_batch)
        if name in present:
            present[name].go_to(Place(epoch, 0))
            begin(present[name])
        else:
            (register.named if name in register.named else register.resumed)[name] = epoch
            register.awaited[name] = begin


def await_first_batch(name: str, before_first_batch: Callable[[], None]) -> None:
    """Call `before_first_batch` before the first batch of the loader `name`, once it appears."""
    loaders.register.awaited[name] = lambda loading: loading.before_first_batch.append(
        before_first_batch
    )


def _begin_again(
    loading: Loading, saved: Mapping[str, Any], before_first_batch: Callable[[], None]
) -> None:
    _go_on_in_epoch(loading, saved)
    loading.told_epochs = CountedEpochs(saved["epoch"], tuple(saved["samplers"]))
    loading.before_first_batch.append(before_first_batch)


def _go_on_in_epoch(loading: Loading, saved: Mapping[str, Any]) -> None:
    if "given_seed" in saved:  # the epoch had begun
        loading.go_on_with(saved["given_seed"], saved.get("batch_size"))
