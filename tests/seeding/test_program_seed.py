"""A program's own `--seed` reaches the data that its loaders load, under a profile and without."""

import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchrepro
from torchrepro.seeding.loader_places import saved_place, take_up
from torchrepro.seeding.streams import seed_of_rank

AUTO = {"seed": 5, "dataloader": {"seeding": "auto"}}
SEEDS = st.integers(-(2**63), 2**64 - 1)
NO_SEED = 2**64  # a number that no program can give


class Noisy(Dataset[Any]):
    """Sample `i` is `i` and what the generators gave, of 53 bits: no two are alike by chance."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        drawn = torch.rand((), dtype=torch.float64).item()
        return index, random.random(), np.random.random(), drawn


class Seeding(Noisy):
    """A dataset that seeds torch for every sample."""

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        return super().__getitem__(index)


def _automatic(**options: Any) -> Any:
    return DataLoader(Noisy(), **{"batch_size": 3, "shuffle": True, "collate_fn": list, **options})


def _explicit(**options: Any) -> Any:
    return _automatic(**torchrepro.dataloader_kwargs("train"), **options)


LOADERS = {"automatic": _automatic, "explicit": _explicit}
by_loader = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)


def _epoch(loader: Any) -> list[Any]:
    return list(chain(*loader))


def _first_epoch(make: Callable[..., Any], seed: int = NO_SEED, **options: Any) -> list[Any]:
    if seed != NO_SEED:
        torch.manual_seed(seed)
    return _epoch(make(**options))


@pytest.mark.parametrize(
    ("make", "profile"),
    [(_automatic, AUTO), (_explicit, AUTO), (_explicit, {})],
    ids=["automatic", "explicit", "no seed in the profile"],
)
@settings(max_examples=6)
@given(seeds=st.tuples(SEEDS, SEEDS), workers=st.sampled_from([0, 2]))
def test_another_seed_of_the_program_loads_other_data(
    make: Callable[..., Any], profile: Any, seeds: tuple[int, int], workers: int
) -> None:
    """Order and numbers are the same for the same seed, on any number of workers, and only then."""
    found = []
    for seed, count in ((seeds[0], 0), (seeds[0], workers), (seeds[1], 0)):
        with torchrepro.isolated_rng(), torchrepro.apply(profile):
            found.append(_first_epoch(make, seed, num_workers=count))
    indices, *numbers = (set(column) for column in zip(*found[0], strict=True))
    same_seed = (seeds[0] - seeds[1]) % 2**64 == 0

    assert found[0] == found[1]
    assert (found[0] == found[2]) == same_seed
    assert len(indices) == 10
    others = (set(column) for column in zip(*found[2], strict=True))
    assert all(same_seed or not (a & b) for a, b in zip(numbers, list(others)[1:], strict=True))


@by_loader
def test_the_profiles_own_seed_and_one_of_chance_change_nothing(make: Callable[..., Any]) -> None:
    """Whoever gives no seed, the profile's, or one of chance, loads what the profile says."""
    with torchrepro.apply(AUTO):
        expected = _first_epoch(make)
    with torchrepro.apply(AUTO):
        assert _first_epoch(make, 5) == expected
    for module in (torch, torch.random):
        with torchrepro.apply(AUTO):
            module.seed()
            assert _first_epoch(make) == expected


def test_the_order_of_a_profile_alone_is_what_it_has_always_been() -> None:
    """Programs that leave seeding to the profile keep the order that they had."""
    with torchrepro.apply(AUTO):
        loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=12, shuffle=True)

        assert next(iter(loader))[0].tolist() == [8, 5, 10, 1, 0, 3, 6, 2, 7, 11, 4, 9]


@by_loader
def test_a_loader_with_a_seed_of_its_own_is_not_reached(make: Callable[..., Any]) -> None:
    """A stream that the profile pins stays as it is while a program's seed is swept."""
    streams = {"train": 3, "Noisy[10]#1": 3}
    found = []
    for seed in (NO_SEED, 1, 2):
        with torchrepro.apply({**AUTO, "streams": streams}):
            found.append(_first_epoch(make, seed))

    assert found[0] == found[1] == found[2]


SCOPES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "fork_rng": lambda: _seed_within(torch.random.fork_rng(devices=[])),
    "isolated_rng": lambda: _seed_within(torchrepro.isolated_rng()),
    "seeded": lambda: _seed_within(torchrepro.seeded("init")),
    "a profile": lambda: _seed_within(torchrepro.apply({"seed": 6})),
    "samples that seed": lambda: _epoch(DataLoader(Seeding(), collate_fn=list)),
    "a broken off epoch": lambda: next(iter(DataLoader(Seeding(), collate_fn=list))),
    "other draws": lambda: torch.rand(3),
}


def _seed_within(scope: Any) -> None:
    with scope:
        torch.manual_seed(9)
        torch.rand(3)


@pytest.mark.parametrize("scope", SCOPES)
@by_loader
def test_a_seed_that_is_taken_back_leaves_no_trace(make: Callable[..., Any], scope: str) -> None:
    """What is seeded within a scope, or while a sample is loaded, ends with it."""
    for seed in (NO_SEED, 1):
        found = []
        for between in (SCOPES["nothing"], SCOPES[scope]):
            with torchrepro.apply(AUTO):
                loader = make()
                if seed != NO_SEED:
                    torch.manual_seed(seed)
                _epoch(loader)
                between()
                found.append(_epoch(loader))

        assert found[0] == found[1]


@by_loader
def test_a_seed_of_torchrepros_own_is_not_the_programs(make: Callable[..., Any]) -> None:
    """A loader that is iterated where torchrepro has seeded torch depends on the program's seed."""
    found = []
    for seed in (1, 1, 2):
        with torchrepro.apply(AUTO):
            torch.manual_seed(seed)
            with torchrepro.seeded("init") if len(found) % 2 else nullcontext():
                found.append(_epoch(make()))

    assert found[0] == found[1] != found[2]


RESEEDED = {
    "once": lambda epoch, when: None,
    "before every epoch": lambda epoch, when: when == "before" and torch.manual_seed(7 + epoch),
    "after every epoch": lambda epoch, when: when == "after" and torch.manual_seed(7 + epoch),
    "in mid-epoch": lambda epoch, when: when == "within" and torch.manual_seed(7 + epoch),
}


def _trained(folder: Path | None, make: Any, reseed: Any, stop: int | None) -> list[Any]:
    """Return the batches of three epochs, or of those up to the step `stop`."""
    found: list[Any] = []
    with torchrepro.apply(AUTO):
        torch.manual_seed(3)
        loader = make()
        checkpoint = torchrepro.Checkpoint(folder)
        for epoch in checkpoint.epochs(3):
            reseed(epoch, "before")
            for batch in checkpoint.batches(loader):
                found.append(batch)
                if checkpoint.batch == 2:
                    reseed(epoch, "within")
                checkpoint.save()
                if checkpoint.step == stop:
                    return found
            reseed(epoch, "after")
            checkpoint.save()
    return found


@pytest.mark.parametrize("reseed", RESEEDED)
@by_loader
def test_a_resumed_run_loads_what_the_uninterrupted_one_loads(
    make: Callable[..., Any], reseed: str, tmp_path: Path
) -> None:
    """Wherever it stopped, and whenever the program seeds torch, an epoch goes on as it began."""
    whole = _trained(None, make, RESEEDED[reseed], None)
    for stop in (2, 4, 5, 7):
        folder = tmp_path / str(stop)
        begun = _trained(folder, make, RESEEDED[reseed], stop)

        assert whole == begun + _trained(folder, make, RESEEDED[reseed], None)


@by_loader
@pytest.mark.parametrize("done", [2, 4])
def test_a_place_holds_the_seed_that_the_program_had_given(
    make: Callable[..., Any], done: int
) -> None:
    """An epoch goes on as it began, whatever the program seeds torch with after its beginning."""
    with torchrepro.apply(AUTO):
        torch.manual_seed(1)
        batches = iter(loader := make())
        _ = list(islice(batches, done))
        torch.manual_seed(2)
        place = json.loads(json.dumps(saved_place(loader)))
        expected = [*batches, *loader]
    with torchrepro.apply(AUTO):
        torch.manual_seed(2)
        resumed = make()
        take_up(resumed, place)

        assert expected == [*resumed, *resumed]


@by_loader
def test_a_checkpoint_from_before_is_loaded(make: Callable[..., Any], tmp_path: Path) -> None:
    """A checkpoint without the program's seed, as 0.2.0 wrote it, is gone on from."""
    reseed = RESEEDED["once"]
    whole = _trained(None, make, reseed, None)
    begun = _trained(tmp_path, make, reseed, 2)
    for path in tmp_path.rglob("*.pt"):
        saved = torch.load(path, weights_only=True)
        del saved["given_seed"]
        torch.save(saved, path)

    assert whole == begun + _trained(tmp_path, make, reseed, None)


@by_loader
@pytest.mark.parametrize("world", ["2", "1"])
def test_ranks_share_one_order_whatever_each_is_seeded_with(
    make: Callable[..., Any], world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`manual_seed(seed + rank)` on several ranks leaves the order alone; the report says so."""
    found, said = [], []
    for rank in ("0", "1"):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", rank if world == "2" else "0")
        with torchrepro.apply(AUTO) as applied:
            samples = _first_epoch(make, 3 + int(rank))
            said.append("\n".join(applied.report.loading))
        found.append([index for index, *_ in samples])

    assert (found[0] == found[1]) == (world == "2")
    for rank, text in enumerate(said):
        assert (f"do not depend on the program's own seed {3 + rank}" in text) == (world == "2")


def test_ranks_with_seeds_of_their_own_have_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `ranks: distinct` a rank starts from another seed, which is the profile's as well."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with torchrepro.apply({**AUTO, "ranks": "distinct"}) as applied:
        assert torch.initial_seed() == seed_of_rank(5, 3)
        _first_epoch(_automatic)

        assert applied.report.loading == ()
