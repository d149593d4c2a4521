"""Hooks on loader classes come and go as one piece, whatever happens in the middle."""

import copy
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

import torchrepro
from torchrepro.imports import AfterImport
from torchrepro.seeding import loader_hook

ORIGINAL = DataLoader.__iter__
AUTO = {"seed": 5, "dataloader": {"seeding": "auto"}}


class Interrupting(AfterImport):
    """Lets the state change in the middle of a change, as the garbage collector may."""

    left = 4

    def watch(self) -> None:
        self._interrupt()
        super().watch()

    def unwatch(self) -> None:
        self._interrupt()
        super().unwatch()

    def _interrupt(self) -> None:
        if self.left:
            self.left -= 1
            loader_hook._settle()


def test_a_loader_that_goes_away_in_the_middle_of_a_change_leaves_no_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collected while hooks come or go, a loader leaves them all there or all gone."""
    monkeypatch.setattr(loader_hook, "_finder", Interrupting((), print))
    before = list(sys.meta_path)
    with torchrepro.apply(AUTO):
        assert DataLoader.__iter__ is not ORIGINAL
        first = list(DataLoader(range(8), shuffle=True))
    with torchrepro.apply(AUTO):
        assert list(DataLoader(range(8), shuffle=True)) == first

    assert DataLoader.__iter__ is ORIGINAL
    assert sys.meta_path == before


def test_undo_works_where_somebody_cleared_the_finders() -> None:
    """A program that takes other finders out of `sys.meta_path` hinders no undo."""
    before: list[Any] = list(sys.meta_path)
    with torchrepro.apply(AUTO):
        sys.meta_path[:] = before

    assert DataLoader.__iter__ is ORIGINAL
    assert sys.meta_path == before


@pytest.mark.parametrize("duplicated", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_iterator_is_duplicated_as_little_as_torch_has_it(
    duplicated: Callable[[Any], Any],
) -> None:
    """To copy or pickle it under a profile is the error that it is without one."""
    found = []
    for profile in ({}, AUTO):
        with torchrepro.apply(profile), pytest.raises(NotImplementedError) as raised:
            duplicated(iter(DataLoader(range(8))))
        found.append(raised.value.args)

    assert found[0] == found[1]
