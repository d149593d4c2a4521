"""The folder of a `Checkpoint`: its files, its writers, and unreadable files."""

import io
import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import SafeUUID

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import torchrepro


class Part:
    """Something with a state of one value."""

    def __init__(self, value: Any = -1.0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.fixture(autouse=True)
def _profile() -> Iterator[None]:
    with torchrepro.apply({"seed": 5}):
        yield


def _loader(name: str = "train", **options: Any) -> Any:
    return DataLoader(range(12), batch_size=2, **torchrepro.dataloader_kwargs(name), **options)


def _save(folder: Path, *values: Any, every: int = 1) -> None:
    part = Part()
    checkpoint = torchrepro.Checkpoint(folder, part=part)
    for part.value, _ in zip(values, checkpoint.batches(_loader()), strict=False):
        checkpoint.save(every=every)


def _value(folder: Path) -> tuple[int, float]:
    part = Part()
    checkpoint = torchrepro.Checkpoint(folder, part=part)
    return checkpoint.step, part.value


def _file(folder: Path, step: int, rank: int = 0, size: int = 1) -> Path:
    return folder / f"step-{step:09d}" / f"rank-{rank}-of-{size}.pt"


def test_a_run_without_a_checkpoint_starts_at_step_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an empty, a new or no folder, a run starts at step 0 with its parts unchanged.

    Without a folder, saves write no file.
    """
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, tmp_path / "not" / "there", None):
        assert _value(folder) == (0, -1.0)
    _save(None, 1.0, 2.0)

    assert list(tmp_path.iterdir()) == []


STRAYS = [
    *("notes.txt", "step-", "step-x/rank-0-of-1.pt", "step-000000050.bak/rank-0-of-1.pt"),
    "step-000000009/.rank-0-of-1.pt.77",  # of a run that was killed
]


@pytest.mark.parametrize("stray", STRAYS)
def test_other_files_in_the_folder_are_ignored(tmp_path: Path, stray: str) -> None:
    """Files that are not checkpoints are neither read, deleted nor counted as steps.

    An unfinished checkpoint is ignored too.
    """
    _save(tmp_path, 1.0, 2.0)
    path = tmp_path / stray
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine", encoding="utf-8")

    assert _value(tmp_path) == (2, 2.0)
    _save(tmp_path, 3.0, 4.0)
    assert _value(tmp_path) == (4, 4.0)
    assert _file(tmp_path, 3).exists()
    assert path.read_text(encoding="utf-8") == "mine"


ONES = torch.ones(5).numpy().tobytes()


def _as_saved(found: Any) -> bytes:
    content = io.BytesIO()
    torch.save(found, content)
    return content.getvalue()


def _of_another_format(content: bytes) -> bytes:
    saved = torch.load(io.BytesIO(content), weights_only=True)
    return _as_saved({**saved, "format": saved["format"] + 1})


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "zeros": lambda _: b"\0" * 900,
    "noise": lambda _: random.Random(3).randbytes(5000),
    "a wrong zip": lambda _: b"PK\x03\x04nonsense",
    "a byte of a weight": lambda content: content.replace(ONES, ONES[:-1] + b"\x40"),
    "its beginning": lambda content: content[: len(content) // 2],
    "all but its end": lambda content: content[:-1],
    "another format": _of_another_format,
    "a list": lambda _: _as_saved([1, 2]),
    "a number": lambda _: _as_saved(3),
    "a format alone": lambda _: _as_saved({"format": 1}),
    "parts alone": lambda _: _as_saved({"parts": {}, "rng": {}}),
    "an object": lambda _: _as_saved({"rng": object(), "parts": {}}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    """If the latest file is not a checkpoint, the error names it, and nothing changes."""
    _save(tmp_path, torch.zeros(5), torch.ones(5))
    path = _file(tmp_path, 2)
    assert path.read_bytes().count(ONES) == 1
    path.write_bytes(content := DAMAGES[damage](path.read_bytes()))
    with pytest.raises(
        torchrepro.SeedingError, match=r"rank-0-of-1\.pt.*not a complete checkpoint"
    ):
        _value(tmp_path)

    assert path.read_bytes() == content


@pytest.mark.parametrize("names", [[], ["other"], ["part", "other"]])
def test_a_checkpoint_of_other_parts_is_refused(tmp_path: Path, names: list[str]) -> None:
    """The error names the parts of both, and the parts of the program stay unchanged."""
    _save(tmp_path, 1.0)
    parts = {name: Part() for name in names}
    with pytest.raises(torchrepro.SeedingError, match="has other parts"):
        torchrepro.Checkpoint(tmp_path, **parts)

    assert all(part.value == -1.0 for part in parts.values())


def test_a_checkpoint_under_another_seed_is_refused(tmp_path: Path) -> None:
    """The resumed run raises an error with both seeds before its first batch."""
    _save(tmp_path, 1.0)
    with torchrepro.apply({"seed": 6}):
        checkpoint = torchrepro.Checkpoint(tmp_path, part=Part())
        with pytest.raises(
            torchrepro.SeedingError, match=r"saved under seed=\d+, and this run has seed=6"
        ):
            next(checkpoint.batches(_loader()))


@pytest.mark.parametrize("bad", [-1, True, 1.5, "2", None])
def test_counts_have_to_be_whole_numbers(tmp_path: Path, bad: Any) -> None:
    """`epochs` and `steps` refuse every count that is not a whole number of 0 or more."""
    checkpoint = torchrepro.Checkpoint(tmp_path, part=Part())
    with pytest.raises(torchrepro.SeedingError):
        next(checkpoint.epochs(bad))
    with pytest.raises(torchrepro.SeedingError):
        checkpoint.save(every=bad)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["kept", None])
def test_batches_sets_the_epoch_of_samplers(tmp_path: Path, folder: str | None) -> None:
    """`batches` sets the epoch of a DistributedSampler, with and without a folder."""
    sampler = DistributedSampler(range(12), 2, 0)
    checkpoint = torchrepro.Checkpoint(folder and tmp_path / folder, part=Part())
    loader = _loader(sampler=sampler)
    heard = []
    for _ in checkpoint.epochs(3):
        for _ in checkpoint.batches(loader):
            pass
        heard.append(sampler.epoch)

    assert heard == [0, 1, 2]


def test_each_rank_reads_its_own_file(tmp_path: Path, be: Callable[..., None]) -> None:
    """Every rank resumes from the file that it has written."""
    for rank in (0, 1):
        be(rank, 2)
        _save(tmp_path, 1.0 + rank, 10.0 + rank)
    for rank in (0, 1):
        be(rank, 2)
        assert _value(tmp_path) == (2, 10.0 + rank)


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_step_counts_once_all_ranks_have_written_it(
    tmp_path: Path, be: Callable[..., None], ahead: int
) -> None:
    """If some ranks have saved later steps than others, all resume from the last common step."""
    for rank, values in ((1, [1.0]), (0, [1.0, *[2.0] * ahead])):
        be(rank, 2)
        _save(tmp_path, *values)
    for rank in (0, 1):
        be(rank, 2)
        assert _value(tmp_path) == (1, 1.0)


@pytest.mark.parametrize("size", [1, 3])
def test_a_checkpoint_of_another_number_of_processes_is_refused(
    tmp_path: Path, size: int, be: Callable[..., None]
) -> None:
    """One or three processes do not resume the files of two: the error names both numbers."""
    for rank in (0, 1):
        be(rank, 2)
        _save(tmp_path, 1.0)
    be(0, size)
    with pytest.raises(torchrepro.SeedingError, match=rf": 2: .*of processes\n +legal: {size}"):
        _value(tmp_path)


def test_a_relative_folder_is_resolved_when_the_checkpoint_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that changes its working directory saves into the folder that it has loaded."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpoint = torchrepro.Checkpoint("run #1%3F", part=Part(5.0))
    for _ in checkpoint.batches(_loader()):
        monkeypatch.chdir(tmp_path / "elsewhere")
        checkpoint.save()
        break

    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert _value(tmp_path / "run #1%3F") == (1, 5.0)


def _begun(folder: Path, **parts: Any) -> torchrepro.Checkpoint:
    checkpoint = torchrepro.Checkpoint(folder, **parts)
    next(checkpoint.steps(1))
    return checkpoint


UNKEPT = {
    "numpy's number": np.float64(0.5),
    "path": Path("best.pt"),
    "enum": SafeUUID.safe,
    "nested": [{"seen": deque([1.0, 2.0])}],
}


@pytest.mark.parametrize("value", UNKEPT.values(), ids=UNKEPT)
def test_a_state_that_needs_pickle_is_not_written(tmp_path: Path, value: Any) -> None:
    """The error names the part whose state only pickle could save, and no file is written."""
    checkpoint = _begun(tmp_path, fine=Part(1.0), tracker=Part(value))
    for _ in range(2):
        with pytest.raises(torchrepro.SeedingError, match="tracker"):
            checkpoint.save()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [0.5, "best", None, (1, [2]), {"a": torch.ones(2)}])
def test_a_saved_state_is_loaded_unchanged(tmp_path: Path, value: Any) -> None:
    """A new run loads the same plain values and tensors that were saved."""
    _begun(tmp_path, best=Part(value)).save()
    best = Part("nothing yet")
    torchrepro.Checkpoint(tmp_path, best=best)

    assert str(best.value) == str(value)


@pytest.mark.parametrize("part", [None, 3, {"lr": 0.1}, object()])
@pytest.mark.parametrize("kept", [True, False])
def test_a_part_without_a_state_is_refused(tmp_path: Path, part: Any, kept: bool) -> None:
    """The error comes when the checkpoint is made, with or without a folder."""
    with pytest.raises(torchrepro.SeedingError, match="broken"):
        torchrepro.Checkpoint(tmp_path if kept else None, fine=Part(1), broken=part)

    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_finds_only_its_own_files_is_warned(
    tmp_path: Path, be: Callable[..., None]
) -> None:
    """Rank 3 warns that no step is complete if it finds only its own files."""
    be(3, 4)
    _begun(tmp_path, best=Part(1)).save()
    with pytest.warns(UserWarning, match="has no step that all 4 ranks have written"):
        checkpoint = torchrepro.Checkpoint(tmp_path, best=Part(2))

    assert checkpoint.step == 0


def test_a_failed_write_leaves_no_step(tmp_path: Path, full_disk: Callable[..., Any]) -> None:
    """A failed write raises `OSError`, leaves no empty step, and a later save works."""
    checkpoint = _begun(tmp_path, best=Part(1))
    with full_disk(), pytest.raises(OSError, match="too large"):
        checkpoint.save()
    assert list(tmp_path.iterdir()) == []

    checkpoint.save()
    best = Part(2)
    torchrepro.Checkpoint(tmp_path, best=best)
    assert best.value == 1
