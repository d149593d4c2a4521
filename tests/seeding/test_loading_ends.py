"""Begin and end of the seeding of loaders: undo, `none`, nested profiles, wrappers of others."""

import copy
import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

import torchrepro
from torchrepro.ground.imports import AfterImport
from torchrepro.seeding import loader_hook

from .loaders import AUTO, Items, Noisy, drawn, draws, epoch, order, run, seed_plainly

NONE = {"dataloader": {"seeding": "none"}}
ORIGINAL = DataLoader.__iter__


@pytest.fixture(autouse=True)
def _no_other_loaders() -> None:
    """Free the loaders of other tests: while a named one lives, `__iter__` is wrapped."""
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
    """Load two epochs with the program's seeds; return them and the later generator states."""
    seed_plainly()
    return [epoch(loader) for _ in range(2)], draws()


@pytest.mark.parametrize("kind", LOADERS)
def test_none_and_undo_load_as_torch_alone(kind: str) -> None:
    """With `none`, without an option for loaders, and after undo, torch's own numbers are drawn.

    A loader that is used under two profiles is seeded by each.
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


def test_persistent_workers_draw_as_in_torch_after_undo() -> None:
    """Such a loader shuffles by torch's generator after undo, and repeats no number."""
    with torchrepro.apply(AUTO):
        loader = LOADERS["on workers that live on"]()
        found = epoch(loader)
    seed_plainly()
    expected = [list(RandomSampler(Noisy())) for _ in range(3)]
    seed_plainly()
    epochs = [epoch(loader) for _ in range(3)]

    assert [order(samples) for samples in epochs] == expected
    assert len(set(drawn(chain(found, *epochs)))) == 4 * 8


def test_workers_started_before_the_profile_are_left_alone() -> None:
    """A loader with persistent workers from before the profile continues as without one."""
    epochs = []
    for profile in ({}, AUTO):
        seed_plainly()
        loader = LOADERS["on workers that live on"]()
        first = epoch(loader)
        with torchrepro.apply(profile):
            epochs.append([first, _plainly(loader)])

    assert epochs[0] == epochs[1]


def test_forced_workers_do_not_seed() -> None:
    """`num_workers: 0` without `auto` loads as the program's loader does without workers."""
    expected = _plainly(LOADERS["in the main process"]())
    with torchrepro.apply({"dataloader": {"num_workers": 0}}):
        assert _plainly(LOADERS["on workers"]()) == expected
        assert _plainly(LOADERS["on workers that live on"]()) == expected

    assert DataLoader.__iter__ is ORIGINAL


@pytest.mark.parametrize("inner", [{**NONE, "seed": 6}, {**AUTO, "seed": 6}, AUTO])
def test_an_inner_profile_does_not_change_epochs_of_the_outer_one(inner: Any) -> None:
    """After an inner profile with a seed, loaders of the outer one continue unchanged."""
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


def test_the_inner_profile_seeds_loaders_while_it_is_active() -> None:
    """Within an inner profile only its seed counts, or loaders are not seeded."""
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


def test_nothing_is_wrapped_without_named_loaders() -> None:
    """`DataLoader.__iter__` is torch's own again when no loader with a name is alive."""
    with run("named") as make:
        loaders = [make(name=name) for name in ("train", "test")]
        for _ in range(2):
            epoch(loaders[0])
            assert DataLoader.__iter__ is not ORIGINAL
            del loaders[0]
            gc.collect()

        assert DataLoader.__iter__ is ORIGINAL


def test_a_loader_freed_during_a_recording_leaves_no_hook(tmp_path: Path) -> None:
    """If the last named loader is freed during a recording, torch is as before at its end."""
    originals = DataLoader.__iter__, _BaseDataLoaderIter.__next__
    named = [torchrepro.dataloader_kwargs("train")]
    with torchrepro.record(tmp_path / "trace"):
        assert _BaseDataLoaderIter.__next__ is not originals[1]
        named.clear()

    assert (DataLoader.__iter__, _BaseDataLoaderIter.__next__) == originals


def test_a_loader_freed_while_hooks_are_installed_leaves_no_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the last named loader is collected within the installation, all hooks are removed."""
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


def test_undo_works_after_the_program_cleared_the_finders() -> None:
    """A program may remove other finders from `sys.meta_path`."""
    before: list[Any] = list(sys.meta_path)
    with torchrepro.apply(AUTO):
        sys.meta_path[:] = before

    assert DataLoader.__iter__ is ORIGINAL
    assert sys.meta_path == before


@pytest.mark.parametrize("duplicated", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_iterator_cannot_be_copied_as_in_torch(
    duplicated: Callable[[Any], Any],
) -> None:
    """Copying or pickling an iterator raises the same error as without a profile."""
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


def test_a_foreign_patch_that_outlives_a_profile_changes_no_epoch(
    patched: Callable[[], Any],
) -> None:
    """Undo keeps the patch of another tool; it changes no epoch, with and without a profile."""
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
