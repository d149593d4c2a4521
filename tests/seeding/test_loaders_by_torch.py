"""`dataloader.seeding: auto` follows torch's own protocol: orders stay those of plain torch."""

import random
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

import torchrepro
from torchrepro.seeding.loader_positions import epochs
from torchrepro.seeding.resumed_run import ResumedRun

from .loaders import (
    AUTHORS,
    SAMPLERS,
    Items,
    Noisy,
    WanderingBatches,
    all_draws,
    by_life,
    by_workers,
    drawn,
    draws,
    epoch,
    order,
    run,
    seed_plainly,
    some,
)


class Unhashable(DataLoader):
    """A loader that defines equality, and so has no hash."""

    __hash__ = None  # what Python gives a class with __eq__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


class Batched(DataLoader):
    """A loader that makes its batches whenever it is asked for them."""

    @property
    def batch_sampler(self) -> Any:
        return [torch.randperm(6).tolist() for _ in range(2)]

    @batch_sampler.setter
    def batch_sampler(self, given: Any) -> None:
        """Ignore the assignment of torch's own."""


def _interleaved(loaders: list[Any]) -> list[Any]:
    pairs = zip_longest(*loaders, fillvalue=())
    return [order(batch) for batches in pairs for batch in batches]


STEPS: dict[str, Callable[[Any, Any], Any]] = {
    "an epoch": lambda one, _: order(epoch(one)),
    "an epoch of the other": lambda _, other: order(epoch(other)),
    "two batches": lambda one, _: [order(batch) for batch in some(one)],
    "no batch": lambda one, _: [iter(one)].clear(),
    "both at one time": lambda *both: _interleaved([*both]),
    "one at one time": lambda one, _: _interleaved([one, one]),
    "draws": lambda *_: draws(),
    "a seed": lambda *_: seed_plainly(7),
    "the next epoch": lambda *both: [
        each.sampler.set_epoch(each.sampler.epoch + 1)
        for each in both
        if isinstance(each.sampler, DistributedSampler)
    ],
}


@pytest.mark.slow
@settings(max_examples=60)
@given(
    kinds=st.tuples(*[st.sampled_from([*SAMPLERS, *AUTHORS])] * 2),
    program=st.lists(st.sampled_from([*STEPS]), max_size=6),
)
def test_orders_and_generators_are_those_of_plain_torch(
    kinds: tuple[str, str], program: list[str], generators: Callable[[], Any]
) -> None:
    """For any use of two loaders, the orders and the program's draws are those of plain torch."""
    found = []
    for way, draw in (("plain", tuple), ("auto", all_draws)):
        with run(way) as make:
            loaders = [make(Noisy(40, draw), kind) for kind in kinds]
            orders = [STEPS[step](*loaders) for step in program]
            found.append([orders, {**generators(), "plan": None}])

    assert found[0] == found[1]


def _seed_of_worker() -> Any:
    return get_worker_info().seed


AS_WITHOUT: dict[str, Callable[[Any], Any]] = {
    "without a hash": lambda make: make(kind=Unhashable),
    "batches of its own making": lambda make: make(kind=Batched),
    "a worker_init_fn": lambda make: make(None, "shuffle", worker_init_fn=random.seed),
    "a worker_init_fn, on workers": lambda make: make(
        None, "generator", worker_init_fn=random.seed, num_workers=2
    ),
    "items in the main process": lambda make: make(Items()),
    "a pipe": lambda make: make(IterableWrapper(range(20)).shuffle()),
    "a pipe, on a worker": lambda make: make(IterableWrapper(range(20)).shuffle(), num_workers=1),
    "the seed of a worker": lambda make: make(Noisy(draw=_seed_of_worker), num_workers=2),
}
"""Loaders that load the same samples, and move generators, as without a profile."""


@pytest.mark.parametrize("kind", AS_WITHOUT)
def test_loaders_that_the_program_seeds_are_left_alone(
    kind: str, generators: Callable[[], Any]
) -> None:
    """Loaders that torch or the program seeds load as in plain torch, and move no generator."""
    found = []
    for way in ("plain", "auto"):
        with run(way) as make:
            loader = AS_WITHOUT[kind](make)
            found.append([epoch(loader), draws(), epoch(loader), {**generators(), "plan": None}])

    assert found[0] == found[1]


@by_workers
@pytest.mark.parametrize("kind", AUTHORS)
def test_a_loader_with_its_own_generator_draws_from_it(kind: str, workers: int) -> None:
    """Its samples depend on that generator, and on no other draws."""
    found = []
    for seed in (1, 1, 2):
        with run() as make:
            torch.manual_seed(3 if kind == "distributed" else seed)
            random.random(), np.random.random(len(found))
            loader = make(Noisy(40, all_draws), kind, num_workers=workers)
            if loader.generator is None:
                torch.manual_seed(seed)
            found.append([epoch(loader), epoch(loader)])

    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert (found[0] == found[2]) == (loader.generator is not None)


PYTHON_SEEDS = st.one_of(st.integers(0), st.text(), st.binary(), st.floats(allow_nan=False))
NUMPY_SEEDS = st.one_of(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 99), min_size=1))
TORCH_SEEDS = st.integers(-(2**63), 2**64 - 1)


def _states(seeds: tuple[Any, ...]) -> list[str]:
    """Return the state of each generator after a seeding; "" and b"" seed Python's identically."""
    legacy = np.random.RandomState(seeds[1]).get_state(legacy=False)
    return [
        str(random.Random(seeds[0]).getstate()),
        str(legacy["state"]["key"].tolist()),
        str(torch.Generator().manual_seed(seeds[2]).get_state().tolist()),
    ]


def _columns(seeds: tuple[Any, ...], dataset: Any, workers: int) -> list[list[Any]]:
    with run() as make:
        for give, seed in zip((random.seed, np.random.seed, torch.manual_seed), seeds, strict=True):
            give(seed)
        found = epoch(make(dataset(draw=all_draws), num_workers=workers))
        shuffled = order(epoch(make(shuffle=True)))
    return [shuffled, *map(list, zip(*drawn(found), strict=True))]


@pytest.mark.slow
@settings(max_examples=25)
@given(
    seeds=st.tuples(PYTHON_SEEDS, NUMPY_SEEDS, TORCH_SEEDS),
    others=st.tuples(PYTHON_SEEDS, NUMPY_SEEDS, TORCH_SEEDS),
    workers=st.sampled_from([0, 0, 0, 1]),
)
def test_each_seed_of_the_program_changes_its_own_draws(
    seeds: tuple[Any, ...], others: tuple[Any, ...], workers: int
) -> None:
    """Seeds of `random` and numpy change their draws; torch's changes the order and all draws."""
    first = _columns(seeds, Noisy, 0)
    assert _columns(seeds, Noisy, workers) == first

    differ = [one != two for one, two in zip(_states(seeds), _states(others), strict=True)]
    for place, changes in enumerate(({1}, {2}, {0, 1, 2, 3, 4})):
        if differ[place]:
            varied = (*seeds[:place], others[place], *seeds[place + 1 :])
            second = _columns(varied, Noisy, workers)
            same = [one == two for one, two in zip(first, second, strict=True)]
            assert same == [column not in changes for column in range(5)]


def test_seeds_of_the_program_change_items_in_workers() -> None:
    """Items of an IterableDataset in workers depend on each seed that the program gives."""
    given_seeds = [(1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
    found = [str(_columns(seeds, Items, 2)[1:]) for seeds in given_seeds]

    assert found[0] == found[1]
    assert len(set(found)) == 4


def test_seeds_before_the_profile_do_not_count() -> None:
    """A program without seeds under the profile has the same orders and samples in every run."""
    found = []
    for seed in (1, 2):
        seed_plainly(seed)
        with run() as make:
            loader = make(shuffle=True)
            found.append([epoch(loader), epoch(loader)])
    with run() as make:
        torch.manual_seed(5)  # the profile's own
        assert epoch(make(shuffle=True)) == found[0][0]

    assert found[0] == found[1]


@by_life
def test_restoring_torchs_generator_repeats_the_epoch(workers: int, live_on: bool) -> None:
    """A program that saves torch's generator before an epoch, and restores it, repeats it."""
    with run() as make:
        loader = make(shuffle=True, num_workers=workers, persistent_workers=live_on)
        states, epochs = [], []
        for _ in range(3):
            states.append(torch.get_rng_state())
            epochs.append(epoch(loader))
            _ = some(make()), draws()
        for number in (1, 0, 2):
            torch.set_rng_state(states[number])
            assert epoch(loader) == epochs[number]
            _ = some(loader), draws()
    with run() as make:
        loader = make(shuffle=True)
        torch.set_rng_state(states[1])

        assert epoch(loader) == epochs[1]


@pytest.mark.parametrize("batch_size", [np.array([1, 3]), [1, 3], torch.tensor([1.0, 3.0]), "3"])
def test_a_batch_sampler_may_use_batch_size_for_anything(batch_size: Any) -> None:
    """The attribute `batch_size` of a program's own sampler may have any value."""
    found = []
    for named in (True, False):
        sampler = WanderingBatches()
        if named:
            sampler.batch_size = batch_size
        with run() as make:
            found.append(epoch(make(Noisy(40), batch_sampler=sampler)))

    assert found[0] == found[1]


@by_life
def test_an_epoch_of_set_epoch_depends_on_its_number_only(workers: int, live_on: bool) -> None:
    """After `set_epoch` a batch depends only on the epoch, the seed and the dataset."""
    found = []
    for before, options in ((0, {}), (2, {"num_workers": workers, "persistent_workers": live_on})):
        with run() as make:
            loader = make(Noisy(draw=all_draws), shuffle=True, **options)
            torchrepro.set_epoch(loader, 0)
            _ = [epoch(loader) for _ in range(before)], torch.rand(before)
            torchrepro.set_epoch(loader, 2)
            found.append([epoch(loader), epoch(loader)])
            torchrepro.set_epoch(loader, 2, start=1)
            found[-1] += [epoch(loader)]

    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert found[0][2] == found[0][0][3:]


def _begun(make: Any, dataset: Any) -> Any:
    epoch(loader := make(dataset, num_workers=1, persistent_workers=True))
    return loader


WITHOUT_NAME: dict[str, Callable[[Any], Any]] = {
    "its author's order": lambda make: make(shuffle=True, generator=torch.Generator()),
    "its author's workers": lambda make: make(shuffle=True, worker_init_fn=print),
    "workers that have begun": lambda make: _begun(make, Noisy()),
    "workers that have begun with nothing": lambda make: _begun(make, Noisy(0)),
    "workers that have begun with items": lambda make: _begun(make, Items()),
}


@pytest.mark.parametrize("loader", WITHOUT_NAME)
def test_set_epoch_refuses_begun_epochs_and_loaders_seeded_by_the_program(loader: str) -> None:
    """The error for a loader that the program seeds names its own generator or function."""
    words = r"no part of this loader counts epochs" + r"[\s\S]*its own" * ("author" in loader)
    with run() as make:
        made = WITHOUT_NAME[loader](make)
        with pytest.raises(torchrepro.SeedingError, match=words):
            torchrepro.set_epoch(made, 3)


class MadeUp:
    """An object without a dict that computes every attribute that is read."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: dict[str, int] = {}

    def __getattr__(self, name: str) -> int:
        return self.held[name]


def test_a_dataset_may_have_any_attributes() -> None:
    """An epoch is loaded, and resumed after its first batch, with any attributes."""
    many: Any = 0
    for _ in range(4):
        many = [many] * 100  # 10**8 parts, of which four are different
    dataset = Noisy()
    vars(dataset)["held"] = [MadeUp(), many]
    with run() as make:
        batches = iter(loader := make(dataset))
        next(batches)
        latest = epochs.latest(loader)
        assert latest is not None
        position, expected = latest.progress(), list(batches)
    with run() as make:
        resumed = make(dataset)
        ResumedRun().resume(resumed, position)

        assert list(resumed) == expected


def at_the_step(saved: torch.Tensor, dataset: Any) -> None:
    batches = iter(DataLoader(dataset, 2, collate_fn=list))
    next(batches)
    torch.set_rng_state(saved)
    list(batches)


def at_both(saved: torch.Tensor, dataset: Any) -> None:
    torch.set_rng_state(saved)
    at_the_step(saved, dataset)


def around_an_evaluation(saved: torch.Tensor, dataset: Any) -> None:
    for _ in DataLoader(dataset, 2, collate_fn=list):
        kept = torch.get_rng_state()
        torch.rand(3)
        torch.set_rng_state(kept)


def by_fork_rng(saved: torch.Tensor, dataset: Any) -> None:
    for _ in DataLoader(dataset, 2, collate_fn=list):
        with torch.random.fork_rng():
            torch.rand(3)


@pytest.mark.parametrize(
    ("puts_back", "drawing", "is_reported"),
    [
        (at_the_step, True, True),
        (at_the_step, False, False),
        (at_both, True, False),
        (around_an_evaluation, True, False),
        (by_fork_rng, True, False),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_state_that_is_restored_too_late_is_reported(
    puts_back: Callable[..., None],
    drawing: bool,
    is_reported: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A line reports it if samples draw and the program restores the generator within an epoch."""
    saved = torch.get_rng_state()
    with torchrepro.apply("seed-only"):
        puts_back(saved, Noisy(draw=draws if drawing else tuple))

    assert ("may differ from the uninterrupted run" in capsys.readouterr().err) == is_reported
