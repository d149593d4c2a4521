"""Laws for all loaders, seeded by torch's protocol or by name."""

import json
import os
import random
from collections.abc import Callable
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, _DatasetKind

import torchrepro

from .loaders import (
    AUTHORS,
    KINDS,
    Eager,
    Failing,
    Items,
    Noisy,
    Rows,
    all_draws,
    by_way,
    by_workers,
    drawn,
    draws,
    epoch,
    fails,
    order,
    run,
    seed_plainly,
    some,
)


def _own_states(loader: Any) -> list[Any]:
    """Return the states of the generators that the program gave to a loader or its sampler."""
    own = (getattr(part, "generator", None) for part in (loader, loader.sampler))
    return [generator.get_state().tolist() for generator in own if generator is not None]


def _three_epochs(way: str, kind: str, generators: Any, draw: Any, **options: Any) -> Any:
    """Return three epochs, and the later states of the global generators and the loader's own."""
    with run(way) as make:
        loader = make(None, kind, draw=draw, **options)
        epochs = [epoch(loader) for _ in range(3)]
        own = _own_states(loader) if way != "named" else []
        return epochs, {**generators(), "plan": None}, own


@pytest.mark.sampled(4)
@by_way
@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_does_not_depend_on_workers_or_batches(
    way: str, kind: str, generators: Callable[[], Any]
) -> None:
    """Neither changes a sample, the order, or a generator; no number is drawn twice.

    By torch's protocol, orders and generators equal those without torchrepro.
    """
    if way == "named" and kind in AUTHORS:
        pytest.skip("a loader with a name has its generator from there")
    batch_size = 3 if "in batches" in kind else 1  # these draw as they read a batch
    on_workers = {"num_workers": 2, "persistent_workers": KINDS.index(kind) % 2 == 0}

    found = _three_epochs(way, kind, generators, all_draws, batch_size=batch_size)

    assert found == _three_epochs(way, kind, generators, all_draws, **on_workers)
    for numbers in zip(*drawn(chain(*found[0])), strict=True):
        assert len(set(numbers)) == len(numbers)
    if way == "auto":
        epochs, *states = _three_epochs("plain", kind, generators, tuple)
        assert list(map(order, epochs)) == list(map(order, found[0]))
        assert states == [*found[1:]]


def _collate(samples: list[Any]) -> list[Any]:
    return [*samples, (order(samples), all_draws())]


@by_way
def test_draws_of_collate_fn_depend_on_the_batch_only(way: str) -> None:
    """Batches draw the same numbers with any number of workers; each batch and epoch differs."""
    found = []
    for count in (0, 2):
        with run(way) as make:
            loader = make(Noisy(draw=all_draws), "shuffle", collate_fn=_collate, num_workers=count)
            found.append([*epoch(loader), *epoch(loader)])

    assert found[0] == found[1]
    assert len(set(drawn(found[0]))) == len(found[0])


@by_way
def test_the_type_of_an_index_does_not_matter(way: str) -> None:
    """Sample 2 draws the same numbers for an index of int, numpy or torch."""
    found = []
    for name in (2, np.int64(2), np.uint8(2), torch.tensor(2)):
        with run(way) as make:
            found.append(drawn(epoch(make(sampler=[name]))))

    assert found == [found[0]] * 4


class Anonymous:
    """An index whose `repr` shows its address."""


@by_way
@by_workers
@pytest.mark.parametrize(
    "name",
    [Anonymous(), ("a", Anonymous()), {"id": Anonymous()}],
    ids=["alone", "in a tuple", "in a dict"],
)
def test_indices_with_an_address_in_their_repr_are_counted(
    way: str, name: Any, workers: int
) -> None:
    """The text differs between processes, so each draws by its position, the same in two runs."""
    found = []
    for _ in range(2):
        with run(way) as make:
            found.append(epoch(make(sampler=[name, name], num_workers=workers)))

    assert drawn(found[0]) == drawn(found[1])
    assert len(set(map(str, drawn(found[0])))) == 2


@by_way
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_long_index_arrays_are_compared_completely(way: str, kind: Any) -> None:
    """Two long arrays that differ in one number are two batches, and draw different numbers."""
    one, two = list(range(1500)), list(range(1500))
    two[700] = 3
    with run(way) as make:
        loader = make(Rows(), batch_sampler=[kind(one), kind(two), kind([4])])

        assert len({batch[0][1] for batch in loader}) == 3


@by_way
@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, torch.tensor], ids=lambda kind: kind.__name__
)
def test_repeated_samples_draw_different_numbers(way: str, kind: Any) -> None:
    """A sample draws different numbers each time, within one batch and in a later one."""
    with run(way) as make:
        found = epoch(make(Noisy(4), batch_sampler=[kind([1, 1, 2]), kind([2, 1, 1])]))

    assert len({str(numbers) for numbers in drawn(found)}) == 6


@by_way
@pytest.mark.parametrize("kind", [Items, Eager])
def test_workers_of_an_iterable_dataset_repeat_in_every_run(way: str, kind: Any) -> None:
    """Two workers draw the same numbers in every run, persistent or not, and none twice."""
    found = []
    for live_on in (True, False):
        with run(way) as make:
            loader = make(kind(draw=all_draws), num_workers=2, persistent_workers=live_on)
            found.append([epoch(loader) for _ in range(3)])

    assert found[0] == found[1]
    assert len(set(drawn(chain(*found[0])))) == 3 * 8


class Counted(Items):
    """Items that count how often this process has begun their dataset."""

    begun = 0

    def __iter__(self) -> Any:
        self.begun += 1
        return iter([(self.begun, item) for item in range(self.length)])


@by_way
@pytest.mark.parametrize("live_on", [True, False])
def test_an_iterable_dataset_is_begun_once_per_epoch(way: str, live_on: bool) -> None:
    """Seeding asks for an iterator of the dataset exactly as often as torch alone does."""
    found = []
    for each in ("plain", way):
        with run(each) as make:
            loader = make(Counted(), num_workers=1, persistent_workers=live_on)
            found.append([epoch(loader) for _ in range(3)])

    assert found[0] == found[1]


def _bad(place: int | None = None, kind: Any = Items) -> Callable[[Any], Any]:
    return lambda draw: kind(8, draw, place)


SHUFFLE = {"shuffle": True}
USES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], dict[str, Any]]] = {
    "to its end": (epoch, _bad(kind=Noisy), SHUFFLE),
    "not at all": (iter, _bad(kind=Noisy), SHUFFLE),
    "left early": (some, _bad(kind=Noisy), SHUFFLE),
    "with a sample that raises": (fails, _bad(4, Noisy), SHUFFLE),
    "with a sampler that raises first": (fails, _bad(kind=Noisy), {"sampler": Failing(0)}),
    "with a sampler that raises": (fails, _bad(kind=Noisy), {"sampler": Failing(6)}),
    "of items": (epoch, _bad(), {}),
    "of items, left early": (some, _bad(), {}),
    "of items, one of which raises": (fails, _bad(3), {}),
    "of items, the first of which raises": (fails, _bad(0), {}),
    "of items that cannot be begun": (fails, _bad(-1), {}),
    "of items begun eagerly": (epoch, _bad(kind=Eager), {}),
}


@pytest.mark.sampled(3)
@by_way
@by_workers
@pytest.mark.parametrize("use", USES)
def test_an_iteration_moves_the_generators_as_torch_or_not_at_all(
    way: str, use: str, workers: int, generators: Callable[[], Any]
) -> None:
    """In all its endings, `auto` moves the generators as torch does, a named loader moves none."""
    act, dataset, options = USES[use]
    in_program = not workers and "items" in use  # there it draws on as without a profile
    with run("plain") as make:
        before = generators()
        act(make(dataset(draws if in_program else tuple), num_workers=workers, **options))
        expected = before if way == "named" else generators()
    with run(way) as make:
        loader = make(dataset(draws), num_workers=workers, **options)
        parts = dict(vars(loader)), _DatasetKind.create_fetcher
        act(loader)

        assert generators() == expected
        assert parts == (dict(vars(loader)), _DatasetKind.create_fetcher)
        with pytest.raises(torchrepro.SeedingError, match="no sample is being loaded"):
            torchrepro.sample_rng()


def _twice() -> tuple[Any, ...]:
    one, two = torchrepro.sample_rng(), torchrepro.sample_rng()
    return one is two, one.random(), two.random()


@by_way
@by_workers
@pytest.mark.parametrize("dataset", [Noisy, Items])
def test_sample_rng_is_one_generator_within_a_sample(way: str, workers: int, dataset: Any) -> None:
    """Later calls within a sample continue its numbers, the same in two runs."""
    found = []
    for _ in range(2):
        with run(way) as make:
            found.append(drawn(epoch(make(dataset(draw=_twice), num_workers=workers))))

    assert found[0] == found[1]
    assert all(same and one != two for same, one, two in found[0])
    assert len({number for _, *numbers in found[0] for number in numbers}) == 2 * len(found[0])


class Nested(Noisy):
    """Sample `i` is `i` and the samples of an inner loader."""

    def __getitem__(self, index: int) -> Any:
        return index, epoch(DataLoader(Noisy(), 3, shuffle=True, collate_fn=list))


@by_way
def test_a_dataset_may_use_an_inner_loader(way: str) -> None:
    """Samples of inner loaders do not depend on workers, and do not change later loaders."""
    found = []
    for dataset, count in ((Nested, 0), (Nested, 2), (Noisy, 0)):
        with run(way) as make:
            outer = make(dataset(), name="outer", num_workers=count)
            found.append([epoch(outer), epoch(make(shuffle=True)), epoch(outer)])

    assert found[0] == found[1]
    assert found[0][1] == found[2][1]


@contextmanager
def _restored_plainly() -> Any:
    """Restore the generators after the block as plain programs do."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


SCOPES: dict[str, Callable[[], Any]] = {
    "restored states": _restored_plainly,
    "isolated_rng": torchrepro.isolated_rng,
    "seeded": lambda: torchrepro.seeded("init"),
    "a profile": lambda: torchrepro.apply({"seed": 6}),
    "the same profile": run,
}


@pytest.mark.parametrize(("way", "workers"), [("auto", 0), ("auto", 2), ("named", 0)])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_restored_seed_does_not_change_later_samples(scope: str, way: str, workers: int) -> None:
    """Seeds within a scope that restores the generators change no later sample."""
    for seeds in (True, False) if way == "named" else (True,):
        found = []
        for evaluates in (False, True):
            with run(way) as make:
                loader = make(shuffle=True, num_workers=workers)
                if seeds:
                    seed_plainly(1)
                epoch(loader)
                if evaluates:
                    with SCOPES[scope]():
                        seed_plainly(9)
                        epoch(make(name="other", shuffle=True))
                found.append(epoch(loader))

        assert found[0] == found[1]


def _kept(make: Any) -> list[Any]:
    return [make(name=f"{n}", shuffle=True, num_workers=n) for n in (0, 2, 0)]


@by_way
@pytest.mark.parametrize("used", [True, False])
def test_a_restored_snapshot_repeats_the_following_samples(way: str, used: bool) -> None:
    """In the same run and in another one, before and after its loaders are used, through JSON."""
    with run(way) as make:
        one, two, three = _kept(make)
        _ = epoch(one), epoch(one), epoch(two)
        state = json.loads(json.dumps(torchrepro.rng_state()))
        torchrepro.set_rng_state(state)  # which changes nothing
        found = [epoch(loader) for loader in (one, two, three, one)]
        torchrepro.set_rng_state(state)
        assert found == [epoch(loader) for loader in (one, two, three, one)]
    with run(way) as make:
        one, two, three = _kept(make)
        if used:
            _ = epoch(one), epoch(three)
        torchrepro.set_rng_state(state)

        assert found == [epoch(loader) for loader in (one, two, three, one)]


@by_way
@pytest.mark.parametrize(("live_on", "timeout"), [(True, 0), (False, 300)])
def test_forced_workers_load_the_same_in_the_main_process(
    way: str, live_on: bool, timeout: int
) -> None:
    """`num_workers: 0` loads the same samples in this process; errors stay the same."""
    options = {"num_workers": 2, "persistent_workers": live_on, "timeout": timeout}
    found = []
    for forced in ({}, {"num_workers": 0}):
        seeding = {"seeding": "auto"} if way == "auto" else {}
        with run(way, dataloader={**seeding, **forced}) as make:
            loader, placed = make(shuffle=True, **options), make(Noisy(draw=os.getpid), **options)
            before = {k: v for k, v in vars(loader).items() if k != "_iterator"}
            found.append([epoch(loader) for _ in range(2)])
            here = set(drawn(epoch(placed))) == {os.getpid()}

            assert here == bool(forced)
            assert before == {k: v for k, v in vars(loader).items() if k != "_iterator"}
    assert found[0] == found[1]


class _Refusing:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        raise torchrepro.SeedingError.about("these numbers cannot be drawn")


def test_an_error_in_a_worker_keeps_its_message() -> None:
    """An error of torchrepro in a worker has the same message in the main process."""
    loader = DataLoader(_Refusing(), num_workers=1)

    with pytest.raises(torchrepro.SeedingError, match="these numbers cannot be drawn"):
        next(iter(loader))
