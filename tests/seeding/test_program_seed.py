"""A program's own `--seed` changes the samples of named loaders, with and without a profile."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import torchrepro
from torchrepro.seeding.streams import seed_of_rank

from .loaders import AUTO, Noisy, all_draws, by_way, drawn, epoch, order, run

SEEDS = st.integers(-(2**63), 2**64 - 1)
NO_SEED = 2**64  # a number that no program can give


class Seeding(Noisy):
    """A dataset that seeds torch for every sample."""

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return super().__getitem__(index)


def _loader(**options: Any) -> Any:
    options = {"batch_size": 3, "shuffle": True, "collate_fn": list, **options}
    return DataLoader(Noisy(10), **options, **torchrepro.dataloader_kwargs("train"))


def _first_epoch(seed: int = NO_SEED, **options: Any) -> list[Any]:
    if seed != NO_SEED:
        torch.manual_seed(seed)
    return epoch(_loader(**options))


@pytest.mark.parametrize("profile", [AUTO, {}], ids=["a seed", "no seed in the profile"])
@settings(max_examples=8)
@given(seeds=st.tuples(SEEDS, SEEDS), workers=st.sampled_from([0, 2]))
def test_another_seed_of_the_program_loads_other_data(
    profile: Any, seeds: tuple[int, int], workers: int
) -> None:
    """Order and numbers depend on the program's seed, and not on the number of workers."""
    found = []
    for seed, count in ((seeds[0], 0), (seeds[0], workers), (seeds[1], 0)):
        with torchrepro.isolated_rng(), torchrepro.apply(profile):
            found.append(_first_epoch(seed, num_workers=count))
    same_seed = (seeds[0] - seeds[1]) % 2**64 == 0
    numbers, others = (
        [set(column) for column in zip(*drawn(each), strict=True)] for each in (found[0], found[2])
    )

    assert found[0] == found[1]
    assert (found[0] == found[2]) == same_seed
    assert all(same_seed or not (a & b) for a, b in zip(numbers, others, strict=True))


def test_the_profiles_seed_and_a_random_seed_change_nothing() -> None:
    """Without a seed, with a random one or with the profile's, samples are those of the profile."""
    with torchrepro.apply(AUTO):
        expected = _first_epoch()
    with torchrepro.apply(AUTO):
        assert _first_epoch(5) == expected
    for module in (torch, torch.random):
        with torchrepro.apply(AUTO):
            module.seed()
            assert _first_epoch() == expected


def test_orders_and_samples_of_a_named_loader_are_fixed() -> None:
    """Programs without own seeds keep their order and samples in every version."""
    with torchrepro.apply(AUTO):
        named = torchrepro.dataloader_kwargs("train")
        loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=12, shuffle=True, **named)

        assert next(iter(loader))[0].tolist() == [10, 0, 9, 6, 8, 5, 2, 1, 4, 7, 11, 3]
        assert next(iter(loader))[0].tolist() == [11, 10, 4, 9, 2, 3, 7, 1, 8, 6, 0, 5]

    with run("named") as make:
        assert epoch(make(Noisy(1, all_draws))) == [
            (0, (0.7619561764454988, 0.7524775560317772, 0.8799879185423599, 0.5537431885783106))
        ]


def test_a_loader_whose_stream_has_its_own_seed_is_unchanged() -> None:
    """A stream with a seed in the profile stays the same while a program's seed is swept."""
    found = []
    for seed in (NO_SEED, 1, 2):
        with torchrepro.apply({**AUTO, "streams": {"train": 3}}):
            found.append(_first_epoch(seed))

    assert found[0] == found[1] == found[2]


def _seed_within_fork_rng() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        torch.rand(3)


BETWEEN: dict[str, Callable[[], Any]] = {
    "fork_rng": _seed_within_fork_rng,
    "samples that seed": lambda: epoch(DataLoader(Seeding(), collate_fn=list)),
    "a broken off epoch": lambda: next(iter(DataLoader(Seeding(), collate_fn=list))),
    "other draws": lambda: torch.rand(3),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("seed", [NO_SEED, 1])
def test_draws_between_two_epochs_change_nothing(between: str, seed: int) -> None:
    """Nor do seeds that torch's own scope restores, or seeds within other samples."""
    found = []
    for happens in (False, True):
        with torchrepro.apply(AUTO):
            loader = _loader()
            if seed != NO_SEED:
                torch.manual_seed(seed)
            epoch(loader)
            if happens:
                BETWEEN[between]()
            found.append(epoch(loader))

    assert found[0] == found[1]


def test_seeds_by_torchrepro_do_not_count_as_the_programs() -> None:
    """A loader iterated where torchrepro has seeded torch still depends on the program's seed."""
    found = []
    for seed in (1, 1, 2):
        with torchrepro.apply(AUTO):
            torch.manual_seed(seed)
            with torchrepro.seeded("init") if len(found) % 2 else nullcontext():
                found.append(epoch(_loader()))

    assert found[0] == found[1] != found[2]


RESEEDED = {
    "once": lambda epoch, when: None,
    "before every epoch": lambda epoch, when: when == "before" and torch.manual_seed(7 + epoch),
    "after every epoch": lambda epoch, when: when == "after" and torch.manual_seed(7 + epoch),
    "in mid-epoch": lambda epoch, when: when == "within" and torch.manual_seed(7 + epoch),
}


def _trained(folder: Path | None, way: str, reseed: Any, stop: int | None) -> list[Any]:
    found: list[Any] = []
    with run(way) as make:
        torch.manual_seed(3)
        loader = make(Noisy(10), shuffle=True)
        checkpoint = torchrepro.Checkpoint(folder)
        for number in checkpoint.epochs(3):
            reseed(number, "before")
            for batch in checkpoint.batches(loader):
                found.append(batch)
                if checkpoint.batch == 2:
                    reseed(number, "within")
                checkpoint.save()
                if checkpoint.step == stop:
                    return found
            reseed(number, "after")
            checkpoint.save()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("reseed", RESEEDED)
@by_way
def test_a_resumed_run_loads_as_the_uninterrupted_run(
    way: str, reseed: str, tmp_path: Path
) -> None:
    """Interrupted anywhere, with program seeds at any time, an epoch continues unchanged."""
    whole = _trained(None, way, RESEEDED[reseed], None)
    for stop in (2, 4, 5, 7):
        folder = tmp_path / str(stop)
        begun = _trained(folder, way, RESEEDED[reseed], stop)

        assert whole == begun + _trained(folder, way, RESEEDED[reseed], None)


@pytest.mark.parametrize("world", [2, 1])
def test_ranks_with_different_seeds_share_one_order(world: int, be: Callable[..., None]) -> None:
    """`manual_seed(seed + rank)` does not change the order; the report has a note."""
    found, said = [], []
    for rank in (0, 1):
        be(rank % world, world)
        with torchrepro.apply(AUTO) as applied:
            found.append(order(_first_epoch(3 + rank)))
            said.append("\n".join(applied.report.loading))

    assert (found[0] == found[1]) == (world == 2)
    for rank, text in enumerate(said):
        assert (f"do not depend on the program's own seed {3 + rank}" in text) == (world == 2)


def test_distinct_ranks_do_not_count_as_seeded_by_the_program(be: Callable[..., None]) -> None:
    """Under `ranks: distinct` the seed of a rank is still the profile's."""
    be(3, 4)
    with torchrepro.apply({**AUTO, "ranks": "distinct"}) as applied:
        assert torch.initial_seed() == seed_of_rank(5, 3)
        _first_epoch()

        assert applied.report.loading == ()
