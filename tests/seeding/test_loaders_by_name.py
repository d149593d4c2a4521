"""Loaders made with `dataloader_kwargs`: their epochs depend on (seed, name, epoch) only."""

import copy
import random
from collections.abc import Callable
from itertools import chain, cycle, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import torchrepro

from .loaders import (
    LENGTH,
    SAMPLERS,
    Eager,
    Items,
    Noisy,
    all_draws,
    drawn,
    draws,
    epoch,
    order,
    run,
)

Place = Callable[..., None]


def _named(dataset: Any = None, choice: str = "", seed: int = 5, **options: Any) -> list[Any]:
    with run("named", seed=seed) as make:
        return epoch(make(dataset, choice, **options))


def _noisily(loader: Any, noise: int = 3) -> list[Any]:
    found = []
    for batch in loader:
        _ = random.random(), np.random.random(noise), torch.rand(noise)
        found.append(batch)
    return found


def _seed_of_worker() -> Any:
    info = get_worker_info()
    return info and info.seed


OTHERS: dict[str, Callable[[], Any]] = {
    "items": lambda: Items(LENGTH, all_draws),
    "items begun eagerly": lambda: Eager(LENGTH, all_draws),
    "a pipe": lambda: IterableWrapper(range(20)).shuffle(),
}
IN_ONE_ORDER = ("in order", "around")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "live_on"), [*zip([*SAMPLERS, *OTHERS], cycle([True, False]), strict=False)]
)
def test_a_named_epoch_depends_on_its_number_only(kind: str, live_on: bool) -> None:
    """Other draws, workers, and how the program reached the epoch do not change it.

    Every sampler that draws gives another order in the next epoch.
    """

    def made(**options: Any) -> Any:
        if kind in OTHERS:
            return make(OTHERS[kind](), **options)
        return make(Noisy(LENGTH, all_draws), kind, **options)

    with run("named") as make:
        running, direct, worker = made(), made(), made(num_workers=1, persistent_workers=live_on)
        epochs = [_noisily(running) for _ in range(3)]
        torchrepro.set_epoch(direct, 2)
        torchrepro.set_epoch(running, 1)

        assert epochs[2] == list(direct) == list(made(epoch=2))
        assert epochs[1] == list(running)
        assert epochs == [list(worker) for _ in range(3)]
        torchrepro.set_epoch(worker, 1)
        assert epochs[1] == list(worker)
    if kind not in IN_ONE_ORDER and kind != "a pipe":
        assert order(chain(*epochs[0])) != order(chain(*epochs[1]))


def test_the_seed_of_a_worker_depends_on_the_epoch_only() -> None:
    """`get_worker_info().seed` is one number per epoch and worker, on any way to the epoch."""
    with run("named") as make:
        running, direct = (make(Noisy(draw=_seed_of_worker), num_workers=2) for _ in range(2))
        reached = [epoch(running) for _ in range(3)]
        torchrepro.set_epoch(direct, 2)

        assert reached[2] == epoch(direct)
    assert reached[0] != reached[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        *product([*SAMPLERS, "items", "items begun eagerly"], [0]),
        *product(["shuffle", "wandering", "batches", "items", "items begun eagerly"], [1]),
    ],
)
def test_interleaved_iterations_do_not_change_each_other(kind: str, workers: int) -> None:
    """Two loaders, or two iterations of one, load the same interleaved as one after the other."""
    own = {"items": Items(LENGTH), "items begun eagerly": Eager(LENGTH)}

    def loaders(make: Any) -> Any:
        chosen = (own[kind],) if kind in own else (None, kind)
        return [make(*chosen, name=name, num_workers=workers) for name in ("train", "test")]

    with run("named") as make:
        one, two = loaders(make)
        apart = [list(loader) for loader in (one, two, one, one)]
        one, two = loaders(make)
        together: list[Any] = []
        for pair in ((one, two), (one, one)):
            mixed = [(*both, draws())[:2] for both in zip(*pair, strict=False)]
            together += map(list, zip(*mixed, strict=True))

    assert min(map(len, together)) >= 10
    for whole, found in zip(apart, together, strict=True):
        assert found == whole[: len(found)]


@pytest.mark.parametrize("dataset", [Noisy, Items])
def test_every_coordinate_of_a_sample_changes_its_numbers(dataset: Any, be: Place) -> None:
    """No generator draws one number twice among samples that differ in any coordinate.

    The order differs for another seed, name or epoch, and is the same on every rank.
    """
    found, orders = [], set()
    for seed, rank, name, number in product((5, 6), (0, 1), ("train", "test"), (0, 1)):
        be(rank)
        choice = "shuffle" if dataset is Noisy else ""
        samples = _named(dataset(20, all_draws), choice, seed=seed, name=name, epoch=number)
        found += drawn(samples)
        orders.add(tuple(order(samples)))

    assert len(found) == 16 * 20
    for numbers in zip(*found, strict=True):
        assert len(set(numbers)) == len(found)
    assert len(orders) == (8 if dataset is Noisy else 16)


@pytest.mark.parametrize(("ranks", "agree"), [(None, False), ("distinct", False), ("same", True)])
def test_ranks_share_the_order_and_under_same_the_samples(
    ranks: str | None, agree: bool, be: Place
) -> None:
    """All ranks have one order; they draw the same numbers only under `ranks: same`."""
    found = []
    with run("named", **({"ranks": ranks} if ranks else {})) as make:
        for rank in range(2):
            be(rank)
            found.append(epoch(make(shuffle=True, num_workers=1)))

    assert order(found[0]) == order(found[1])
    assert (found[0] == found[1]) == agree


def test_a_late_rank_counts_from_the_next_epoch(be: Place) -> None:
    """A loader that was made before the rank was known uses the rank from the next epoch on."""
    alone = [_named(epoch=0), _named(epoch=1)]
    with run("named") as make:
        loader = make()
        late = [epoch(loader)]
        be(1)
        late.append(epoch(loader))

    assert late == [alone[0], _named(epoch=1)]
    assert late[1] != alone[1]


def _worker() -> Any:
    info = get_worker_info()
    return info.id, info.seed, getattr(info.dataset, "mark", None)


def _leave_a_mark(worker: int) -> None:
    get_worker_info().dataset.mark = worker


@pytest.mark.parametrize("live_on", [True, False])
def test_the_users_worker_init_fn_runs_in_each_worker(live_on: bool) -> None:
    """The `worker_init_fn` given to `dataloader_kwargs` gets the number of every worker."""
    with run("named"):
        named = torchrepro.dataloader_kwargs("train", worker_init_fn=_leave_a_mark)
        options = {"num_workers": 2, "persistent_workers": live_on, "collate_fn": list}
        loader = DataLoader(Noisy(draw=_worker), 2, **options, **named)
        found = drawn([*epoch(loader), *epoch(loader)])

    assert {worker for worker, _, _ in found} == {0, 1}
    assert all(worker == mark for worker, _, mark in found)


def test_a_copy_of_a_loader_loads_the_same() -> None:
    """A deep copy is an independent loader that continues with the next epoch of the original."""
    with run("named") as make:
        loader = make(shuffle=True)
        epoch(loader)
        copied = copy.deepcopy(loader)

        assert [epoch(copied) for _ in range(2)] == [epoch(loader) for _ in range(2)]


@pytest.mark.slow
@settings(max_examples=10)
@given(
    kind=st.sampled_from(sorted(SAMPLERS)),
    number=st.integers(0, 2),
    start=st.integers(0, 15),
    workers=st.sampled_from([0, 2]),
)
def test_skipped_batches_do_not_change_the_others(
    kind: str, number: int, start: int, workers: int
) -> None:
    """`set_epoch(loader, e, start=n)` skips the first n batches; later epochs are whole."""
    with run("named") as make:
        whole, cut = make(None, kind), make(None, kind, num_workers=workers)
        epochs = [list(whole) for _ in range(number + 2)]
        torchrepro.set_epoch(cut, number, start=start)

        assert list(cut) == epochs[number][start:]
        assert list(cut) == epochs[number + 1]


def test_batches_of_an_iterable_dataset_cannot_be_skipped() -> None:
    """Items have no indices, so `set_epoch` raises and changes nothing."""
    with run("named") as make:
        loader = make(Items())
        with pytest.raises(torchrepro.SeedingError, match="cannot be skipped"):
            torchrepro.set_epoch(loader, 4, start=1)

        assert epoch(loader) == _named(Items())


@pytest.mark.parametrize("bad", [-1, True, 1.5, "2"])
def test_an_epoch_has_to_be_a_whole_number(bad: Any) -> None:
    """`set_epoch` refuses an epoch or start that is not a whole number of 0 or more."""
    with run("named") as make:
        loader = make()
        for attempt in (
            lambda: torchrepro.set_epoch(loader, bad),
            lambda: torchrepro.set_epoch(loader, 0, start=bad),
            lambda: torchrepro.dataloader_kwargs("train", epoch=bad),
        ):
            with pytest.raises(torchrepro.SeedingError):
                attempt()

        assert epoch(loader) == _named()


@pytest.mark.parametrize("given", [[1], None, "loader", 3])
@pytest.mark.parametrize("way", ["plain", "auto"])
def test_set_epoch_refuses_objects_that_are_not_loaders(given: Any, way: str) -> None:
    """It raises `SeedingError`."""
    with run(way), pytest.raises(torchrepro.SeedingError):
        torchrepro.set_epoch(given, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_set_epoch_reaches_a_distributed_sampler(rank: int) -> None:
    """Also within a batch sampler."""
    plain, *samplers = (DistributedSampler(range(LENGTH), 2, rank) for _ in range(3))
    with run("named") as make:
        batches = BatchSampler(samplers[1], 4, drop_last=False)
        loaders = make(Noisy(40), sampler=samplers[0]), make(Noisy(40), batch_sampler=batches)
        for number, loader in product((1, 2, 0), loaders):
            torchrepro.set_epoch(loader, number)
            plain.set_epoch(number)

            assert order(epoch(loader)) == list(plain)


def test_set_epoch_of_an_unseeded_loader_reaches_its_sampler() -> None:
    """If no part of the loader counts epochs, `set_epoch` raises."""
    sampler = DistributedSampler(range(8), 2, 0)
    with run("plain") as make:
        torchrepro.set_epoch(make(sampler=sampler), 3)

        assert sampler.epoch == 3
        with pytest.raises(torchrepro.SeedingError, match="no part of this loader counts epochs"):
            torchrepro.set_epoch(make(shuffle=True), 3)
