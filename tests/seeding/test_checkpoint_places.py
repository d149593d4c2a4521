"""Where a run may stop, what `Checkpoint` refuses to keep, and what it says."""

import resource
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import SafeUUID

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import torchrepro
from torchrepro.seeding.loader_places import await_loaders, place_of, places, take_up

AUTO = {"seed": 5, "dataloader": {"seeding": "auto"}}
EPOCHS, PER_EPOCH = 3, 4
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


@pytest.fixture(autouse=True, scope="module")
def _an_optimizer_was_made() -> None:
    """Make one before traces are looked for: torch's first one sets TORCHINDUCTOR_CACHE_DIR."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """What stops a run here."""


class Best:
    """A part whose state is one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["best"]


class Run:
    """A little training run, and what it did."""

    def __init__(self, folder: Path | None, *, baseline: bool = False, batch_size: int = 3) -> None:
        self.folder, self.baseline, self.batch_size = folder, baseline, batch_size
        self.epochs: list[int] = []
        self.rates: list[float] = []
        self.model = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.3), nn.Linear(3, 1))

    def train(self, stop: tuple[str, int] | None = None, *, at: str = "epoch") -> "Run":
        """Train, saving after every batch or every epoch, until `stop`, for example a step."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        parts = {"model": self.model, "optimizer": optimizer, "scheduler": scheduler}
        loader = DataLoader(torch.arange(12.0), batch_size=self.batch_size, shuffle=True)
        held_out = DataLoader(torch.arange(7.0), batch_size=3, shuffle=True)
        checkpoint = torchrepro.Checkpoint(self.folder, **parts)
        if self.baseline and checkpoint.step == 0:
            for batch in held_out:
                self.model(batch[:, None])
        for epoch in checkpoint.epochs(EPOCHS):
            for batch in checkpoint.batches(loader):
                optimizer.zero_grad()
                self.model(batch[:, None]).square().mean().backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                if at == "batch":
                    checkpoint.save()
                if stop == ("step", checkpoint.step):
                    raise Interrupted
            scheduler.step()
            self.epochs.append(epoch)
            self.rates.append(optimizer.param_groups[0]["lr"])
            if at == "epoch":
                checkpoint.save()
            if stop == ("epoch", epoch):
                raise Interrupted
        return self

    @property
    def weights(self) -> list[Any]:
        return [parameter.tolist() for parameter in self.model.parameters()]


def _run(
    folder: Path | None, *, baseline: bool = False, batch_size: int = 3, **options: Any
) -> Run:
    with torchrepro.apply(AUTO):
        run = Run(folder, baseline=baseline, batch_size=batch_size)
        with suppress(Interrupted):
            run.train(**options)
    return run


def _written(folder: Path) -> list[Path]:
    return list(folder.rglob("*"))


@pytest.mark.parametrize("last", range(EPOCHS))
def test_saved_after_its_last_batch_an_epoch_is_done(tmp_path: Path, last: int) -> None:
    """Saved after all batches of an epoch, a run goes on with the next, and steps nothing twice."""
    whole = _run(None)
    first = _run(tmp_path, stop=("epoch", last))
    second = _run(tmp_path)

    assert first.epochs + second.epochs == whole.epochs == list(range(EPOCHS))
    assert first.rates + second.rates == whole.rates
    assert second.weights == whole.weights


@pytest.mark.parametrize("then", [("step", 2), ("step", PER_EPOCH), ("epoch", 0)])
@pytest.mark.parametrize("batch_size", [3, 4])
def test_another_batch_size_within_an_epoch_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], batch_size: int, then: tuple[str, int]
) -> None:
    """A run that goes on within an epoch says where its batches are of another size than before."""
    at = "epoch" if then[0] == "epoch" else "batch"
    _run(tmp_path, stop=then, at=at)
    capsys.readouterr()
    _run(tmp_path, batch_size=batch_size, stop=("step", PER_EPOCH + 1), at=at)

    said = "was interrupted with batch_size=3 and goes on with batch_size=4"
    assert (said in capsys.readouterr().err) == (batch_size == 4 and at == "batch")


RESUMED: dict[str, tuple[Any, Any]] = {
    "a loader's place": (place_of, lambda loader, place: take_up(loader, place, lambda: None)),
    "a run's places": (
        lambda _: places(over=False),
        lambda _, found: await_loaders(found, lambda: None),
    ),
}
"""How frameworks keep the place of a loader, and how they go on from it."""


@pytest.mark.parametrize("way", RESUMED)
@pytest.mark.parametrize(("batch_size", "rank"), [(3, 0), (4, 0), (4, 1)])
def test_frameworks_hear_of_another_batch_size(
    way: str,
    batch_size: int,
    rank: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loader that goes on within an epoch says where its batches are of another size, once."""
    keep, go_on = RESUMED[way]
    with torchrepro.apply(AUTO):
        batches = iter(loader := DataLoader(torch.arange(12.0), batch_size=3))
        next(batches)
        place = keep(loader)
    monkeypatch.setenv("WORLD_SIZE", str(rank + 1))
    monkeypatch.setenv("RANK", str(rank))
    with torchrepro.apply(AUTO):
        loader = DataLoader(torch.arange(12.0), batch_size=batch_size)
        go_on(loader, place)
        capsys.readouterr()
        _ = list(loader), list(loader)

    said = (
        "torchrepro: the loader over Tensor[12]: its epoch was interrupted with batch_size=3 and "
        "goes on with batch_size=4, so its batches hold other samples than those of the "
        "uninterrupted run; resume with batch_size=3 to go on exactly\n"
    )
    assert capsys.readouterr().err == (said if batch_size == 4 and rank == 0 else "")


def test_saved_at_its_last_batch_an_epoch_is_not_done(tmp_path: Path) -> None:
    """Saved within the loop at an epoch's last batch, what comes after the loop is still done."""
    whole = _run(None, at="batch")
    _run(tmp_path, at="batch", stop=("step", PER_EPOCH))
    second = _run(tmp_path, at="batch")

    assert (second.epochs, second.rates) == (whole.epochs, whole.rates)
    assert second.weights == whole.weights


@pytest.mark.parametrize("step", [1, 3, PER_EPOCH, PER_EPOCH + 1, PER_EPOCH * 2 + 2])
def test_a_baseline_of_new_runs_only_changes_nothing(tmp_path: Path, step: int) -> None:
    """Another loader read only where a run begins changes nothing of a run that is resumed."""
    whole = _run(None, baseline=True, at="batch")
    _run(tmp_path, baseline=True, at="batch", stop=("step", step))

    assert _run(tmp_path, baseline=True, at="batch").weights == whole.weights


UNKEPT = {
    "numpy's number": np.float64(0.5),
    "array": np.ones(3),
    "path": Path("best.pt"),
    "enum": SafeUUID.safe,
    "deque": deque([1.0, 2.0]),
}


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
@pytest.mark.parametrize("value", UNKEPT.values(), ids=UNKEPT)
def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, value: Any, nested: bool
) -> None:
    """A part whose state only pickle could keep is refused by name, and no file is written."""
    with torchrepro.apply(AUTO):
        parts = {"fine": Best(1.0), "tracker": Best([{"seen": value}] if nested else value)}
        checkpoint = torchrepro.Checkpoint(tmp_path, **parts)
        next(checkpoint.steps(1))
        with pytest.raises(torchrepro.SeedingError, match="tracker"):
            checkpoint.save()
        with pytest.raises(torchrepro.SeedingError, match="tracker"):
            checkpoint.save()

    assert _written(tmp_path) == []


@pytest.mark.parametrize("value", [0.5, "best", None, (1, [2]), {"a": torch.ones(2)}])
def test_what_is_kept_comes_back(tmp_path: Path, value: Any) -> None:
    """A state of plain values and tensors is written, and a new run finds it."""
    with torchrepro.apply(AUTO):
        checkpoint = torchrepro.Checkpoint(tmp_path, best=Best(value))
        next(checkpoint.steps(1))
        checkpoint.save()
        best = Best("nothing yet")
        torchrepro.Checkpoint(tmp_path, best=best)

    assert str(best.value) == str(value)


@pytest.mark.parametrize("part", [None, 3, {"lr": 0.1}, object()])
@pytest.mark.parametrize("kept", [True, False])
def test_a_part_without_a_state_is_refused(tmp_path: Path, part: Any, kept: bool) -> None:
    """A part that cannot be saved is refused where the checkpoint is made, folder or not."""
    with pytest.raises(torchrepro.SeedingError, match="broken"):
        torchrepro.Checkpoint(tmp_path if kept else None, fine=Best(1), broken=part)

    assert _written(tmp_path) == []


def test_a_rank_without_its_others_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process numbered 3 that finds only its own files warns that no step is complete."""
    monkeypatch.setenv("RANK", "3")
    with torchrepro.apply(AUTO):
        checkpoint = torchrepro.Checkpoint(tmp_path, best=Best(1))
        next(checkpoint.steps(1))
        checkpoint.save()
        with pytest.warns(UserWarning, match="holds no step that all 4 ranks have written"):
            checkpoint = torchrepro.Checkpoint(tmp_path, best=Best(2))

    assert checkpoint.step == 0


@contextmanager
def _full_disk() -> Iterator[None]:
    """Have every file of this process end after 100 bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_written_leaves_no_step(tmp_path: Path) -> None:
    """A write that fails raises `OSError`, leaves no empty step, and the run can save later."""
    with torchrepro.apply(AUTO):
        checkpoint = torchrepro.Checkpoint(tmp_path, best=Best(1))
        next(checkpoint.steps(1))
        with _full_disk(), pytest.raises(OSError, match="too large"):
            checkpoint.save()
        assert _written(tmp_path) == []

        checkpoint.save()
        best = Best(2)
        torchrepro.Checkpoint(tmp_path, best=best)
    assert best.value == 1
