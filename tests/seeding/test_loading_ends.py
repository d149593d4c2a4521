"""Where the seeding of loaders begins and ends: undone, switched off, nested, wrapped by others."""

import copy
import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
from torch.utils.data import DataLoader, RandomSampler

import torchrepro
from torchrepro.ground.imports import AfterImport
from torchrepro.seeding import loader_hook

from .loaders import AUTO, Items, Noisy, drawn, draws, epoch, order, run, seed_plainly

NONE = {"dataloader": {"seeding": "none"}}
ORIGINAL = DataLoader.__iter__


@pytest.fixture(autouse=True)
def _no_other_loaders() -> None:
    """Let go of loaders that another test made: as long as one lives, `__iter__` is wrapped."""
    gc.collect()


def _loader(dataset: Any = None, **options: Any) -> Any:
    return DataLoader(dataset or Noisy(), **{"batch_size": 3, "collate_fn": list, **options})


LOADERS: dict[str, Callable[[], Any]] = {
    "in the main process": lambda: _loader(shuffle=True),
    "on workers": lambda: _loader(shuffle=True, num_workers=2),
    "on workers that live on": lambda: _loader(
        shuffle=True, num_workers=2, persistent_workers=True
    ),
    "items on a worker": lambda: _loader(Items(), num_workers=1),
}


def _plainly(loader: Any) -> Any:
    """Load two epochs with seeds of one's own; return them, and where the generators are then."""
    seed_plainly()
    return [epoch(loader) for _ in range(2)], draws()


@pytest.mark.parametrize("kind", LOADERS)
def test_none_and_undo_give_the_behaviour_of_torch_alone(kind: str) -> None:
    """With `none`, with no word on loaders and after undo, torch's own numbers are drawn.

    A loader that is used in two profiles is seeded anew under each.
    """
    loader = LOADERS[kind]()

    def loaded() -> Any:
        return _plainly(LOADERS[kind]() if "live on" in kind else loader)

    expected, found = loaded(), []
    for profile in ({"seed": 5, **NONE}, {"seed": 5}):
        with torchrepro.apply(profile):
            assert DataLoader.__iter__ is ORIGINAL
            assert loaded() == expected
    for _ in range(2):
        with torchrepro.apply(AUTO):
            assert DataLoader.__iter__ is not ORIGINAL
            found.append(loaded())
        assert DataLoader.__iter__ is ORIGINAL
        assert loaded() == expected

    assert found[0] == found[1]
    assert drawn(chain(*found[0][0])) != drawn(chain(*expected[0]))


def test_workers_that_outlive_the_profile_draw_as_torch_has_them() -> None:
    """After undo, such a loader shuffles by torch's generator, and repeats no number."""
    with torchrepro.apply(AUTO):
        loader = LOADERS["on workers that live on"]()
        found = epoch(loader)
    seed_plainly()
    expected = [list(RandomSampler(Noisy())) for _ in range(3)]
    seed_plainly()
    epochs = [epoch(loader) for _ in range(3)]

    assert [order(samples) for samples in epochs] == expected
    assert len(set(drawn(chain(found, *epochs)))) == 4 * 8


def test_workers_that_began_before_the_profile_are_left_alone() -> None:
    """A loader whose workers are there when a profile comes goes on as it would without one."""
    epochs = []
    for profile in ({}, AUTO):
        seed_plainly()
        loader = LOADERS["on workers that live on"]()
        first = epoch(loader)
        with torchrepro.apply(profile):
            epochs.append([first, _plainly(loader)])

    assert epochs[0] == epochs[1]


def test_forced_workers_alone_are_no_seeding() -> None:
    """`num_workers: 0` without `auto` gives what the author's loader without workers gives."""
    expected = _plainly(LOADERS["in the main process"]())
    with torchrepro.apply({"dataloader": {"num_workers": 0}}):
        assert _plainly(LOADERS["on workers"]()) == expected
        assert _plainly(LOADERS["on workers that live on"]()) == expected

    assert DataLoader.__iter__ is ORIGINAL


@pytest.mark.parametrize("inner", [{**NONE, "seed": 6}, {**AUTO, "seed": 6}, AUTO])
def test_a_profile_within_leaves_the_epochs_of_the_one_around_it(inner: Any) -> None:
    """After an inner profile with a seed, loaders of the outer one go on as if it had not been."""
    found = []
    for nested in (None, inner):
        with run() as make:
            one, two = make(shuffle=True), make(shuffle=True)
            epochs = [epoch(one)]
            if nested:
                with torchrepro.apply(nested):
                    _ = epoch(one), epoch(make())
            found.append([*epochs, epoch(one), epoch(two)])

    assert found[0] == found[1]
    assert DataLoader.__iter__ is ORIGINAL


def test_an_inner_profile_decides_while_it_is_in_force() -> None:
    """Within an inner profile loaders are seeded as by it alone: by its seed, or not at all."""
    with torchrepro.apply({**AUTO, "seed": 6}):
        alone = epoch(_loader(shuffle=True))
    plain = _plainly(LOADERS["in the main process"]())
    with torchrepro.apply(AUTO):
        loader = _loader(shuffle=True)
        epoch(loader)
        with torchrepro.apply({**AUTO, "seed": 6}):
            assert epoch(loader) == alone
        for inner in (NONE, {**NONE, "seed": 6}):
            with torchrepro.apply(inner):
                assert _plainly(LOADERS["in the main process"]()) == plain


def test_nothing_is_wrapped_once_the_last_loader_is_gone() -> None:
    """`DataLoader.__iter__` is torch's own again when no loader with a name is alive."""
    with run("named") as make:
        loaders = [make(name=name) for name in ("train", "test")]
        for _ in range(2):
            epoch(loaders[0])
            assert DataLoader.__iter__ is not ORIGINAL
            del loaders[0]
            gc.collect()

        assert DataLoader.__iter__ is ORIGINAL


def test_a_loader_that_goes_away_in_the_middle_of_a_change_leaves_no_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collected while hooks come, the last named loader leaves none of them."""
    before, watch = list(sys.meta_path), AfterImport.watch
    named: list[Any] = []

    def interrupted(finder: AfterImport) -> None:
        named.clear()  # as the garbage collector may
        watch(finder)

    with torchrepro.apply({"seed": 5}):
        named.append(torchrepro.dataloader_kwargs("train"))
        assert DataLoader.__iter__ is not ORIGINAL
        monkeypatch.setattr(AfterImport, "watch", interrupted)
        loader_hook.workers_policy.write(None)  # any change
        assert named == []

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
            duplicated(iter(_loader()))
        found.append(raised.value.args)

    assert found[0] == found[1]


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


def test_a_patch_that_outlives_a_profile_changes_no_epoch(patched: Callable[[], Any]) -> None:
    """Undo leaves the patch of another; with it epochs are as ever, in a profile and beside it."""
    plain = _plainly(_loader(shuffle=True))
    found = []
    for turn in range(3):
        with torchrepro.apply(AUTO):
            if turn == 1:
                profiled = patched()
            found.append(_plainly(_loader(shuffle=True)))

        assert (DataLoader.__iter__ is ORIGINAL) == (turn == 0)
        assert _plainly(_loader(shuffle=True)) == plain
    assert DataLoader.__iter__ is profiled
    assert found[0] == found[1] == found[2]
