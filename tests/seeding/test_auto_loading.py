"""`dataloader.seeding: auto`: loaders whose author did nothing are seeded under a profile."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchrepro

AUTO = {"seed": 5, "dataloader": {"seeding": "auto"}}
WORKERS = st.sampled_from([0, 1, 2])


def draws() -> tuple[float, ...]:
    """Draw as datasets do that know of no seeding."""
    return random.random(), np.random.random(), torch.rand(()).item()


class Noisy(Dataset[Any]):
    """Sample `i` is `i` and what the generators gave; sample `bad` raises."""

    def __init__(self, length: int = 8, bad: int | None = None) -> None:
        self.length, self.bad = length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        drawn = draws()
        if index == self.bad:
            raise OSError("no such picture")
        return index, drawn


class Placed(Noisy):
    """Sample `i` is `i` and the process that loads it."""

    def __getitem__(self, index: int) -> Any:
        return index, os.getpid()


class Items(IterableDataset[Any]):
    """Items with what the generators gave."""

    def __iter__(self) -> Iterator[Any]:
        for item in range(8):
            yield item, draws()


@dataclass
class Compared:
    """A sampler that equals others, and so has no hash."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.length).tolist()


def _loader(dataset: Any = None, **options: Any) -> Any:
    if options.get("num_workers", 0) == 0:
        options.pop("persistent_workers", None)
    return DataLoader(dataset or Noisy(), **{"batch_size": 3, "collate_fn": list, **options})


def _epoch(loader: Any) -> list[Any]:
    return list(chain(*loader))


@settings(max_examples=12)
@given(
    length=st.integers(1, 10),
    batch=st.integers(1, 4),
    workers=WORKERS,
    live_on=st.booleans(),
    noise=st.integers(0, 3),
)
def test_two_runs_load_the_same_on_any_number_of_workers(
    length: int, batch: int, workers: int, live_on: bool, noise: int
) -> None:
    """Order and numbers of each epoch depend on the profile, on no worker and on no other draw."""
    found = []
    for count, drawn in ((0, 0), (workers, noise)):
        with torchrepro.apply(AUTO):
            options = {"num_workers": count, "persistent_workers": live_on, "batch_size": batch}
            loader = _loader(Noisy(length), shuffle=True, **options)
            _ = random.random(), np.random.random(drawn), torch.rand(drawn)
            found.append([_epoch(loader) for _ in range(3)])

    assert found[0] == found[1]


def test_the_shipped_profile_seeds_numpy_in_workers_too() -> None:
    """Under `seed-only` every sample that two workers load draws other numbers, in every epoch."""
    with torchrepro.apply("seed-only"):
        loader = _loader(shuffle=True, num_workers=2)
        found = [_epoch(loader) for _ in range(2)]
    orders = [[index for index, _ in samples] for samples in found]
    drawn = [numbers for _, numbers in chain(*found)]

    assert orders[0] != orders[1]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn)


@pytest.mark.parametrize("live_on", [True, False])
def test_items_are_the_same_on_one_worker_and_none(live_on: bool) -> None:
    """An IterableDataset draws on one worker what it draws in the main process."""
    found = []
    for workers in (0, 1):
        with torchrepro.apply(AUTO):
            loader = _loader(Items(), num_workers=workers, persistent_workers=live_on)
            found.append([_epoch(loader) for _ in range(3)])

    assert found[0] == found[1]
    assert len({drawn for _, drawn in chain(*found[0])}) == 24


def test_a_sampler_without_a_hash_draws_what_belongs_to_the_epoch() -> None:
    """An epoch is the same beside other draws, and the next one is not."""
    with torchrepro.apply(AUTO):
        loader = _loader(sampler=Compared(8))
        first, second = _epoch(loader), _epoch(loader)
    with torchrepro.apply(AUTO):
        draws()
        again = _epoch(_loader(sampler=Compared(8)))

    assert first == again
    assert [index for index, _ in first] != [index for index, _ in second]


def test_loaders_over_one_dataset_draw_other_numbers() -> None:
    """Each loader is seeded in its own way, even if it loads the same in the same order."""
    dataset = Noisy()
    with torchrepro.apply(AUTO):
        one, two = _loader(dataset), _loader(dataset)
        found = [drawn for loader in (one, two, one) for _, drawn in _epoch(loader)]

    assert len(set(found)) == 3 * len(dataset)


@settings(max_examples=8)
@given(breaks=st.lists(st.integers(0, 3), min_size=3, max_size=3), workers=st.sampled_from([0, 2]))
def test_validation_does_not_move_the_training(breaks: list[int], workers: int) -> None:
    """However much of a validation set is loaded between, training loads and draws the same."""
    found = []
    for validates in (False, True):
        with torchrepro.apply(AUTO):
            train, test = _loader(shuffle=True), _loader(shuffle=True, num_workers=workers)
            epochs = []
            for stop in breaks:
                epochs += [*_epoch(train), draws()]
                for number, _ in enumerate(test if validates else ()):
                    if number == stop:
                        break
            found.append(epochs)

    assert found[0] == found[1]


@pytest.mark.parametrize("dataset", [Noisy(), Items()], ids=["samples", "items"])
@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_moves_no_generator_of_the_program(
    dataset: Any, workers: int, world: Callable[[], Any]
) -> None:
    """Whole epochs and broken off ones leave every global generator where it was."""
    with torchrepro.apply(AUTO):
        loader = _loader(dataset, num_workers=workers)
        before = world()
        _epoch(loader)
        batches = iter(loader)
        next(batches)

        assert before == world()


@settings(max_examples=8)
@given(epoch=st.integers(0, 3), workers=st.sampled_from([0, 2]), live_on=st.booleans())
def test_an_epoch_is_the_same_however_it_is_reached(
    epoch: int, workers: int, live_on: bool
) -> None:
    """Running to an epoch and naming it with `set_epoch` give its samples."""
    options = {"shuffle": True, "num_workers": workers, "persistent_workers": live_on}
    with torchrepro.apply(AUTO):
        running = _loader(**options)
        run = [_epoch(running) for _ in range(epoch + 1)]
        torchrepro.set_epoch(running, 0)
        again = _epoch(running)
    with torchrepro.apply(AUTO):
        direct = _loader(**options)
        torchrepro.set_epoch(direct, epoch)

        assert _epoch(direct) == run[epoch]
    assert again == run[0]


def test_snapshots_hold_the_epochs_of_loaders() -> None:
    """Put back, a snapshot has every loader go on with the epoch that it had reached."""
    with torchrepro.apply(AUTO):
        one, two = _loader(shuffle=True), _loader(shuffle=True, num_workers=2)
        _epoch(one), _epoch(one), _epoch(two)
        state = torchrepro.rng_state()
        found = [_epoch(loader) for loader in (one, two, one)]
        torchrepro.set_rng_state(state)

        assert found == [_epoch(loader) for loader in (one, two, one)]


@pytest.mark.parametrize("before", [True, False])
def test_snapshots_reach_loaders_of_another_run(before: bool) -> None:
    """A snapshot from another process does the same, read before or after its loaders are used."""
    with torchrepro.apply(AUTO):
        one, two = _loader(shuffle=True), _loader(shuffle=True)
        _epoch(one), _epoch(one), _epoch(two)
        state = json.loads(json.dumps(torchrepro.rng_state()))
        three = _loader(shuffle=True)
        found = [_epoch(loader) for loader in (one, two, three)]
    with torchrepro.apply(AUTO):
        again = [_loader(shuffle=True) for _ in range(3)]
        if not before:
            _epoch(again[0]), _epoch(again[1])
        torchrepro.set_rng_state(state)

        assert found == [_epoch(loader) for loader in again]


def test_a_loader_made_after_a_snapshot_is_a_new_one_after_it_is_put_back() -> None:
    """Where each epoch has a loader of its own, those after a snapshot are the same after it."""
    with torchrepro.apply(AUTO):
        _epoch(_loader(shuffle=True)), _epoch(_loader(shuffle=True))
        state = torchrepro.rng_state()
        found = [_epoch(_loader(shuffle=True)) for _ in range(2)]
        torchrepro.set_rng_state(state)

        assert found == [_epoch(_loader(shuffle=True)) for _ in range(2)]
    with torchrepro.apply(AUTO):
        torchrepro.set_rng_state(state)

        assert found == [_epoch(_loader(shuffle=True)) for _ in range(2)]


@pytest.mark.parametrize("live_on", [True, False])
@pytest.mark.parametrize("timeout", [0, 300])
def test_forced_workers_load_the_same_in_the_main_process(live_on: bool, timeout: int) -> None:
    """With `num_workers: 0` samples are as in workers, loaded here; the loader's words stay."""
    options = {"num_workers": 2, "persistent_workers": live_on, "timeout": timeout}
    here = {"seed": 5, "dataloader": {"seeding": "auto", "num_workers": 0}}
    found = []
    for profile in (AUTO, here):
        with torchrepro.apply(profile):
            loader, placed = _loader(shuffle=True, **options), _loader(Placed(), **options)
            before = {k: v for k, v in vars(loader).items() if k != "_iterator"}
            found.append([_epoch(loader) for _ in range(2)])
            inside = {place for _, place in _epoch(placed)} == {os.getpid()}

            assert inside == (profile is here)
            assert before == {k: v for k, v in vars(loader).items() if k != "_iterator"}
    assert found[0] == found[1]


def test_forced_workers_reach_loaders_of_ones_own() -> None:
    """`num_workers: 0` holds for loaders made with `dataloader_kwargs` too, with equal samples."""
    found = []
    for forced in ({}, {"dataloader": {"num_workers": 0}}):
        with torchrepro.apply({"seed": 5, **forced}):
            loaders = [
                _loader(kind(), num_workers=2, **torchrepro.dataloader_kwargs("train"))
                for kind in (Noisy, Placed)
            ]
            found.append(_epoch(loaders[0]))
            places = {place for _, place in _epoch(loaders[1])}

    assert found[0] == found[1]
    assert places == {os.getpid()}


PROGRAM = """
import json, random, sys
import torchrepro
if sys.argv[2] == "profile":
    torchrepro.apply("seed-only")
import numpy, torch

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return index, random.random(), numpy.random.random(), torch.rand(()).item()

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        Noisy(), 2, shuffle=True, num_workers=int(sys.argv[1]), collate_fn=list
    )
    print(json.dumps([list(loader) for _ in range(2)]))
"""


@pytest.mark.slow
def test_processes_load_the_same_under_a_profile_and_not_without(tmp_path: Path) -> None:
    """A program whose author did nothing loads the same in every process under a profile."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    found = []
    for words in (("2", "profile"), ("2", "profile"), ("0", "profile"), ("2", "-"), ("2", "-")):
        command = [sys.executable, str(script), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        found.append(json.loads(done.stdout))
    *seeded, free, free_too = found

    assert seeded == [seeded[0]] * 3
    assert free != free_too
