"""An iterator whose epoch begins late, in a resumed framework, is torch's own too."""

import sys
from weakref import ref

import pytest
import torch
from torch.utils.data import DataLoader, dataloader

import torchrepro
from torchrepro.seeding.loader_positions import epochs
from torchrepro.seeding.resumed_run import ResumedRun

ALONE = dataloader._SingleProcessDataLoaderIter
OF_WORKERS = dataloader._MultiProcessingDataLoaderIter


WAYS = {
    "in this process": {},
    "with a worker": {"num_workers": 1},
    "with a worker that lives on": {"num_workers": 1, "persistent_workers": True},
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def late(request):
    """Return a loader, and its iterator, whose epoch begins at the first batch."""
    with torchrepro.apply("seed-only"):
        loader = DataLoader(range(4), batch_size=2, **request.param)
        epochs.begin_at_first_batch(lambda: torch.manual_seed(7), together=1)
        yield loader, iter(loader)


def test_a_late_iterator_has_torchs_class_before_it_begins(late):
    """No worker is started for it before its first batch."""
    loader, iterator = late

    assert type(iterator) is (OF_WORKERS if loader.num_workers else ALONE)
    assert not vars(iterator).get("_workers")


def test_a_late_iterator_begins_at_its_first_batch(late):
    """The generators are restored first, so earlier draws do not count."""
    _, iterator = late
    torch.rand(9)
    batch = next(iterator)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()  # torch draws a base seed as an epoch begins

    assert batch.tolist() == [0, 1]
    assert drawn == torch.rand(1)
    assert [each.tolist() for each in iterator] == [[2, 3]]


def test_undo_begins_a_late_iterator(late):
    """After that it is read as without a profile."""
    _, iterator = late
    ResumedRun.active.end()

    assert [each.tolist() for each in iterator] == [[0, 1], [2, 3]]


def test_a_late_iterator_is_freed_without_a_begin(late, monkeypatch):
    """As early as torch's own, and it has no workers to end."""
    loader, _ = late
    problems = []
    monkeypatch.setattr(sys, "unraisablehook", problems.append)
    freed = ref(iter(DataLoader(loader.dataset, num_workers=loader.num_workers)))

    assert freed() is None
    assert not problems
