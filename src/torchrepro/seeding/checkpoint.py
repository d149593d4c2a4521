"""Checkpoints that resume a training run in the middle of an epoch, bit for bit."""

from __future__ import annotations

import io
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet
from zipfile import BadZipFile, ZipFile

from torchrepro.ground.errors import SeedingError, shown, some
from torchrepro.ground.writing import write_atomically
from torchrepro.seeding import loader_positions
from torchrepro.seeding.loader import set_epochs
from torchrepro.seeding.loader_positions import Delivery, Resumption, named_loading_of
from torchrepro.seeding.resumed_run import ResumedRun
from torchrepro.seeding.state import (
    compare_at_first_step,
    digests_of,
    forget,
    rng_state,
    set_rng_state,
)
from torchrepro.seeding.streams import nonnegative_int, world

if TYPE_CHECKING:
    import os

FORMAT = 2
_KEPT = 2  # steps to keep: in a killed run, not all ranks may have written the last step
_STEP = re.compile(r"step-(\d+)")

_checkpoints: WeakSet[Checkpoint] = WeakSet()
"""The checkpoints of this process that have a folder."""


@cache
def _note_optimizers() -> None:
    """From now on, add each optimizer that makes a step to all checkpoints.

    The hook stays registered when a checkpoint is freed. That may happen while torch iterates over
    its hooks, and then torch refuses the removal of one.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(optimizer: Any, *_: Any) -> None:
        for checkpoint in _checkpoints:
            checkpoint._optimizers.add(optimizer)  # noqa: SLF001 - of this module

    register_optimizer_step_post_hook(after_step)


class Checkpoint:
    """The state of a training run in a folder, to resume it exactly where it was interrupted.

    ::

        checkpoint = torchrepro.Checkpoint("checkpoints", model=model, optimizer=optimizer)
        for epoch in checkpoint.epochs(10):
            for batch in checkpoint.batches(loader):
                ...
                checkpoint.save(every=100)

    A loop without loaders, which draws its own batches, counts steps instead::

        for step in checkpoint.steps(10_000):
            ...
            checkpoint.save(every=100)

    Every part (a keyword argument) has `state_dict` and `load_state_dict`. Each rank writes its own
    file, and a step is complete once all ranks have written it. Files are read without pickle
    (``torch.load(weights_only=True)``). If the folder has a checkpoint, the constructor loads the
    parts, and the first batch restores the generators. With `folder=None`, nothing is saved. Raises
    `SeedingError` if the checkpoint is damaged, or has another world size or other parts.
    `steps` also raises it for a checkpoint that was saved in `batches`, and vice versa.

    An epoch is resumed in three steps. First, the states from the start of the epoch are restored:
    of the global generators, and of the generators of the loader and its samplers. Then the batches
    that are done are skipped. Last, the states of all generators at the save are restored. So no
    profile is needed, and a loader may have its own generator, sampler or `worker_init_fn`.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, **parts: Any) -> None:
        # The program may change its working directory before it saves.
        self.folder = None if folder is None else Path(folder).absolute()
        self.parts = parts
        self.epoch = 0
        self.batch = 0  # batches of the present epoch that are done
        self.step = 0  # batches, or steps of `steps`, that are done since the run began
        self._epoch_is_done = False
        self._within_epochs = False
        self._counted = False  # whether `batch` or `step` counts the progress of the program
        self._counts_batches = False
        self._loop = ""  # "steps" or "batches": the latest loop, at first the saved one
        self._first_save = True
        self._delivery: Delivery | None = None
        # Progress in the interrupted epoch, until a loader resumes it.
        self._progress: dict[str, Any] | None = None
        # States of the host's generators when `epochs` began the present epoch.
        self._begun: dict[str, Any] | None = None
        # Root seed of a loader with a name: without a profile, the program's own seed.
        self._root: int | None = None
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise SeedingError.about(
                    "has no state_dict and load_state_dict",
                    key=name,
                    found=shown(part),
                    legal="a module, an optimizer, a scheduler, a scaler",
                )
        self._optimizers: WeakSet[Any] = WeakSet()  # optimizers that have made a step
        step = None if self.folder is None else _latest(self.folder)
        if self.folder is not None:
            _note_optimizers()
            _checkpoints.add(self)
        self._run = ResumedRun()
        forget()  # an earlier run in this process may have ended before its first step
        if self.folder is not None and step is not None:
            self._load(_file(self.folder, step))

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the number of each epoch that remains of `count`, first the interrupted epoch."""
        self._within_epochs = True
        try:
            while self.epoch < nonnegative_int("count", count):
                self._counted = False
                # An epoch begins with the generators' states in the uninterrupted run.
                if self._waits_for("batches") and not self.batch:
                    self._run.restore_once()
                elif self._waits_for("batches") and self._begun is not None:
                    loader_positions.write_states(None, self._begun)
                if self.folder is not None:
                    states = loader_positions.read_states(None)
                    self._begun = loader_positions.encoded_states(states)
                yield self.epoch
                self.epoch, self.batch, self._epoch_is_done = self.epoch + 1, 0, False
            self._counted = True
        finally:
            self._within_epochs = False

    def steps(self, count: int) -> Iterator[int]:
        """Yield the number of each step that remains of `count`, for a loop without loaders.

        Steps count from 0. The generators are restored before the first step, so draw each batch
        in the step that trains on it. A loader that is read in a step would start again from its
        first batch, so use `epochs` and `batches` for loaders. Raises `SeedingError` in a loop over
        `epochs`.
        """
        if self._within_epochs:
            raise SeedingError.about(
                "steps runs within epochs, and so cannot know which epoch it counts",
                todo="count the steps of the run: for step in checkpoint.steps(N)",
            )
        self._counted = True
        if self._waits_for("batches"):
            if self.step < nonnegative_int("count", count):
                raise self._of_another_loop("steps")
            return  # the checkpoint was saved in the batches that follow these steps
        self._loop = "steps"
        self._run.restore_once()
        while self.step < nonnegative_int("count", count):
            self.step += 1
            yield self.step - 1

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the present epoch that are not done yet.

        Sets the epoch of the loader and its samplers. Under `dataloader.seeding: auto`, and for a
        loader made with `dataloader_kwargs`, the done batches are not loaded again. They are loaded
        again from an `IterableDataset`, which has no sample indices, and from a dataset with its
        own generator. The attribute `batch` also counts done batches, so a program that uses only
        some batches of an epoch can stop at the same batch. Raises `SeedingError` within the
        batches of another loader.
        """
        if self._counts_batches:
            raise SeedingError.about(
                "counts the batches of one loader at a time",
                key="checkpoint.batches",
                todo="iterate the other loader by itself, or make one loader of both",
            )
        if self._waits_for("steps"):
            raise self._of_another_loop("batches")
        self._loop = "batches"
        named = named_loading_of(loader)
        if named is not None:
            named.root = named.root if self._root is None else self._root
            self._root = named.root
            named.go_to(self.epoch)
        loader_positions.set_epoch_of_parts(loader, self.epoch)
        progress, self._progress = self._progress, None
        resumption = None
        if self.batch and progress is not None:  # the present epoch is the interrupted one
            resumption = Resumption(progress, self._run.restore_once, self.batch)
        else:
            self._run.restore_once()
        delivery = self._delivery = self._run.epoch_begins(loader, resumption)
        iterator = delivery.begin(partial(iter, loader))
        self._counted = self._counts_batches = True
        try:
            with suppress(StopIteration):
                while True:
                    batch = delivery.advance(partial(next, iterator))
                    self.batch, self.step = self.batch + 1, self.step + 1
                    yield batch
        finally:
            self._counts_batches = False
        self._epoch_is_done = True

    def _waits_for(self, loop: str) -> bool:
        """Return whether the checkpoint was saved in `loop`, and no loop has resumed it yet."""
        return self._run.awaits_restore and self._loop == loop

    def _of_another_loop(self, loop: str) -> SeedingError:
        return SeedingError.about(
            f"the checkpoint was saved in a loop of {self._loop}, and this is one of {loop}",
            str(self.folder),
            todo="use the loop that saved it, or another folder to start from scratch",
        )

    def save(self, every: int = 1) -> None:
        """Write a checkpoint if the number of done batches or steps is a multiple of `every`.

        Gradients are not saved, so call it after a step of the optimizer. A call after the last
        batch of an epoch saves the epoch as done, so make it the last call of the epoch, for
        instance after the scheduler's step. Raises `SeedingError` outside of `batches` and `steps`,
        where progress is not counted, and for a part whose state cannot be saved without pickle.
        Raises `OSError` if the file cannot be written.
        """
        import torch

        if not self._counted:
            raise SeedingError.about(
                "neither batches nor steps runs, so nothing counts the progress to be saved",
                todo="loop with `for batch in checkpoint.batches(loader)`, or without a loader "
                "with `for step in checkpoint.steps(N)`",
            )
        if self.folder is None or self.step % max(nonnegative_int("every", every), 1):
            return
        progress = None
        if self.batch and not self._epoch_is_done and self._delivery is not None:
            progress = self._delivery.progress()
        states = {name: part.state_dict() for name, part in self.parts.items()}
        if self._first_save:
            for name, state in states.items():
                _check_state(name, state)
            self._first_save = False
        content = io.BytesIO()
        torch.save(
            {
                "format": FORMAT,
                "epoch": self.epoch + self._epoch_is_done,
                "batch": 0 if self._epoch_is_done else self.batch,
                "step": self.step,
                "loop": self._loop,
                "place": progress,
                "root": self._root,
                "begun": self._begun,
                "resting": self._run.resting(),
                "rng": rng_state(),
                "optimizers": [*map(digests_of, self._optimizers)],
                "parts": states,
            },
            content,
        )
        path = _file(self.folder, self.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_atomically(path, content.getvalue())
        except OSError:
            with suppress(OSError):
                path.parent.rmdir()  # only if empty: a failed write leaves no folder of a step
            raise
        if world().rank == 0:
            steps, complete = _steps(self.folder)
            for old in steps:
                if len(complete) >= _KEPT and old < complete[_KEPT - 1]:
                    shutil.rmtree(_file(self.folder, old).parent, ignore_errors=True)

    def _load(self, path: Path) -> None:
        try:
            saved = _read(path)
        except Exception as error:
            raise SeedingError.about(
                f"not a complete checkpoint: {_reason(error)}",
                str(path),
                todo="delete its folder, to resume from the step before",
            ) from error
        parts = saved["parts"]
        if parts.keys() != self.parts.keys():
            raise SeedingError.about(
                "the checkpoint has other parts",
                str(path),
                found=some(parts),
                legal=some(self.parts),
            )
        for name, part in self.parts.items():
            part.load_state_dict(parts[name])
        self.epoch, self.batch, self.step = saved["epoch"], saved["batch"], saved["step"]
        self._loop, self._progress, self._begun = saved["loop"], saved["place"], saved["begun"]
        self._root, rng, optimizers = saved["root"], saved["rng"], saved["optimizers"]

        def restore() -> None:
            set_rng_state(rng)
            # Not started before: if this run is already done, the next step belongs to another run.
            compare_at_first_step(optimizers, str(path))

        self._run = ResumedRun({"resting": saved["resting"]}, restore)
        set_epochs(rng["loaders"])  # a loader needs its next epoch before its first batch


def _check_state(name: str, state: Any) -> None:
    import torch

    content = io.BytesIO()
    torch.save(state, content)
    content.seek(0)
    try:
        torch.load(content, weights_only=True)
    except Exception as error:
        raise SeedingError.about(
            f"its state cannot be saved without pickle: {_reason(error)}",
            key=name,
            legal="tensors, numbers, text, and lists and dicts of them",
            todo="have its state_dict return plain values",
        ) from error


def _reason(error: Exception) -> str:
    """Return the most useful line of the message of `error`, without torch's colour codes."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in str(error).splitlines()]
    telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return f"{type(error).__name__}: {(telling or lines or [''])[0]}"


def _read(path: Path) -> dict[str, Any]:
    import torch

    with ZipFile(path) as archive:
        damaged = archive.testzip()  # torch.load ignores the checksums
    if damaged:
        raise BadZipFile(f"{damaged} is damaged")
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if saved["format"] != FORMAT:
        raise ValueError(f"format {saved['format']}, not {FORMAT}")
    return saved


def _file(folder: Path, step: int) -> Path:
    rank, size = world().rank, world().size
    return folder / f"step-{step:09d}" / f"rank-{rank}-of-{size}.pt"


def _steps(folder: Path) -> tuple[list[int], list[int]]:
    """Return two lists, latest first: all steps in `folder`, and steps of all ranks."""
    names = (entry.name for entry in folder.glob("step-*"))
    steps = sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)
    files = [f"rank-{rank}-of-{world().size}.pt" for rank in range(world().size)]
    folders = {step: _file(folder, step).parent for step in steps}
    return steps, [step for step in steps if all((folders[step] / f).exists() for f in files)]


def _latest(folder: Path) -> int | None:
    group, (_, complete) = world(), _steps(folder)
    sizes = {path.stem.partition("-of-")[2] for path in folder.glob("step-*/rank-*-of-*.pt")}
    if not complete and sizes and str(group.size) not in sizes:
        raise SeedingError.about(
            "the checkpoints were written by another number of processes",
            str(folder),
            found=some(sorted(sizes)),
            legal=str(group.size),
        )
    if not complete and sizes:
        warnings.warn(
            f"{folder} has no step that all {group.size} ranks have written (this is rank "
            f"{group.rank}): starting from the beginning",
            stacklevel=3,
        )
    return complete[0] if complete else None
