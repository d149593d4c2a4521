"""Lightning's Trainer: a callback without a line of the program, and loaders that resume.

A `Trainer` asks the entry points of the group ``callbacks_factory`` for callbacks; that, and the
callback's hooks, are public
(https://lightning.ai/docs/pytorch/stable/extensions/entry_points.html). In the middle of an epoch
Lightning resumes those loaders that have `state_dict` and `load_state_dict`.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from torchrepro.frameworks.hooking import in_force
from torchrepro.frameworks.loader_state import give_state
from torchrepro.frameworks.run_state import (
    KEY,
    checkpoint_entry,
    generators_of,
    of_all_ranks,
    own_state,
    put_back,
    state_of_rank,
)

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import ModuleType

_LOADERS = "combined_loader"
"""Under this name Lightning's checkpoint lists the states of loaders that have one."""


def callbacks(package: str) -> list[Any]:
    """Return the callback that a `Trainer` of `package` gets; none without a profile."""
    return [] if in_force() is None else [_callback_class(package)()]


def hook_trainer(_: ModuleType) -> ExitStack:
    """Give torch's loaders a state, which is how Lightning resumes one within an epoch."""
    return give_state()


@cache
def _callback_class(package: str) -> type:
    """Return our callback as a subclass of the `Callback` of `package`."""
    base: Any = sys.modules[package].Callback

    class TorchreproCallback(base):  # type: ignore[misc]  # the class is only known at run time
        """Puts the state of the run into the checkpoints of a `Trainer`, and takes it up again."""

        def __init__(self) -> None:
            self._pending: Any = None

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            if in_force() is None:
                return
            state = state_of_rank()
            state["loaders"] = _taken_out(checkpoint, _epoch_is_over(trainer))
            checkpoint[KEY] = checkpoint_entry(of_all_ranks(state))

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            if in_force() is None or trainer.state.fn != "fit":
                return
            where = f"{package.partition('.')[0]}: {trainer.ckpt_path or 'the checkpoint'}"
            state = own_state(checkpoint.get(KEY), where)
            if state is not None and put_back(state, where):
                _put_in(checkpoint, state)
                self._pending = generators_of(state)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            # An epoch that begins anew: whatever its start-up drew does not count.
            if self._pending is not None:
                self._pending()
                self._pending = None

        def on_train_batch_start(self, *_: Any) -> None:
            self._pending = None  # in the middle of an epoch the loader has seen to it

    TorchreproCallback.__module__ = __name__
    return TorchreproCallback


def _epoch_is_over(trainer: Any) -> bool:
    """Whether the batch that was trained on last is the last one of its epoch.

    Undocumented (``fit_loop.epoch_loop.batch_progress``), but part of each of its checkpoints.
    """
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


def _taken_out(checkpoint: Any, epoch_is_over: bool) -> list[Any]:  # noqa: FBT001 - a fact
    """Take the states of our loaders out of Lightning's list, and return them with their places.

    A program that resumes without torchrepro has loaders without a state.
    """
    fit = checkpoint["loops"]["fit_loop"]["state_dict"]
    states = fit.pop(_LOADERS, [])
    ours = {number: state[KEY] for number, state in enumerate(states) if KEY in state}
    others = [state for state in states if KEY not in state]
    if others:
        fit[_LOADERS] = others
    if epoch_is_over:
        for saved in filter(None, ours.values()):
            if saved["batches"]:
                saved["epoch"], saved["batches"] = saved["epoch"] + 1, 0
                saved["samplers"] = [epoch + 1 for epoch in saved["samplers"]]
    return [[number, saved] for number, saved in ours.items()]


def _put_in(checkpoint: Any, state: Any) -> None:
    """Put the states of our loaders back into Lightning's list, where they were."""
    fit = checkpoint["loops"]["fit_loop"]["state_dict"]
    states = list(fit.get(_LOADERS, []))
    for number, saved in state["loaders"]:
        states.insert(number, {KEY: saved, "run": state})
    fit[_LOADERS] = states
