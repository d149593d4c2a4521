"""torchdata's StatefulDataLoader: seeded as torch's own loader, and resumed by its own state."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

import torchrepro

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

LENGTH = 14
WORKERS = st.sampled_from([0, 2])


def draws() -> tuple[float, ...]:
    """Draw from each generator that a sample may use."""
    ready = torchrepro.sample_rng().random()
    return random.random(), np.random.random(), torch.rand(()).item(), ready


class Noisy(Dataset[Any]):
    """Sample `i` is `i` and what the generators gave."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, draws()


class Items(IterableDataset[Any]):
    """Items with what the generators gave."""

    def __iter__(self) -> Iterator[Any]:
        for item in range(LENGTH):
            yield item, draws()


Make = Callable[..., Any]


@contextmanager
def run(seeding: str) -> Iterator[Make]:
    """Be a run of a program; yield what makes a loader in it, seeded as `seeding` says."""

    def make(kind: Any, dataset: Any = None, **options: Any) -> Any:
        own = torchrepro.dataloader_kwargs("train") if seeding == "explicit" else {}
        options = {"batch_size": 3, "collate_fn": list, "shuffle": dataset is None, **options}
        return kind(Noisy() if dataset is None else dataset, **options, **own)

    automatic = "auto" if seeding == "auto" else "none"
    with torchrepro.apply({"seed": 5, "dataloader": {"seeding": automatic}}):
        yield make


SEEDINGS = pytest.mark.parametrize("seeding", ["explicit", "auto"])


def _epoch(loader: Any) -> list[Any]:
    return list(chain(*loader))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("live_on", [True, False])
@pytest.mark.parametrize(
    ("seeding", "shuffle"), [("explicit", True), ("explicit", False), ("auto", False)]
)
def test_a_stateful_loader_loads_what_a_plain_one_loads(
    workers: int, live_on: bool, seeding: str, shuffle: bool
) -> None:
    """torchdata's loader gives the samples of torch's, epoch by epoch."""
    found = []
    for kind, count in ((DataLoader, 0), (StatefulDataLoader, workers)):
        options = {"num_workers": count, "persistent_workers": live_on and count > 0}
        with run(seeding) as make:
            loader = make(kind, shuffle=shuffle, **options)
            found.append([_epoch(loader) for _ in range(3)])

    assert found[0] == found[1]


@SEEDINGS
@pytest.mark.parametrize("workers", [0, 2])
def test_the_order_depends_on_seed_and_epoch_alone(seeding: str, workers: int) -> None:
    """What else drew numbers, and how an epoch was reached, decide nothing of what is loaded."""
    with run(seeding) as make:
        loader = make(StatefulDataLoader)
        first, second = _epoch(loader), _epoch(loader)
    with run(seeding) as make:
        _ = torch.rand(3), random.random()
        other = make(StatefulDataLoader, num_workers=workers)
        torchrepro.set_epoch(other, 1)

        assert _epoch(other) == second
        torchrepro.set_epoch(other, 0)
        assert _epoch(other) == first


def _stopped(loader: Any, epoch: int, done: int) -> Any:
    """Load `done` batches of an epoch; return the loader's state, and its other batches."""
    torchrepro.set_epoch(loader, epoch)
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    return loader.state_dict(), list(batches)


@SEEDINGS
@pytest.mark.parametrize("done", [2, LENGTH])
def test_a_state_holds_the_seed_that_the_program_had_given(seeding: str, done: int) -> None:
    """An epoch goes on as it began, whatever the program seeds torch with after its beginning."""
    with run(seeding) as make:
        torch.manual_seed(1)
        batches = iter(loader := make(StatefulDataLoader))
        _ = list(islice(batches, done))
        torch.manual_seed(2)
        state, expected = loader.state_dict(), [*chain(*batches), *_epoch(loader)]
    with run(seeding) as make:
        torch.manual_seed(2)
        resumed = make(StatefulDataLoader)
        resumed.load_state_dict(state)
        within = _epoch(resumed) if done < LENGTH else []

        assert expected == [*within, *_epoch(resumed)]


@SEEDINGS
@pytest.mark.parametrize("shuffle", [True, False])
@settings(max_examples=12)
@given(epoch=st.integers(0, 2), done=st.integers(0, 4), workers=WORKERS)
def test_a_loader_goes_on_from_the_state_of_another_run(
    seeding: str, shuffle: bool, epoch: int, done: int, workers: int
) -> None:
    """A state taken anywhere in an epoch gives another run the rest of it, and the next one."""
    with run(seeding) as make:
        loader = make(StatefulDataLoader, num_workers=workers, shuffle=shuffle)
        state, rest = _stopped(loader, epoch, done)
        following = list(loader)
    with run(seeding) as make:
        _ = torch.rand(done), random.random()
        resumed = make(StatefulDataLoader, num_workers=workers, shuffle=shuffle)
        torchrepro.set_epoch(resumed, epoch)
        resumed.load_state_dict(state)

        assert list(resumed) == rest
        assert list(resumed) == following


@SEEDINGS
@settings(max_examples=6)
@given(done=st.integers(1, 4), workers=st.sampled_from([0, 1]))
def test_items_go_on_from_a_state_as_well(seeding: str, done: int, workers: int) -> None:
    """An IterableDataset that is read again up to the state draws what it drew."""
    with run(seeding) as make:
        loader = make(StatefulDataLoader, Items(), num_workers=workers)
        state, rest = _stopped(loader, 2, done)
    with run(seeding) as make:
        resumed = make(StatefulDataLoader, Items(), num_workers=workers)
        torchrepro.set_epoch(resumed, 2)
        resumed.load_state_dict(state)

        assert list(resumed) == rest
    assert [len(batch) for batch in rest] == [3] * (4 - done) + [2]


@SEEDINGS
@pytest.mark.parametrize("workers", [0, 2])
def test_asking_for_a_state_before_the_first_batch_changes_nothing(
    seeding: str, workers: int
) -> None:
    """A loader that is asked for its state first gives its first epoch all the same."""
    found = []
    for asks in (False, True):
        with run(seeding) as make:
            loader = make(StatefulDataLoader, num_workers=workers, shuffle=False)
            if asks:
                loader.state_dict()
            found.append([_epoch(loader) for _ in range(2)])

    assert found[0] == found[1]


@SEEDINGS
def test_iterating_moves_no_generator_of_the_program(
    seeding: str, world: Callable[[], Any]
) -> None:
    """An epoch, a resumed one too, leaves the global generators where they were."""
    with run(seeding) as make:
        loader, resumed = (make(StatefulDataLoader) for _ in range(2))
        before = world()
        batches = iter(loader)
        next(batches)
        resumed.load_state_dict(loader.state_dict())
        _epoch(resumed)

        assert before == world()


LATE = """
import json, random, sys
import torchrepro
torchrepro.apply("seed-only")
import numpy, torch

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index, random.random(), numpy.random.random(), torch.rand(()).item()

def main(workers, noise):
    random.random(), torch.rand(noise)
    from torchdata.stateful_dataloader import StatefulDataLoader
    loader = StatefulDataLoader(Noisy(), 2, collate_fn=list, num_workers=workers)
    print(json.dumps([list(loader) for _ in range(2)]))

if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_loader_imported_after_the_profile_is_seeded(tmp_path: Path) -> None:
    """It does not matter when torchdata is imported: its loader is seeded under `auto`."""
    script = tmp_path / "late.py"
    script.write_text(LATE, encoding="utf-8")
    found = []
    for words in (("0", "0"), ("2", "3")):
        done = subprocess.run(
            [sys.executable, script, *words],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        found.append(json.loads(done.stdout))

    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
