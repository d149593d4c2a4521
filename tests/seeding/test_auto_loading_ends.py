"""Where seeding of plain loaders ends: undone, switched off, nested, or not wanted by an author."""

import gc
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import torchrepro

AUTO = {"seed": 5, "dataloader": {"seeding": "auto"}}
NONE = {"dataloader": {"seeding": "none"}}
ORIGINAL = DataLoader.__iter__


def draws() -> tuple[float, ...]:
    """Draw as datasets do that know of no seeding."""
    return random.random(), np.random.random(), torch.rand(()).item()


class Noisy(Dataset[Any]):
    """Sample `i` is `i` and what the generators gave; sample `bad` raises."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        drawn = draws()
        if index == self.bad:
            raise OSError("no such picture")
        return index, drawn


class Nested(Noisy):
    """Sample `i` is `i` and what a loader of its own gives."""

    def __getitem__(self, index: int) -> Any:
        return index, _epoch(_loader(shuffle=True))


class Items(IterableDataset[Any]):
    """Items with what the generators gave, of a dataset that can fail to begin."""

    def __init__(self, *, begins: bool = True) -> None:
        self.begins = begins

    def __iter__(self) -> Iterator[Any]:
        if not self.begins:
            raise OSError("no such picture")
        return ((item, draws()) for item in range(8))


def do_nothing(worker: int) -> None:
    """Be the init function of an author who wants torch's own seeding of workers."""


@pytest.fixture(autouse=True)
def _no_other_loaders() -> None:
    """Let go of loaders that another test made: as long as one lives, `__iter__` is wrapped."""
    gc.collect()


def _loader(dataset: Any = None, **options: Any) -> Any:
    return DataLoader(dataset or Noisy(), **{"batch_size": 3, "collate_fn": list, **options})


def _epoch(loader: Any) -> list[Any]:
    return list(chain(*loader))


def _seed() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


LOADERS: dict[str, Callable[[], Any]] = {
    "in the main process": lambda: _loader(shuffle=True),
    "on workers": lambda: _loader(shuffle=True, num_workers=2),
    "on workers that live on": lambda: _loader(
        shuffle=True, num_workers=2, persistent_workers=True
    ),
    "items": lambda: _loader(Items()),
    "items on a worker": lambda: _loader(Items(), num_workers=1),
}
AUTHORS: dict[str, Callable[[], Any]] = {
    "a generator": lambda: _loader(shuffle=True, generator=torch.Generator().manual_seed(4)),
    "a generator, on workers": lambda: _loader(
        shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(4)
    ),
    "an init function": lambda: _loader(shuffle=True, worker_init_fn=do_nothing),
    "an init function, on workers": lambda: _loader(
        shuffle=True, num_workers=2, worker_init_fn=do_nothing
    ),
}


def _plainly(make: Callable[[], Any]) -> Any:
    """Load two epochs with seeds of one's own; return them, and where the generators are then."""
    _seed()
    loader = make()
    return [_epoch(loader) for _ in range(2)], draws()


@pytest.mark.parametrize("kind", LOADERS)
def test_none_and_undo_give_the_behaviour_of_torch_alone(kind: str) -> None:
    """With `none`, with no word on loaders and after undo, torch's own numbers are drawn."""
    expected = _plainly(LOADERS[kind])
    for profile in ({"seed": 5, **NONE}, {"seed": 5}):
        with torchrepro.apply(profile):
            assert DataLoader.__iter__ is ORIGINAL
            assert _plainly(LOADERS[kind]) == expected
    with torchrepro.apply(AUTO):
        assert DataLoader.__iter__ is not ORIGINAL
        assert _plainly(LOADERS[kind]) != expected

    assert DataLoader.__iter__ is ORIGINAL
    assert _plainly(LOADERS[kind]) == expected


@pytest.mark.parametrize("kind", AUTHORS)
def test_a_loader_that_its_author_seeded_is_left_alone(kind: str) -> None:
    """Whoever gave a generator or a `worker_init_fn` gets what torch makes of it."""
    expected = _plainly(AUTHORS[kind])
    with torchrepro.apply(AUTO):
        assert _plainly(AUTHORS[kind]) == expected


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if "live on" not in kind])
def test_a_loader_used_in_two_profiles_and_beside_them_is_what_each_says(kind: str) -> None:
    """A loader made outside is seeded anew under every profile, and plain between them."""
    loader = LOADERS[kind]()
    found = []
    for _ in range(2):
        with torchrepro.apply(AUTO):
            found.append([_epoch(loader) for _ in range(2)])
        _seed()
        found.append([_epoch(loader), draws()])

    assert found[0] == found[2]
    assert found[1] == found[3] == [_plainly(LOADERS[kind])[0][0], found[1][1]]


def test_workers_that_outlive_the_profile_draw_as_torch_has_them() -> None:
    """After undo, such a loader shuffles by torch's generator, and repeats no number."""
    with torchrepro.apply(AUTO):
        loader = LOADERS["on workers that live on"]()
        found = _epoch(loader)
    _seed()
    expected = [list(RandomSampler(Noisy())) for _ in range(3)]
    _seed()
    epochs = [_epoch(loader) for _ in range(3)]

    assert [[index for index, _ in samples] for samples in epochs] == expected
    assert len({drawn for _, drawn in chain(found, *epochs)}) == 4 * 8


def test_workers_that_began_before_the_profile_are_left_alone() -> None:
    """A loader whose workers are there when a profile comes goes on as it would without one."""
    epochs = []
    for profile in ({}, AUTO):
        _seed()
        loader = LOADERS["on workers that live on"]()
        first = _epoch(loader)
        with torchrepro.apply(profile):
            _seed()
            epochs.append([first, _epoch(loader), _epoch(loader)])

    assert epochs[0] == epochs[1]


def test_forced_workers_alone_are_no_seeding() -> None:
    """`num_workers: 0` without `auto` gives what the author's loader without workers gives."""
    expected = _plainly(LOADERS["in the main process"])
    with torchrepro.apply({"dataloader": {"num_workers": 0}}):
        assert _plainly(LOADERS["on workers"]) == expected
        assert _plainly(LOADERS["on workers that live on"]) == expected

    assert DataLoader.__iter__ is ORIGINAL


@pytest.mark.parametrize(
    "inner",
    [NONE, {**NONE, "seed": 6}, {**AUTO, "seed": 6}, AUTO],
    ids=["none", "none, another seed", "auto, another seed", "auto, the same seed"],
)
def test_a_profile_within_leaves_the_epochs_of_the_one_around_it(inner: Any) -> None:
    """After an inner profile the loaders of the outer one go on as if it had not been."""
    found = []
    for nested in (None, inner):
        with torchrepro.apply(AUTO):
            one, two = (_loader(shuffle=True) for _ in range(2))
            epochs = [_epoch(one)]
            if nested:
                with torchrepro.apply(nested):
                    _epoch(one), _epoch(_loader())
            found.append([*epochs, _epoch(one), _epoch(two)])

    assert found[0] == found[1]
    assert DataLoader.__iter__ is ORIGINAL


def test_an_inner_profile_decides_while_it_is_in_force() -> None:
    """Within an inner profile loaders are seeded as by it alone: by its seed, or not at all."""
    with torchrepro.apply({**AUTO, "seed": 6}):
        alone = _epoch(_loader(shuffle=True))
    plain = _plainly(LOADERS["in the main process"])
    with torchrepro.apply(AUTO):
        loader = _loader(shuffle=True)
        _epoch(loader)
        with torchrepro.apply({**AUTO, "seed": 6}):
            assert _epoch(loader) == alone
        with torchrepro.apply({**NONE, "seed": 6}):
            assert _plainly(LOADERS["in the main process"]) == plain


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset", [Noisy(bad=4), Items(begins=False)], ids=["a sample", "the beginning"]
)
def test_an_error_in_a_dataset_leaves_everything_as_it_was(
    dataset: Any, workers: int, world: Callable[[], Any]
) -> None:
    """Whatever a dataset raises, generators, the loader and torch's readers are as before."""
    with torchrepro.apply(AUTO):
        loader = _loader(dataset, num_workers=workers)
        before = world(), dict(vars(loader)), data._DatasetKind.create_fetcher
        batches = None
        try:
            batches = iter(loader)
            list(batches)
        except OSError as error:
            assert "no such picture" in str(error)  # noqa: PT017 - it comes from either line
        else:
            pytest.fail("no error")
        if workers:  # torch waits 5 s for each if it finds them as garbage
            batches._shutdown_workers()

        assert before == (world(), dict(vars(loader)), data._DatasetKind.create_fetcher)


def test_a_profile_that_fails_to_apply_leaves_loaders_as_they_were() -> None:
    """A profile that is refused seeds no loader."""
    with pytest.raises(torchrepro.ProfileError):
        torchrepro.apply({**AUTO, "ranks": "nonsense"})

    assert DataLoader.__iter__ is ORIGINAL


@pytest.mark.parametrize("seeding", ["auto", "none"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_may_read_through_a_loader_of_its_own(seeding: str, workers: int) -> None:
    """What loaders within samples give depends on no worker, and shifts no later loader."""
    found = []
    for count in (0, workers):
        with torchrepro.apply({"seed": 5, "dataloader": {"seeding": seeding}}):
            kwargs = torchrepro.dataloader_kwargs("outer") if seeding == "none" else {}
            outer = _loader(Nested(), num_workers=count, **kwargs)
            found.append([_epoch(outer), _epoch(_loader(shuffle=True)), _epoch(outer)])

    assert found[0] == found[1]
