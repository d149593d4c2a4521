"""Checkpoints from which a training run goes on in the middle of an epoch, bit for bit."""

from __future__ import annotations

import io
import re
import shutil
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile, ZipFile

from torchrepro.errors import Problem, SeedingError, some
from torchrepro.seeding import loader_hook
from torchrepro.seeding.dataloaders import knows_epochs, set_epoch, yields_items
from torchrepro.seeding.ranks import world
from torchrepro.seeding.snapshot import rng_state, set_rng_state, write_whole
from torchrepro.seeding.whole import whole

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

FORMAT = 1
_KEPT = 2  # a rank may have written a step that another had not when the run was killed
_STEP = re.compile(r"step-(\d+)")


class Checkpoint:
    """The state of a training run in a folder, from which it goes on where it was interrupted.

    ::

        checkpoint = torchrepro.Checkpoint("checkpoints", model=model, optimizer=optimizer)
        for epoch in checkpoint.epochs(10):
            for batch in checkpoint.batches(loader):
                ...
                checkpoint.save(every=100)

    Every named part has `state_dict` and `load_state_dict`. Each rank writes a file of its own;
    a step counts once all ranks have written it. Files are read without pickle
    (``torch.load(weights_only=True)``). If the folder holds a checkpoint, the parts are loaded
    here and the generators at the first batch. Without a folder nothing is kept. Raises
    `SeedingError` for a damaged checkpoint, one of another world size, or one of other parts.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, **parts: Any) -> None:
        self.folder = None if folder is None else Path(folder)
        self.parts = parts
        self.epoch = 0
        self.batch = 0
        """Batches of the present epoch that are done."""

        self.step = 0
        """Batches that are done since the run began."""

        self._rng: dict[str, Any] | None = None
        if self.folder is not None:
            self._load_latest(self.folder)

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs that are left of `count`, the interrupted one first."""
        while self.epoch < whole("count", count):
            yield self.epoch
            self.epoch, self.batch = self.epoch + 1, 0

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the present epoch that are not done yet.

        Tells the loader and its samplers which epoch it is. Batches that are done are not loaded
        again, unless an `IterableDataset` leaves no other way. Raises `SeedingError` for a loader
        that torchrepro does not seed: it would load other batches than before.
        """
        if self.folder is not None and loader_hook.loading_of(loader) is None:
            raise SeedingError(
                Problem(
                    "this loader is not seeded, so an epoch cannot be taken up in its middle",
                    todo="make it with torchrepro.dataloader_kwargs(name), or apply a profile "
                    "with dataloader.seeding: auto",
                )
            )
        reread = yields_items(loader)
        if knows_epochs(loader):
            set_epoch(loader, self.epoch, start=0 if reread else self.batch)
        batches = islice(loader, self.batch if reread else 0, None)
        if self._rng is not None:
            set_rng_state(self._rng)
            self._rng = None
        for batch in batches:
            self.batch, self.step = self.batch + 1, self.step + 1
            yield batch

    def save(self, every: int = 1) -> None:
        """Write a checkpoint, if the number of batches done is a multiple of `every`.

        Raises `OSError` where it cannot be written.
        """
        import torch

        if self.folder is None or self.step % max(whole("every", every), 1):
            return
        content = io.BytesIO()
        torch.save(
            {
                "format": FORMAT,
                "epoch": self.epoch,
                "batch": self.batch,
                "step": self.step,
                "rng": rng_state(),
                "parts": {name: part.state_dict() for name, part in self.parts.items()},
            },
            content,
        )
        path = _file(self.folder, self.step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.getvalue())
        _forget_what_no_rank_needs(self.folder)

    def _load_latest(self, folder: Path) -> None:
        step = _latest(folder)
        if step is not None:
            self._load(_file(folder, step))

    def _load(self, path: Path) -> None:
        try:
            saved = _read(path)
            rng, parts = saved["rng"], saved["parts"]
            place = saved["epoch"], saved["batch"], saved["step"]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise SeedingError(
                Problem(f"not a whole checkpoint: {reason}", str(path), todo="delete its folder")
            ) from error
        if parts.keys() != self.parts.keys():
            raise SeedingError(
                Problem(
                    "the checkpoint holds other parts",
                    str(path),
                    found=some(parts),
                    legal=some(self.parts),
                )
            )
        for name, part in self.parts.items():
            part.load_state_dict(parts[name])
        self.epoch, self.batch, self.step = place
        self._rng = rng
        loader_hook.set_epochs(rng["loaders"])  # a loader has to know which one it was


def _read(path: Path) -> dict[str, Any]:
    """Return what `save` wrote to `path`; raises whatever says that it is not that."""
    import torch

    with ZipFile(path) as archive:
        damaged = archive.testzip()  # torch.load does not look at the checksums
    if damaged:
        raise BadZipFile(f"{damaged} is damaged")
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if saved["format"] != FORMAT:
        raise ValueError(f"format {saved['format']}, not {FORMAT}")
    return saved


def _file(folder: Path, step: int) -> Path:
    here = world()
    return folder / f"step-{step:09d}" / f"rank-{here.rank}-of-{here.size}.pt"


def _steps(folder: Path) -> list[int]:
    """Return the steps that `folder` holds, the latest first."""
    names = (entry.name for entry in folder.glob("step-*"))
    return sorted((int(m[1]) for m in map(_STEP.fullmatch, names) if m), reverse=True)


def _is_whole(folder: Path, step: int) -> bool:
    """Whether every rank of this world has written `step`."""
    size, place = world().size, _file(folder, step).parent
    return all((place / f"rank-{rank}-of-{size}.pt").exists() for rank in range(size))


def _latest(folder: Path) -> int | None:
    """Return the latest step that every rank has written."""
    whole_one = next((step for step in _steps(folder) if _is_whole(folder, step)), None)
    sizes = {path.stem.partition("-of-")[2] for path in folder.glob("step-*/rank-*-of-*.pt")}
    if whole_one is None and sizes and str(world().size) not in sizes:
        raise SeedingError(
            Problem(
                "the checkpoints come from another number of processes",
                str(folder),
                found=some(sorted(sizes)),
                legal=str(world().size),
            )
        )
    return whole_one


def _forget_what_no_rank_needs(folder: Path) -> None:
    """Delete the steps before the last two that every rank has written."""
    if world().rank == 0:
        steps = _steps(folder)
        kept = [step for step in steps if _is_whole(folder, step)][:_KEPT]
        for step in steps:
            if len(kept) == _KEPT and step < kept[-1]:
                shutil.rmtree(_file(folder, step).parent, ignore_errors=True)
