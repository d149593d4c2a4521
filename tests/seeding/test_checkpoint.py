"""`Checkpoint`: a resumed run ends with the weights of the uninterrupted run.

It iterates loaders, or counts the steps of a loop that draws its own batches.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, get_worker_info

import torchrepro
from torchrepro.verdict.value import Setting

from .loaders import AUTO, seed_plainly

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
SAMPLES, BATCH, EPOCHS = 10, 3, 2
PER_EPOCH = 4
STEPS = PER_EPOCH * EPOCHS


def augmented(index: int) -> torch.Tensor:
    """Return sample `index` with noise from every generator that a dataset may use."""
    noise = random.random() + np.random.random()
    return torch.full((4,), float(index)) / SAMPLES + noise + torch.rand(4)


class Noisy(Dataset[torch.Tensor]):
    """Augmented samples, and a list of the loaded ones."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        return augmented(index)


class Items(IterableDataset[torch.Tensor]):
    """Augmented items."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        return map(
            augmented, range(info.id if info else 0, SAMPLES, info.num_workers if info else 1)
        )


class Interrupted(Exception):  # noqa: N818 - an event of the run, not an error
    """The run was ended from outside."""


@dataclass
class Run:
    """One process of a training run: its settings and its results."""

    folder: Path | None
    seeding: str = "explicit"
    every: int = 1
    workers: int = 0
    items: bool = False
    validates: bool = False
    new_loaders: bool = False
    saves: str = "after a batch"  # or `after an epoch`
    batch_size: int = BATCH
    baseline: bool = False

    def train(self, stop: int | None = None) -> Any:
        """Train to the end, or until step `stop` is saved; return the results."""
        seed_plainly(5)
        with torchrepro.apply(PROFILES[self.seeding]), suppress(Interrupted):
            self._train(stop)
        state = self.model.state_dict(), self.optimizer.state_dict()["state"]
        weights = [*state[0].values(), *(part["momentum_buffer"] for part in state[1].values())]
        return [weight.numpy().tobytes() for weight in weights], self.losses

    def _train(self, stop: int | None) -> None:
        self.dataset = Items() if self.items else Noisy()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.losses: dict[int, float] = {}
        loader, held_out = self._loader("train"), self._loader("test")
        self.checkpoint = torchrepro.Checkpoint(
            self.folder, model=self.model, optimizer=self.optimizer, scheduler=scheduler
        )
        if self.baseline and self.checkpoint.step == 0:
            sum(self.model(batch).sum().item() for batch in held_out)
        for epoch in self.checkpoint.epochs(EPOCHS):
            if self.new_loaders:
                loader = self._loader("train")
            for batch in self.checkpoint.batches(loader):
                loss = (self.model(batch) * random.random() - np.random.random()).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                if self.saves == "after a batch":
                    self.checkpoint.save(every=self.every)
                    if self.checkpoint.step == stop:
                        raise Interrupted
            scheduler.step()
            self.losses[epoch] = scheduler.get_last_lr()[0]
            if self.validates:
                self.losses[epoch] = sum(self.model(batch).sum().item() for batch in held_out)
            if self.saves == "after an epoch":
                self.checkpoint.save()
                if self.checkpoint.step == stop:
                    raise Interrupted

    def _loader(self, name: str) -> Any:
        options: dict[str, Any] = {"batch_size": self.batch_size, "num_workers": self.workers}
        options["shuffle"] = None if self.items else True
        if self.seeding == "explicit":
            options |= torchrepro.dataloader_kwargs(name)
        if self.seeding == "its author":
            options["generator"] = torch.Generator().manual_seed(3)
        if self.seeding == "its author" and not self.items:
            options["sampler"] = RandomSampler(self.dataset, generator=options["generator"])
            options["shuffle"] = None
        return DataLoader(self.dataset, **options)


@pytest.fixture(autouse=True, scope="module")
def _first_optimizer() -> None:
    """Make one before the tests read traces: torch's first one sets TORCHINDUCTOR_CACHE_DIR."""
    torch.optim.SGD([torch.zeros(1)])


PROFILES: dict[str, Any] = {"explicit": {"seed": 5}, "auto": AUTO, "its author": AUTO, "none": {}}
"""Seeding of the loaders of a run -> its profile. `none` is a program without a profile."""

folders = count()
SEEDINGS = st.sampled_from(sorted(PROFILES))


def _is_exact(run: Run, *stops: int) -> bool:
    weights, losses = replace(run, folder=None).train()
    for stop in stops:
        run.train(stop)
    found, last_losses = run.train()
    return found == weights and last_losses.items() <= losses.items()


@pytest.mark.slow
@settings(max_examples=25)
@given(
    stops=st.lists(st.integers(1, STEPS), max_size=2),
    every=st.integers(1, 5),
    seeding=SEEDINGS,
    items=st.booleans(),
)
def test_a_resumed_run_ends_with_the_weights_of_the_uninterrupted_run(
    tmp_path: Path, stops: list[int], every: int, seeding: str, items: bool
) -> None:
    """Interrupted after any batches and resumed, a run ends with the same weights, bit for bit.

    A run that saves checkpoints and is not interrupted does too.
    """
    folder = tmp_path / str(next(folders))

    assert _is_exact(Run(folder, seeding, every, items=items), *stops)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    stop=st.integers(1, STEPS - 1), every=st.integers(1, 3), seeding=SEEDINGS, items=st.booleans()
)
def test_a_resumed_run_with_workers_ends_with_the_same_weights(
    tmp_path: Path, stop: int, every: int, seeding: str, items: bool
) -> None:
    """Two workers load the same samples in the resumed run as in the uninterrupted run."""
    folder = tmp_path / str(next(folders))

    assert _is_exact(Run(folder, seeding, every, workers=2, items=items), stop)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seeding", PROFILES)
@pytest.mark.parametrize("stops", [(), (2,), (PER_EPOCH,), (PER_EPOCH + 1,)])
@pytest.mark.parametrize("program", ["validates", "new_loaders", "baseline"])
def test_other_loaders_do_not_change_a_resumed_run(
    tmp_path: Path, seeding: str, stops: tuple[int, ...], program: str
) -> None:
    """Exact with a validation after each epoch, each with a new loader, and after other runs."""
    run = Run(tmp_path, seeding, **{program: True})

    assert _is_exact(run, *stops)
    assert EPOCHS - 1 in run.losses
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("last", range(1, EPOCHS + 1))
@pytest.mark.parametrize("saves", ["after an epoch", "after a batch"])
def test_a_save_after_the_loop_saves_the_epoch_as_done(
    tmp_path: Path, last: int, saves: str
) -> None:
    """Such a run resumes with the next epoch; saved at the last batch, it resumes there."""
    run = Run(tmp_path, "auto", saves=saves)

    assert _is_exact(run, last * PER_EPOCH)
    assert min(run.losses, default=EPOCHS) == last - (saves == "after a batch")


@pytest.mark.parametrize(
    ("stop", "saves", "batch_size", "rank", "is_said"),
    [
        (2, "a batch", BATCH, 0, False),
        (2, "a batch", BATCH + 1, 0, True),
        (2, "a batch", BATCH + 1, 1, False),
        (PER_EPOCH, "an epoch", BATCH + 1, 0, False),
    ],
)
def test_a_changed_batch_size_within_an_epoch_is_reported(
    tmp_path: Path,
    be: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    stop: int,
    saves: str,
    batch_size: int,
    rank: int,
    is_said: bool,
) -> None:
    """A run that resumes within an epoch reports once that its batch size differs."""
    for each in range(rank + 1):
        be(each, rank + 1)
        Run(tmp_path, "auto", saves=f"after {saves}").train(stop)
    capsys.readouterr()
    Run(tmp_path, "auto", saves=f"after {saves}", batch_size=batch_size).train()

    said = (
        f"torchrepro: the loader over Noisy[{SAMPLES}] was saved with batch_size=3 and resumes "
        "with batch_size=4, so its batches differ from the batches of the uninterrupted run; "
        "resume with batch_size=3 to continue exactly\n"
    )
    assert capsys.readouterr().err == (said if is_said else "")


@pytest.mark.parametrize(
    ("parts", "shift", "said"),
    [
        (["model", "optimizer"], 0, ""),
        (["model"], 0, "the state of Adam"),
        (["model", "optimizer"], 1, "the parameters of Adam"),
        (["model"], 1, "the parameters of Adam, the state of Adam"),
    ],
)
def test_the_first_step_reports_what_differs_from_the_checkpoint(
    parts: list[str],
    shift: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line names an optimizer that was not added, and weights that the program has changed."""
    for added in (0, shift):
        made = {"model": (model := torch.nn.Linear(2, 2))}
        made["optimizer"] = optimizer = torch.optim.Adam(model.parameters())
        checkpoint = torchrepro.Checkpoint(tmp_path, **{name: made[name] for name in parts})
        with torch.no_grad():
            model.weight += added
        first = checkpoint.step
        for _ in checkpoint.steps(first + 3):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            checkpoint.save()

    lines = capsys.readouterr().err.splitlines()
    where = f"{tmp_path / 'step-000000003' / 'rank-0-of-1.pt'}"
    end = "so it differs from the uninterrupted run"
    expected = f"torchrepro: {where}: the run differs from it at the first step in {said}; {end}"
    assert lines == ([expected] if said else [])


def test_a_checkpoint_can_be_freed_while_an_optimizer_calls_its_hooks(tmp_path: Path) -> None:
    """Torch refuses changes of its hooks during their calls, and a collection may come then."""
    weight = torch.zeros(1, requires_grad=True)
    freed = ref(checkpoint := torchrepro.Checkpoint(tmp_path))
    checkpoints, called = [checkpoint], []
    del checkpoint
    with ExitStack() as undo:
        undo.callback(register_optimizer_step_post_hook(lambda *_: checkpoints.clear()).remove)
        undo.callback(register_optimizer_step_post_hook(lambda *_: called.append(freed())).remove)
        torch.optim.SGD([weight]).step()

    assert called == [None]


@settings(max_examples=12)
@given(
    stop=st.integers(1, STEPS),
    every=st.integers(1, 4),
    seeding=SEEDINGS.filter(lambda seeding: seeding != "none"),
)
def test_a_run_resumes_after_the_last_saved_step(
    tmp_path: Path, stop: int, every: int, seeding: str
) -> None:
    """The folder has the two latest steps only; after a resume no sample is loaded again.

    A run that is done loads no sample.
    """
    run = Run(folder := tmp_path / str(next(folders)), seeding, every)
    run.train(stop)
    before = list(run.dataset.loaded)
    assert run.checkpoint.step == stop
    steps = [step for step in range(1, stop + 1) if step % every == 0][-2:]
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted(files) == [f"step-{step:09d}/rank-0-of-1.pt" for step in steps]
    assert len(list(folder.glob("*"))) == len(steps)

    saved = stop - stop % every
    with torchrepro.apply(PROFILES[seeding]):
        resumed = torchrepro.Checkpoint(folder, **run.checkpoint.parts)
    epoch = (saved - 1) // PER_EPOCH if saved else 0
    assert (resumed.epoch, resumed.batch) == (epoch, saved - epoch * PER_EPOCH)
    assert resumed.step == saved

    weights, _ = run.train()
    epochs, batches = divmod(saved, PER_EPOCH)
    start = epochs * SAMPLES + batches * BATCH
    assert len(run.dataset.loaded) == EPOCHS * SAMPLES - start
    assert before[start:] == run.dataset.loaded[: len(before) - start]
    assert (run.checkpoint.epoch, run.checkpoint.step) == (EPOCHS, STEPS)
    if STEPS % every == 0:
        assert run.train()[0] == weights
        assert run.dataset.loaded == []


def test_a_resumed_run_that_ends_early_is_reported_as_shorter(tmp_path: Path) -> None:
    """It is compared from its first step on, and steps are numbered as in the whole run."""
    with torchrepro.record(tmp_path / "whole"):
        Run(tmp_path / "a").train()
    run = Run(tmp_path / "b")
    run.train(PER_EPOCH + 1)
    with torchrepro.record(tmp_path / "resumed"):
        run.train(STEPS - 1)
    verdict = torchrepro.compare(tmp_path / "whole", tmp_path / "resumed")

    assert verdict.notes[0] == f"B resumes from A: its step 0 is step {PER_EPOCH + 1} of A"
    assert verdict.compared.steps == STEPS - PER_EPOCH - 2
    assert not verdict.same
    assert "shorter than the other" in verdict.advice.cause


@pytest.mark.parametrize(
    ("rtol", "batch_size", "parameters"),
    [(None, BATCH - 1, "unequal"), (0.1, BATCH, "the same, bit for bit")],
)
def test_a_comparison_without_aligned_steps_reports_that_one_run_was_resumed(
    tmp_path: Path, rtol: float | None, batch_size: int, parameters: str
) -> None:
    """By tolerance, and for a checkpoint of another run, it compares the final states."""
    with torchrepro.record(tmp_path / "whole", level="op"):
        Run(tmp_path / "a").train()
    run = Run(tmp_path / "b", batch_size=batch_size)
    run.train(PER_EPOCH + 1)
    with torchrepro.record(tmp_path / "resumed", level="op"):
        run.train()
    verdict = torchrepro.compare(tmp_path / "whole", tmp_path / "resumed", rtol=rtol)

    assert not verdict.same
    assert "resumed from a checkpoint" in verdict.advice.cause
    assert Setting("resumed", "no", "yes") in verdict.settings
    ends = "the parameters after the last step of each run, 7 in A and "
    assert any(each.startswith(ends) and parameters in each for each in verdict.notes)


def test_a_new_run_in_a_process_is_independent_of_the_run_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not recorded as resumed, and the first-step report of a resumed run is cancelled."""
    run = Run(tmp_path / "done")
    for stop in (2, None, None):
        run.train(stop)
    for name in ("one", "other"):
        with torchrepro.record(tmp_path / name):
            Run(tmp_path / f"{name}-checkpoints").train()

    assert torchrepro.compare(tmp_path / "one", tmp_path / "other").same
    assert capsys.readouterr().err == ""


def test_the_batches_of_two_loaders_at_once_are_refused(tmp_path: Path) -> None:
    """Nothing could count the batches that are done; afterwards `batches` takes another loader."""
    checkpoint = torchrepro.Checkpoint(tmp_path)
    for _ in checkpoint.epochs(1):
        with pytest.raises(torchrepro.SeedingError, match="one loader at a time"):
            list(zip(checkpoint.batches([1, 2]), checkpoint.batches([3, 4]), strict=True))

        assert list(checkpoint.batches([5, 6])) == [5, 6]


class Drawing(Dataset[float]):
    """Samples with noise from a generator of the dataset or of one of its attributes."""

    def __init__(self, within: bool) -> None:
        own = np.random.default_rng(4)
        self.transforms: Any = [{"noise": own}] if within else own

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        own = self.transforms[0]["noise"] if isinstance(self.transforms, list) else self.transforms
        return index + float(own.random())


@pytest.mark.parametrize("profile", [{}, AUTO], ids=["plain", "auto"])
@pytest.mark.parametrize("within", [False, True])
def test_a_dataset_with_its_own_generator_loads_the_skipped_batches_again(
    tmp_path: Path, profile: Any, within: bool
) -> None:
    """Batches that are done are loaded again if that moves a generator of the dataset."""

    def train(folder: Path | None, stop: int) -> list[Any]:
        with torchrepro.apply(profile):
            torch.manual_seed(5)
            checkpoint = torchrepro.Checkpoint(folder)
            loader = DataLoader(Drawing(within), BATCH, shuffle=True)
            found = []
            for _ in checkpoint.epochs(1):
                for batch in checkpoint.batches(loader):
                    found.append(batch.tolist())
                    checkpoint.save()
                    if checkpoint.step == stop:
                        return found
            return found

    begun = train(tmp_path, 2)

    assert begun + train(tmp_path, STEPS) == train(None, STEPS)


LOOP = 9


def _batch(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of `text` at random positions, as programs without loaders draw them."""
    places = torch.randint(len(text) - 4, (3,))
    noise = random.random() + float(np.random.random())
    return torch.stack([text[p : p + 4] for p in places]) + noise, text[places + 4]


def _train(folder: Path | None, every: int, stop: int | None, profile: Any) -> dict[str, Any]:
    """Train to the end, or until step `stop` is done; return the weights."""
    with ExitStack() as stack:
        if profile is not None:
            stack.enter_context(torchrepro.apply(profile))
        else:
            random.seed(5), np.random.seed(5), torch.manual_seed(5)
        text = torch.rand(64)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoint = torchrepro.Checkpoint(folder, model=model, optimizer=optimizer)
        with suppress(Interrupted):
            for step in checkpoint.steps(LOOP):
                if step % 4 == 0:
                    _batch(text)  # an evaluation draws as well
                inputs, targets = _batch(text)
                loss = (model(inputs).squeeze(1) - targets).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpoint.save(every)
                if step + 1 == stop:
                    raise Interrupted
    return model.state_dict()


@pytest.mark.parametrize("profile", [None, {"seed": 5}, "seed-only"], ids=str)
@settings(max_examples=8, deadline=None)
@given(stop=st.integers(1, LOOP), every=st.integers(1, 4))
def test_a_resumed_loop_of_steps_ends_with_the_weights_of_the_uninterrupted_one(
    profile: Any, stop: int, every: int
) -> None:
    """Interrupted at any step, the resumed run ends with the same bits."""
    with torchrepro.isolated_rng(), TemporaryDirectory() as folder:
        whole = _train(None, 1, None, profile)
        _train(Path(folder), every, stop, profile)
        resumed = _train(Path(folder), every, None, profile)

    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_finished_loop_takes_no_further_step(tmp_path: Path) -> None:
    """A run that has ended takes no step when it is started again."""
    checkpoint = torchrepro.Checkpoint(tmp_path)
    for _ in checkpoint.steps(3):
        checkpoint.save()

    assert list(torchrepro.Checkpoint(tmp_path).steps(3)) == []
    assert list(torchrepro.Checkpoint(tmp_path).steps(5)) == [3, 4]


@pytest.mark.parametrize("epochs", [0, 2])
def test_a_save_outside_of_batches_and_steps_is_refused(tmp_path: Path, epochs: int) -> None:
    """The error names the two loops, and no file is written."""
    checkpoint = torchrepro.Checkpoint(tmp_path)
    for _ in checkpoint.epochs(epochs):
        with pytest.raises(torchrepro.SeedingError, match=r"checkpoint\.steps\(N\)"):
            checkpoint.save(every=2)
    if not epochs:
        checkpoint = torchrepro.Checkpoint(tmp_path)
        with pytest.raises(torchrepro.SeedingError, match=r"checkpoint\.batches\(loader\)"):
            checkpoint.save()

    assert list(tmp_path.iterdir()) == []


def test_steps_within_epochs_are_refused(tmp_path: Path) -> None:
    """Steps count the whole run: they raise within an epoch, and run after one."""
    checkpoint = torchrepro.Checkpoint(tmp_path)
    for _ in checkpoint.epochs(2):
        with pytest.raises(torchrepro.SeedingError, match="within epochs"):
            next(checkpoint.steps(1))
        break

    assert list(checkpoint.steps(2)) == [0, 1]


def _steps(checkpoint: torchrepro.Checkpoint, count: int) -> None:
    for _ in checkpoint.steps(count):
        checkpoint.save()


def _batches(checkpoint: torchrepro.Checkpoint, count: int) -> None:
    loader = DataLoader(torch.arange(2.0), batch_size=1)
    for _ in checkpoint.epochs(count):
        for _ in checkpoint.batches(loader):
            checkpoint.save()


def _steps_then_batches(checkpoint: torchrepro.Checkpoint, count: int) -> None:
    _steps(checkpoint, 1)
    _batches(checkpoint, count)


@pytest.mark.parametrize(
    ("then", "now", "other"),
    [
        (_steps, _batches, "saved in a loop of steps, and this is one of batches"),
        (_batches, _steps, "saved in a loop of batches, and this is one of steps"),
        (_steps, _steps, ""),
        (_steps_then_batches, _steps_then_batches, ""),
    ],
)
def test_a_checkpoint_of_another_loop_is_refused(
    tmp_path: Path, then: Any, now: Any, other: str
) -> None:
    """`steps` refuses a checkpoint of `batches`, and `batches` one of `steps`."""
    with torchrepro.apply("seed-only"):
        then(torchrepro.Checkpoint(tmp_path), 1)
    refused = pytest.raises(torchrepro.SeedingError, match=other) if other else nullcontext()
    with torchrepro.apply("seed-only"), refused:
        now(torchrepro.Checkpoint(tmp_path), 9)
