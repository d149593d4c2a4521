"""Hooks into Lightning's Trainer and Fabric, which add the state of a run to checkpoints.

Trainer and Fabric load callbacks from entry points. The entry points and the callbacks' hooks are
public (https://lightning.ai/docs/pytorch/stable/extensions/entry_points.html). The Trainer resumes
a loader within an epoch if the loader has `state_dict` and `load_state_dict`.

Fabric calls no callback when it saves or loads, so `Fabric.save` and `Fabric.load` are wrapped. A
program with Fabric resumes within an epoch itself: the program skips the batches that are done, or
adds the loader to the saved state.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchrepro.frameworks import hooking
from torchrepro.frameworks.hooking import KEY, active_profile, log_profile, skip_on_error
from torchrepro.ground.console import say
from torchrepro.ground.patching import surround, surround_everywhere

if TYPE_CHECKING:
    from torchrepro.seeding.resumed_run import ResumedRun

FRAMEWORK = "lightning"

PACKAGES = {
    "LightningRunState": "lightning.pytorch",
    "PytorchLightningRunState": "pytorch_lightning",
}
"""Class name of our callback, which pickle looks up in this module -> package of its `Trainer`."""

_LOADERS = "combined_loader"
"""The key in Lightning's checkpoints for the states of loaders."""


def _target_of(logger: Any) -> Any:
    from torchrepro.manifest.destinations import destination_of

    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "get_run") and hasattr(logger, "run_id"):
        return experiment.get_run(logger.run_id)  # the experiment is MLflow's client
    known = destination_of(experiment) is not None
    return experiment if known else getattr(logger, "log_dir", None) or experiment


def hook_trainer(module: ModuleType, undo: ExitStack) -> None:
    """Add `state_dict` to torch's DataLoader, so that Lightning resumes loaders within an epoch.

    Also reports a Trainer's determinism switches, and a training that starts from only the weights
    of a checkpoint, read with `torch.load`. Raises `MissingHookError` if `module` has no Trainer,
    or if torch's DataLoader itself has a `state_dict`.
    """
    hooking.give_loaders_state(undo)
    trainer = hooking.part_of(module, "Trainer")
    around = partial(hooking.call_reporting_switches, FRAMEWORK, "Trainer")
    surround(undo, trainer, "__init__", around)
    surround_everywhere(undo, sys.modules["torch.serialization"], "load", _reading)


def _reading(load: Any, *args: Any, **kwargs: Any) -> Any:
    loaded = load(*args, **kwargs)
    if active_profile() is not None and isinstance(loaded, dict) and KEY in loaded:
        hooking.expect_weights_of(loaded[KEY], f"{FRAMEWORK}: {args[0] if args else 'weights'}")
    return loaded


class TrainerHooks:
    """Adds the state of the run to the checkpoints of a `Trainer`, and restores it.

    The module's `__getattr__` combines this class with the `Callback` class of each package.
    """

    _delayed: ResumedRun | None = None  # its epochs begin after the program's hooks

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Write the profile to the loggers."""
        if trainer.is_global_zero:
            log_profile(FRAMEWORK, trainer.loggers, _target_of)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Add the states of all ranks to the checkpoint; Lightning calls this on every rank.

        After an error, perhaps only this rank saves. Then only the state of this rank is added.
        """
        if active_profile() is not None:
            with skip_on_error(FRAMEWORK, "saving the state of the run in a checkpoint"):
                state = hooking.state_of_rank(trainer.optimizers)
                state["loaders"] = _remove_our_states(checkpoint, trainer)
                if trainer.reload_dataloaders_every_n_epochs:
                    state["resting"] = []  # each epoch has new loaders with new generators
                alone = trainer.interrupted and hooking.ranks().size > 1
                states = [state] if alone else hooking.of_all_ranks(state)
                mark = {"alone": True} if alone else {}
                checkpoint[KEY] = hooking.checkpoint_entry(states) | mark

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Restore the state of this rank, and pass the loaders' states to Lightning."""
        if active_profile() is None or trainer.state.fn != "fit":
            return
        name = f"{FRAMEWORK}: {trainer.ckpt_path or 'the checkpoint'}"
        with skip_on_error(FRAMEWORK, f"resuming from {trainer.ckpt_path}"):
            run = hooking.resume_from(checkpoint.get(KEY), name)
            if run is not None:
                self._resume_loaders(trainer, checkpoint, run, name)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Restore the generators again, since the start of the training has drawn from them."""
        if self._delayed is not None:
            self._delayed.restore_once()

    def _resume_loaders(self, trainer: Any, checkpoint: Any, run: ResumedRun, name: str) -> None:
        keeping = [loader for loader in run.state["interrupted"] if loader["keeps_place"]]
        run.await_only(keeping)
        fit = checkpoint["loops"]["fit_loop"]["state_dict"]
        states = fit[_LOADERS] = list(fit.get(_LOADERS, []))
        passed = run.state["loaders"]
        for number, saved in passed:
            states.insert(number, {KEY: saved, "run": run})
        # Lightning before 2.5.3 resumes with another iterator than the uninterrupted run has, and
        # before 2.5 it repeats the batch after which the checkpoint was saved. From 2.5.3 on, its
        # loop has `is_resuming`.
        if not hasattr(trainer.fit_loop, "is_resuming"):
            say(f"{name}: Lightning before 2.5.3 may start another epoch when it resumes")
        if not keeping and not any(saved is not None for _, saved in passed):
            # A resumed Trainer starts the loaders of the next epoch before the program's hooks.
            self._delayed = run
            run.delay_epochs(together=len(passed))


@cache
def __getattr__(name: str) -> type:
    if name not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bases = TrainerHooks, import_module(PACKAGES[name]).Callback
    return type(name, bases, {"__module__": __name__, "__doc__": TrainerHooks.__doc__})


def _remove_our_states(checkpoint: Any, trainer: Any) -> list[Any]:
    """Remove our states from Lightning's list of loader states; return pairs of index and state.

    If the program resumed without torchrepro, torch's loaders could not load these states.
    """
    fit = checkpoint["loops"]["fit_loop"]["state_dict"]
    states = fit.pop(_LOADERS, [])
    # The state of a program's own loader may have any type.
    ours = {n: s[KEY] for n, s in enumerate(states) if isinstance(s, Mapping) and KEY in s}
    of_program = [state for number, state in enumerate(states) if number not in ours]
    if of_program:
        fit[_LOADERS] = of_program
    # ``batch_progress`` is undocumented, but part of every checkpoint of Lightning.
    epoch_is_over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    # ``_data_fetcher.batches`` is private. It has the batches that are fetched but not trained on:
    # one if a loader has no length. Without it, such a loader resumes one batch too late.
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    fetched_ahead = len(getattr(fetcher, "batches", ()))
    for number, saved in ours.items():
        if saved is not None and (saved["over"] or epoch_is_over):
            ours[number] = None
        elif saved is not None:
            saved["done"] = saved["batches"] - fetched_ahead
    return [[number, saved] for number, saved in ours.items()]


class ProfileLogged:
    """Callback that writes the profile to the loggers of a `Fabric` once a model is set up."""

    _is_done = False

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Write the profile after the first set-up; called by Fabric."""
        if not self._is_done and fabric.is_global_zero:
            log_profile("fabric", fabric.loggers, _target_of)
        self._is_done = True


def hook_fabric(module: ModuleType, undo: ExitStack) -> None:
    """Wrap `Fabric.save` and `Fabric.load` of `module`, and add `state_dict` to torch's DataLoader.

    Raises `MissingHookError` if `module` has no such class or methods.
    """
    fabric = hooking.part_of(module, "Fabric")
    hooking.give_loaders_state(undo)
    surround(undo, fabric, "save", _saving_fabric)
    surround(undo, fabric, "load", _loading_fabric)


def _saving_fabric(save: Any, fabric: Any, path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    if active_profile() is not None and isinstance(state, dict):
        with skip_on_error("fabric", "saving the state of the run in a checkpoint"):
            state_here = hooking.state_of_rank(hooking.optimizers_in(state))
            states = hooking.of_all_ranks(state_here)
            state = {**state, KEY: hooking.checkpoint_entry(states)}
    return save(fabric, path, state, *args, **kwargs)


def _loading_fabric(
    load: Any, fabric: Any, path: Any, state: Any = None, *args: Any, **kwargs: Any
) -> Any:
    positions: list[tuple[Any, Any]] = []

    def collect(load_state: Any, loader: Any, loaded: Mapping[str, Any]) -> None:
        positions.append((loader, loaded.get(KEY)))
        load_state(loader, loaded)

    with ExitStack() as undo:
        surround(undo, sys.modules["torch.utils.data"].DataLoader, "load_state_dict", collect)
        rest = load(fabric, path, state, *args, **kwargs)
    entry = rest.pop(KEY, None) if isinstance(rest, dict) else None
    # A program that resumes a training also loads an optimizer. Without an optimizer, the program
    # may have loaded a teacher, the best model, or a model to fine-tune.
    is_training = isinstance(state, dict) and hooking.optimizers_in(state)
    if active_profile() is not None and is_training:
        with skip_on_error("fabric", f"resuming from {path}"):
            run = hooking.resume_from(entry, f"fabric: {path}")
            if run is not None:
                for loader, saved in positions:
                    if saved is not None and not saved["over"]:
                        run.resume(loader, saved)
    return rest
