"""Replaced attributes: whoever undoes first, the last undo leaves what was there."""

import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from torchrepro.ground.patching import surround, surround_everywhere, wrap


def _original() -> list[Any]:
    return []


@given(some.permutations(range(4)))
def test_undone_in_any_order_nothing_of_ours_is_left(order: list[int]) -> None:
    """Each call passes the wrappers that are not undone; after the last undo, none is left."""
    owner = ModuleType("owner")
    owner.__dict__["function"] = _original
    undos = [ExitStack() for _ in order]
    active: set[int] = set()
    for number, undo in enumerate(undos):

        def around(original: Any, number: int = number) -> list[Any]:
            return [number] * (number in active) + original()

        active.add(number)
        surround(undo, owner, "function", around)
    for number in order:
        active.remove(number)
        undos[number].close()

        assert owner.function() == sorted(active, reverse=True)
    assert owner.function is _original


@given(some.permutations(range(3)))
def test_importers_get_their_function_back_in_any_order(order: list[int]) -> None:
    """A module that imported the function has the original again after the last undo."""
    owner, importer = ModuleType("owner"), ModuleType("importer")
    undos = [ExitStack() for _ in order]
    with pytest.MonkeyPatch.context() as changed:
        for module in (owner, importer):
            changed.setitem(sys.modules, module.__name__, module)
            vars(module)["function"] = _original
        for undo in undos:
            surround_everywhere(undo, owner, "function", lambda original: original())

        assert importer.function is owner.function is not _original
        for number in order:
            undos[number].close()

    assert importer.function is owner.function is _original


def test_a_wrapper_of_other_code_stays() -> None:
    """It outlives the undo of what it wraps; once it is gone, the next undo leaves the original."""
    owner = ModuleType("owner")
    owner.__dict__["function"] = _original
    with ExitStack() as inner:
        wrap(inner, owner, "function", lambda original: lambda: ["ours", *original()])
        ours = owner.function
        vars(owner)["function"] = foreign = lambda: ["foreign", *ours()]

    assert owner.function is foreign
    vars(owner)["function"] = ours  # the other code restores what it had found
    with ExitStack() as later:
        wrap(later, owner, "function", lambda original: lambda: ["later", *original()])
        assert owner.function()[0] == "later"

    assert owner.function is _original
