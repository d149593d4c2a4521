"""torchdata's StatefulDataLoader is seeded as torch's loader, and resumes from its own state."""

import sys
from collections.abc import Callable
from importlib import import_module
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from .loaders import (
    Items,
    Noisy,
    all_draws,
    by_life,
    by_way,
    by_workers,
    drawn,
    draws,
    epoch,
    order,
    run,
    seed_plainly,
)

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

LENGTH, BATCHES = 14, 5


def _stateful(make: Any, dataset: Any = None, draw: Any = all_draws, **options: Any) -> Any:
    options = {"shuffle": dataset is None, "kind": StatefulDataLoader, **options}
    if dataset is not None:
        del options["shuffle"]
    return make(dataset or Noisy(LENGTH, draw), **options)


@pytest.mark.sampled(3)
@by_workers
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("asks", [True, False])
def test_a_stateful_loader_keeps_the_orders_of_plain_torchdata(
    workers: int, shuffle: bool, asks: bool, generators: Callable[[], Any]
) -> None:
    """Under `auto`, also from a state at the end of an epoch; generators move as in torchdata."""
    found = []
    for way in ("plain", "auto"):
        with run(way) as make:
            loader = _stateful(make, draw=tuple, shuffle=shuffle, num_workers=workers)
            if asks:
                loader.state_dict()
            orders = [order(epoch(loader)), order(epoch(loader))]
            found.append([orders, {**generators(), "plan": None}])
            resumed = _stateful(make, draw=tuple, shuffle=shuffle, num_workers=workers)
            resumed.load_state_dict(loader.state_dict())
            orders += [order(epoch(resumed)), order(epoch(resumed))]

    assert found[0] == found[1]


@by_workers
def test_a_state_at_an_epochs_end_moves_torchs_generator_as_an_uninterrupted_run(
    workers: int, generators: Callable[[], Any]
) -> None:
    """The loader resumes with the next epoch."""
    with run("auto") as make:
        loader = _stateful(make, num_workers=workers)
        epoch(loader)
        state, then = loader.state_dict(), torch.get_rng_state()
        following, after = epoch(loader), generators()
        resumed = _stateful(make, num_workers=workers)
        resumed.load_state_dict(state)
        torch.set_rng_state(then)

        assert (epoch(resumed), generators()) == (following, after)


@by_way
@by_life
def test_a_stateful_loader_loads_the_samples_of_a_plain_one(
    way: str, live_on: bool, workers: int
) -> None:
    """With the same order, its samples equal those of torch's own loader in each epoch."""
    found = []
    with run(way) as make:
        plain = make(Noisy(LENGTH, all_draws), shuffle=way == "named")
        found.append([epoch(plain) for _ in range(3)])
    with run(way) as make:
        options = {"num_workers": workers, "persistent_workers": live_on}
        loader = _stateful(make, shuffle=way == "named", **options)
        found.append([epoch(loader) for _ in range(3)])

    assert found[0] == found[1]
    for numbers in zip(*[each for samples in found[0] for each in drawn(samples)], strict=True):
        assert len(set(numbers)) == 3 * LENGTH


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("way", "items"), [("auto", 0), ("auto", 1), ("named", 0), ("named", 1)])
@settings(max_examples=6)
@given(
    epochs=st.integers(0, 2),
    done=st.integers(0, BATCHES),
    options=st.fixed_dictionaries(
        {"num_workers": st.sampled_from([0, 1]), "persistent_workers": st.booleans()}
    ),
)
def test_a_loader_resumes_from_the_state_of_another_run(
    way: str, items: int, epochs: int, done: int, options: dict[str, Any]
) -> None:
    """A state from any position in an epoch gives another run the remaining batches.

    The next epoch comes from torch's generator, unless the loader has a name.
    """
    # Without workers, items draw from the program's generators, which the state does not contain.
    assume(options["num_workers"] or way == "named" or not items)
    dataset = Items(LENGTH, all_draws) if items else None
    with run(way) as make:
        loader = _stateful(make, dataset, **options)
        for _ in range(epochs):
            epoch(loader)
        batches = iter(loader)
        _ = list(islice(batches, done))
        state, generator = loader.state_dict(), torch.get_rng_state()
        expected = [list(batches), list(loader)]
    with run(way) as make:
        _ = draws()
        resumed = _stateful(make, dataset, **options)
        resumed.load_state_dict(state)
        batches = iter(resumed)
        torch.set_rng_state(generator)

        assert [list(batches), list(resumed)] == expected
    assert len(expected[0]) == BATCHES - done


@pytest.mark.parametrize(("way", "ended"), [("auto", False), ("named", False), ("named", True)])
def test_a_state_contains_the_seeds_of_the_program(way: str, ended: bool) -> None:
    """An epoch continues as it began, also if the program has given other seeds since."""
    with run(way) as make:
        seed_plainly(1)
        batches = iter(loader := _stateful(make))
        _ = list(islice(batches, None if ended else 2))
        seed_plainly(2)
        state = loader.state_dict()
        expected = epoch(loader if ended else batches)
    with run(way) as make:
        seed_plainly(2)
        resumed = _stateful(make)
        resumed.load_state_dict(state)

        assert epoch(resumed) == expected


def test_a_loader_imported_after_the_profile_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `auto`, torchdata may be imported before or after the profile."""
    found = []
    for workers in (0, 2):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchdata"]:
            monkeypatch.delitem(sys.modules, name)
        with run("auto") as make:
            late = import_module("torchdata.stateful_dataloader").StatefulDataLoader
            loader = _stateful(make, shuffle=False, kind=late, num_workers=workers)
            found.append([epoch(loader), epoch(loader)])

    assert late is not StatefulDataLoader
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
