"""What names a loader, and which loaders are left alone."""

import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchrepro

AUTO = {"seed": 5, "dataloader": {"seeding": "auto"}}
ORIGINAL = DataLoader.__iter__
NO_CHECK, FIRST, BETWEEN, BOTH = "none", "first", "between", "both"


class Noisy(Dataset[Any]):
    """Sample `i` is `i` and what the generators gave."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.random(), torch.rand(()).item()


class Unhashable(DataLoader):
    """A loader that equals others, and so has no hash."""

    __hash__ = None  # what Python gives a class with __eq__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


class Batched(DataLoader):
    """A loader that makes up its batches whenever it is asked for them."""

    @property
    def batch_sampler(self) -> Any:
        return [torch.randperm(6).tolist() for _ in range(2)]

    @batch_sampler.setter
    def batch_sampler(self, given: Any) -> None:
        """Take no notice of torch's own."""


def _epoch(loader: Any) -> list[list[Any]]:
    """Return the batches of an epoch as plain values."""
    found = []
    for batch in loader:
        parts = batch if isinstance(batch, list) else [batch]
        found.append(list(chain.from_iterable(part.tolist() for part in parts)))
    return found


def _loader(length: int = 12, **options: Any) -> Any:
    return DataLoader(Noisy(length), batch_size=4, shuffle=True, **options)


def _trained(checks: str, *, anew: bool, workers: int = 0) -> list[Any]:
    """Return what three epochs of training load, with validation where `checks` says."""
    train, check = (_loader(12, num_workers=workers), _loader(5))
    loaded = []
    with torchrepro.apply(AUTO):
        if checks in (FIRST, BOTH):
            _epoch(_loader(5) if anew else check)
        for _ in range(3):
            loaded.append(_epoch(_loader(12, num_workers=workers) if anew else train))
            if checks in (BETWEEN, BOTH):
                _epoch(_loader(5) if anew else check)
    return loaded


@pytest.mark.parametrize("anew", [False, True], ids=["kept", "made anew"])
@pytest.mark.parametrize("checks", [FIRST, BETWEEN, BOTH])
def test_validation_does_not_change_what_training_loads(checks: str, anew: bool) -> None:
    """Whether and when a validation loader runs changes no batch of the training loader."""
    trained = _trained(checks, anew=anew)

    assert trained == _trained(NO_CHECK, anew=anew)
    assert trained[0] != trained[1] != trained[2]


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True], ids=["kept", "made anew"])
def test_validation_does_not_change_what_workers_load(anew: bool) -> None:
    """With workers too, validation changes no batch of the training loader."""
    assert _trained(BOTH, anew=anew, workers=1) == _trained(NO_CHECK, anew=anew)


def test_the_dataset_and_its_length_tell_loaders_apart() -> None:
    """Loaders of one dataset class draw differently where lengths or turns differ."""
    with torchrepro.apply(AUTO):
        first, again = _epoch(_loader(12)), _epoch(_loader(12))
        longer = _epoch(_loader(16))
    with torchrepro.apply(AUTO):
        assert _epoch(_loader(16)) == longer
        assert _epoch(_loader(12)) == first
        assert _epoch(_loader(12)) == again

    assert first != again


@pytest.mark.parametrize("made", ["before", "after"])
def test_putting_a_snapshot_back_at_once_changes_nothing(made: str) -> None:
    """`set_rng_state(rng_state())` changes no batch of a loader that was not iterated yet."""
    with torchrepro.apply(AUTO):
        loader = _loader()
        expected = [_epoch(loader) for _ in range(3)]
    with torchrepro.apply(AUTO):
        loader = _loader() if made == "before" else None
        torchrepro.set_rng_state(torchrepro.rng_state())
        loader = loader or _loader()
        assert [_epoch(loader) for _ in range(3)] == expected


def test_a_snapshot_from_before_the_first_epoch_brings_it_back() -> None:
    """A loader first seen after a snapshot loads its first epochs again once that is restored."""
    with torchrepro.apply(AUTO):
        loader = _loader()
        snapshot = torchrepro.rng_state()
        loaded = [_epoch(loader) for _ in range(2)]
        torchrepro.set_rng_state(snapshot)

        assert [_epoch(loader) for _ in range(2)] == loaded


def test_a_rank_that_is_known_late_counts_from_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader named before its rank was known draws as that rank from the next epoch on."""

    def named() -> Any:
        return _loader(**torchrepro.dataloader_kwargs("train"))

    with torchrepro.apply({"seed": 5}):
        loader = named()
        alone = [_epoch(loader), _epoch(loader)]
    with torchrepro.apply({"seed": 5}):
        loader = named()
        late = [_epoch(loader)]
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        late.append(_epoch(loader))
    with torchrepro.apply({"seed": 5}):
        loader = named()
        ranked = [_epoch(loader), _epoch(loader)]

    assert late == [alone[0], ranked[1]]
    assert alone[1] != ranked[1]


@pytest.mark.parametrize("kind", [Unhashable, Batched])
def test_a_loader_that_cannot_be_seeded_is_left_alone(kind: type[Any]) -> None:
    """A loader without a hash, or with batches of its own making, loads as without a profile."""

    def load() -> list[Any]:
        torch.manual_seed(3)
        loader = kind(range(6), batch_size=3)
        return [[batch.tolist() for batch in loader], torch.rand(1).item()]

    plain = load()
    with torchrepro.apply(AUTO):
        assert load() == plain


@pytest.fixture
def patched() -> Iterator[Callable[[], Any]]:
    """Return a function that patches `DataLoader.__iter__`, as a profiler would."""

    def patch() -> Any:
        inner = DataLoader.__iter__

        def profiled(loader: Any) -> Any:
            return inner(loader)

        DataLoader.__iter__ = profiled
        return profiled

    yield patch
    DataLoader.__iter__ = ORIGINAL


def test_undo_leaves_the_patch_of_another(patched: Callable[[], Any]) -> None:
    """A patch of `DataLoader.__iter__` made under a profile stays after it, and loads unseeded."""
    torch.manual_seed(3)
    plain = _epoch(DataLoader(range(9), shuffle=True))
    with torchrepro.apply(AUTO):
        profiled = patched()
        _epoch(_loader())
    torch.manual_seed(3)

    assert DataLoader.__iter__ is profiled
    assert _epoch(DataLoader(range(9), shuffle=True)) == plain


def test_a_patch_that_outlived_a_profile_changes_no_epoch(patched: Callable[[], Any]) -> None:
    """Under a second profile, a patch made under the first one changes nothing that is loaded."""
    found = []
    for turn in range(3):
        with torchrepro.apply(AUTO):
            loader = _loader()
            if turn == 0:
                profiled = patched()
            found.append([_epoch(loader) for _ in range(3)])

        assert DataLoader.__iter__ is profiled
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("given", [[1], None, "loader", 3])
def test_what_is_no_loader_has_no_epoch(given: Any) -> None:
    """`set_epoch` of something that is no loader raises `SeedingError`."""
    with torchrepro.apply(AUTO), pytest.raises(torchrepro.SeedingError):
        torchrepro.set_epoch(given, 1)


@pytest.mark.parametrize("given", [None, 3, [[0, 1]]])
def test_what_is_no_mesh_is_refused(given: Any) -> None:
    """`use_mesh` of something that is no mesh raises `SeedingError`, under a profile or not."""
    with pytest.raises(torchrepro.SeedingError, match="not a device mesh"):
        torchrepro.use_mesh(given)
    with torchrepro.apply(AUTO), pytest.raises(torchrepro.SeedingError, match="not a device mesh"):
        torchrepro.use_mesh(given)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("seeding", ["auto", "explicit"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stateful_loader_goes_on_in_a_later_epoch(seeding: str, workers: int) -> None:
    """From its own state of epoch 1 a StatefulDataLoader goes on without being told the epoch."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        named = torchrepro.dataloader_kwargs("train") if seeding == "explicit" else {}
        return stateful(Noisy(), batch_size=2, shuffle=True, num_workers=workers, **named)

    profile = AUTO if seeding == "auto" else {"seed": 5}
    with torchrepro.apply(profile):
        first = loader()
        _epoch(first)
        batches = iter(first)
        for _ in range(2):
            next(batches)
        state = first.state_dict()
        rest = [_epoch(batches), _epoch(first)]
    with torchrepro.apply(profile):
        second = loader()
        second.load_state_dict(state)
        assert [_epoch(second), _epoch(second)] == rest
