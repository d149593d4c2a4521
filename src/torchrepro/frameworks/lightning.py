"""Lightning's Trainer and Fabric: the state of the run in their checkpoints.

Both ask entry points for callbacks; that, and the callbacks' hooks, are public
(https://lightning.ai/docs/pytorch/stable/extensions/entry_points.html). In the middle of an epoch
the Trainer resumes those loaders that have `state_dict` and `load_state_dict`.

Fabric calls a callback at no save and no load, so the two are wrapped. How far a program has come
in an epoch is its own to say. It skips the batches that are done, or puts its loader into the state
that it saves, where the loader says it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torchrepro.frameworks import hooking
from torchrepro.frameworks.hooking import KEY, going_on_without, in_force, log_profile
from torchrepro.ground.console import say
from torchrepro.ground.patching import MissingHookError, surround, surround_everywhere
from torchrepro.seeding.loader_positions import await_loaders, begin_late

if TYPE_CHECKING:
    from contextlib import ExitStack

FRAMEWORK = "lightning"

PACKAGES = {
    "LightningRunState": "lightning.pytorch",
    "PytorchLightningRunState": "pytorch_lightning",
}
"""Class of our callback, by which pickle finds it in this module -> package with its `Trainer`."""

_LOADERS = "combined_loader"
"""Under this name Lightning's checkpoint lists the states of loaders that have one."""


def _place_of(logger: Any) -> Any:
    from torchrepro.manifest.destinations import destination_of

    experiment: Any = getattr(logger, "experiment", None)
    if hasattr(experiment, "get_run") and hasattr(logger, "run_id"):
        return experiment.get_run(logger.run_id)  # MLflow's client has the run under its id
    known = destination_of(experiment) is not None
    return experiment if known else getattr(logger, "log_dir", None) or experiment


def hook_trainer(module: ModuleType, undo: ExitStack) -> None:
    """Give torch's loaders a state, by which Lightning resumes one, and read a Trainer's switches.

    Raises `MissingHookError` where `module` has no Trainer, or where loaders have a state.
    """
    hooking.give_loaders_state(undo)
    trainer = getattr(module, "Trainer", None)
    if trainer is None:
        raise MissingHookError("Trainer")
    surround(undo, trainer, "__init__", partial(hooking.saying_switches, FRAMEWORK, "Trainer"))
    surround_everywhere(undo, sys.modules["torch.serialization"], "load", _reading)


def _reading(load: Any, *args: Any, **kwargs: Any) -> Any:
    loaded = load(*args, **kwargs)
    if in_force() is not None and isinstance(loaded, dict) and KEY in loaded:
        hooking.expect_weights_of(loaded[KEY], f"{FRAMEWORK}: {args[0] if args else 'weights'}")
    return loaded


class TrainerHooks:
    """Puts the state of the run into the checkpoints of a `Trainer`, and takes it up again.

    The hooks of a callback; `__getattr__` makes it one of the package that asks.
    """

    def __init__(self) -> None:
        self._pending: Callable[[], None] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Write the profile to the loggers."""
        if trainer.is_global_zero:
            log_profile(FRAMEWORK, trainer.loggers, _place_of)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Add the state of every rank; Lightning calls it on all of them.

        But after an error it may be this rank alone that saves: nobody else is asked then.
        """
        if in_force() is not None:
            with going_on_without(FRAMEWORK, "the state of the run in a checkpoint"):
                state = hooking.state_of_rank(trainer.optimizers)
                state["loaders"] = _taken_out(checkpoint, trainer)
                if trainer.reload_dataloaders_every_n_epochs:
                    state["resting"] = []  # new loaders begin with generators of their own
                alone = trainer.interrupted and hooking.ranks().size > 1
                states = [state] if alone else hooking.of_all_ranks(state)
                mark = {"alone": True} if alone else {}
                checkpoint[KEY] = hooking.checkpoint_entry(states) | mark

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Put back the state of this rank, and hand its loaders' places to Lightning."""
        if in_force() is None or trainer.state.fn != "fit":
            return
        where = f"{FRAMEWORK}: {trainer.ckpt_path or 'the checkpoint'}"
        with going_on_without(FRAMEWORK, f"going on from {trainer.ckpt_path}"):
            state = hooking.go_on_from(checkpoint.get(KEY), where)
            if state is not None:
                self._go_on(trainer, checkpoint, state, where)

    def _go_on(self, trainer: Any, checkpoint: Any, state: Any, where: str) -> None:
        keeping = [each for each in state["interrupted"] if each["keeps_place"]]
        await_loaders(keeping, hooking.generators_of(state))
        fit = checkpoint["loops"]["fit_loop"]["state_dict"]
        states = fit[_LOADERS] = list(fit.get(_LOADERS, []))
        for number, saved in state["loaders"]:
            states.insert(number, {KEY: saved, "run": state})
        # Before 2.5.3 Lightning makes another iterator in a later epoch than the one that it makes
        # as it resumes, and before 2.5 it trains once more on the batch after which a checkpoint
        # was saved. What tells them apart is `is_resuming` of its loop.
        if not hasattr(trainer.fit_loop, "is_resuming"):
            say(f"{where}: Lightning may begin another epoch here; from 2.5.3 on it does not")
        if not keeping and not any(saved is not None for _, saved in state["loaders"]):
            # Its loaders begin the next epoch too soon here: before the program's hooks are called.
            self._pending = hooking.generators_of(state)
            begin_late(self.on_train_epoch_start, together=len(state["loaders"]))

    def on_train_epoch_start(self, *_: Any) -> None:
        """Put the generators back once more: what a start-up draws does not count."""
        if self._pending is not None:
            self._pending()
            self._pending = None


@cache
def __getattr__(name: str) -> type:
    if name not in PACKAGES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bases = TrainerHooks, import_module(PACKAGES[name]).Callback
    return type(name, bases, {"__module__": __name__, "__doc__": TrainerHooks.__doc__})


def _taken_out(checkpoint: Any, trainer: Any) -> list[Any]:
    """Take the states of our loaders out of Lightning's list, and return them with their places.

    A program that resumes without torchrepro has loaders without a state.
    """
    fit = checkpoint["loops"]["fit_loop"]["state_dict"]
    states = fit.pop(_LOADERS, [])
    # A program's loader may have any state.
    ours = {n: s[KEY] for n, s in enumerate(states) if isinstance(s, Mapping) and KEY in s}
    others = [state for number, state in enumerate(states) if number not in ours]
    if others:
        fit[_LOADERS] = others
    # Undocumented (``batch_progress``), but part of each of Lightning's checkpoints: whether the
    # batch that was trained on last is the last one of its epoch.
    epoch_is_over = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    # Private (``_data_fetcher.batches``): batches that wait to be trained on, one where a loader
    # has no length. Where that is gone, a loader without a length goes on one batch too far.
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    fetched_ahead = len(getattr(fetcher, "batches", ()))
    for number, saved in ours.items():
        if saved is not None and (saved["over"] or epoch_is_over):
            ours[number] = None
        elif saved is not None:
            saved["done"] = saved["batches"] - fetched_ahead
    return [[number, saved] for number, saved in ours.items()]


class ProfileLogged:
    """Writes the profile to the loggers of a `Fabric`, once it has set up its first model."""

    def __init__(self) -> None:
        self._is_done = False

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Write it; Fabric calls this by itself."""
        if not self._is_done and fabric.is_global_zero:
            log_profile("fabric", fabric.loggers, _place_of)
        self._is_done = True


def hook_fabric(module: ModuleType, undo: ExitStack) -> None:
    """Wrap `save` and `load` of the class `Fabric` of `module`, and give torch's loaders a state.

    Raises `MissingHookError` where it has no such class or methods.
    """
    fabric = getattr(module, "Fabric", None)
    if fabric is None:
        raise MissingHookError("Fabric")
    hooking.give_loaders_state(undo)
    surround(undo, fabric, "save", _saving_fabric)
    surround(undo, fabric, "load", _loading_fabric)


def _saving_fabric(save: Any, fabric: Any, path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    if in_force() is not None and isinstance(state, dict):
        with going_on_without("fabric", "the state of the run in a checkpoint"):
            optimizers = [each for each in state.values() if hasattr(each, "param_groups")]
            states = hooking.of_all_ranks(hooking.state_of_rank(optimizers))
            state = {**state, KEY: hooking.checkpoint_entry(states)}
    return save(fabric, path, state, *args, **kwargs)


def _loading_fabric(
    load: Any, fabric: Any, path: Any, state: Any = None, *args: Any, **kwargs: Any
) -> Any:
    with hooking.loaded_states() as loaders:
        rest = load(fabric, path, state, *args, **kwargs)
    entry = rest.pop(KEY, None) if isinstance(rest, dict) else None
    # A program that goes on with a training loads an optimizer as well. Weights alone are those of
    # a teacher, of the best model, of what is fine-tuned.
    parts = state.values() if isinstance(state, dict) else ()
    if in_force() is not None and any(hasattr(part, "param_groups") for part in parts):
        with going_on_without("fabric", f"going on from {path}"):
            where = f"fabric: {path}"
            run = hooking.go_on_from(entry, where)
            if run is not None:
                hooking.begin_interrupted_epochs(run)
                for loader, saved in loaders:
                    if not saved["over"]:
                        hooking.resume_loader(loader, saved, run)
    return rest
