"""Hooks into Ignite's `Checkpoint`, which add the state of a run to its checkpoints.

A `Checkpoint` saves each object of its dict `to_save` by the object's `state_dict`. While it saves,
the dict has one more object, which is ours. ``Checkpoint.load_objects`` ignores entries that the
program does not request, so a program without torchrepro loads the checkpoint as usual.

A resumed `Engine` continues to count its iterations, but reads its loader from the first batch. So
torchrepro skips the batches that are done. It prepares this when the engine starts.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchrepro.frameworks import hooking
from torchrepro.frameworks.hooking import KEY, active_profile, skip_on_error
from torchrepro.ground.console import say_once
from torchrepro.ground.patching import surround
from torchrepro.seeding.generators import States, all_slots
from torchrepro.seeding.loader_positions import epochs, is_kept

if TYPE_CHECKING:
    from contextlib import ExitStack

FRAMEWORK = "ignite"


def hook_checkpoint(module: ModuleType, undo: ExitStack) -> None:
    """Wrap ``Checkpoint.__call__``, which saves, and ``Checkpoint.load_objects`` of `module`.

    Raises `MissingHookError` if `module` has no such class or methods.
    """
    checkpoint = hooking.part_of(module, "Checkpoint")
    surround(undo, checkpoint, "__call__", _saving)
    surround(undo, checkpoint, "load_objects", _loading)


def _trainer_in(parts: Mapping[str, Any]) -> Any:
    """Return the first `Engine` in `parts`, or None: a dict of weights resumes no training."""
    engine = sys.modules["ignite.engine"].Engine
    return next((part for part in parts.values() if isinstance(part, engine)), None)


def _is_deterministic(trainer: Any) -> bool:
    return isinstance(trainer, sys.modules["ignite.engine"].DeterministicEngine)


def _saving(save: Any, checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
    parts = checkpoint.to_save
    trainer = _trainer_in(parts or {})
    # A checkpoint of a single object has no keys: the object's own state is the content.
    is_run = trainer is not None and len(parts) > 1 and not _is_deterministic(trainer)
    if is_run and active_profile() is not None:
        checkpoint.to_save = {**parts, KEY: _StateToSave(trainer, parts)}
    try:
        return save(checkpoint, *args, **kwargs)
    finally:
        checkpoint.to_save = parts


@dataclass(frozen=True, slots=True)
class _StateToSave:
    trainer: Any
    parts: Mapping[str, Any]

    def state_dict(self) -> dict[str, Any] | None:
        with skip_on_error(FRAMEWORK, "saving the state of the run in a checkpoint"):
            loader = self.trainer.state.dataloader
            latest = epochs.latest(loader)
            state = hooking.state_of_rank(hooking.optimizers_in(self.parts))
            state["loader"] = None if latest is None else latest.progress()
            # A loader of torchdata resumes by itself if the program saves it.
            state["resumes_itself"] = any(part is loader for part in self.parts.values())
            # Only the program knows on which ranks it saves, so the states cannot be gathered.
            unknown: list[Any] = [None] * (hooking.ranks().size - 1)
            if unknown:
                say_once(
                    f"{FRAMEWORK}: a checkpoint has the state of one rank only; a run resumed "
                    "from it differs from the uninterrupted run"
                )
            return hooking.checkpoint_entry([state, *unknown])
        return None  # after an error


def _loading(load: Any, *args: Any, **kwargs: Any) -> None:
    # `load_objects` is a static method. An instance may call it too, and passes itself.
    bound = args[1:] if args and not isinstance(args[0], Mapping) else args
    load(*bound, **kwargs)
    arguments = signature(load).bind(*bound, **kwargs).arguments
    trainer, saved = _trainer_in(arguments["to_load"]), arguments["checkpoint"]
    if active_profile() is None or trainer is None:
        return
    name = "the checkpoint" if isinstance(saved, Mapping) else str(saved)
    with skip_on_error(FRAMEWORK, f"resuming from {name}"):
        if not isinstance(saved, Mapping):
            saved = sys.modules["torch"].load(saved, "cpu", weights_only=True, mmap=True)
        _resume(trainer, saved.get(KEY), f"{FRAMEWORK}: {name}")


def _resume(trainer: Any, saved: Any, checkpoint: str) -> None:
    if _is_deterministic(trainer):
        hooking.report_not_resumed(checkpoint, "a DeterministicEngine seeds each epoch itself")
        return
    if isinstance(saved, Mapping) and None in saved.get("ranks", ()):
        hooking.report_not_resumed(checkpoint, "it has the state of one rank only")
        return
    run = hooking.resume_from(saved, checkpoint)
    if run is None:
        return
    progress, resumes_itself = run.state["loader"], run.state["resumes_itself"]
    run.await_only([progress] if resumes_itself and progress is not None else [])
    state = trainer.state
    events = sys.modules["ignite.engine"].Events

    def start() -> None:
        trainer.remove_event_handler(start, events.STARTED)
        run.restore_once()
        trainer.add_event_handler(events.EPOCH_STARTED, begin_epoch)

    def begin_epoch() -> None:
        trainer.remove_event_handler(begin_epoch, events.EPOCH_STARTED)
        if state.epoch_length and not state.iteration % state.epoch_length:
            # Saved between two epochs: handlers of the program may have drawn for the new epoch.
            run.restore = States(all_slots().values()).put_back
        if progress is not None and not resumes_itself and is_kept(state.dataloader):
            run.resume(state.dataloader, progress)

    trainer.add_event_handler(events.STARTED, start)
