"""Lightning's Fabric: the state of the run in what `Fabric.save` writes and `Fabric.load` reads.

Fabric calls a callback at no save and no load, so the two are wrapped. How far a program has come
in an epoch is its own to say. It skips the batches that are done, or puts its loader into the state
that it saves, where the loader says it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from torchrepro.frameworks.hooking import going_on_without, in_force
from torchrepro.frameworks.loggers import log_profile, place_of_lightning
from torchrepro.frameworks.run_state import (
    KEY,
    begin_interrupted_epochs,
    checkpoint_entry,
    give_loaders_state,
    loaded_states,
    of_all_ranks,
    own_state,
    put_back,
    resume_loader,
    state_of_rank,
)
from torchrepro.patching import MissingHookError, wrap

if TYPE_CHECKING:
    from types import ModuleType


def callbacks() -> list[Any]:
    """Return the callback that a `Fabric` gets; none without a profile."""
    return [] if in_force() is None else [ProfileLogged()]


class ProfileLogged:
    """Writes the profile to the loggers of a `Fabric`, once it has set up its first model."""

    def __init__(self) -> None:
        self._is_done = False

    def on_after_setup(self, fabric: Any, module: Any) -> None:
        """Write it; Fabric calls this by itself."""
        if not self._is_done and fabric.is_global_zero:
            log_profile("fabric", fabric.loggers, place_of_lightning)
        self._is_done = True


def hook_fabric(module: ModuleType) -> ExitStack:
    """Wrap `save` and `load` of the class `Fabric` of `module`, and give torch's loaders a state.

    Raises `MissingHookError` where it has no such class or methods.
    """
    fabric = getattr(module, "Fabric", None)
    if fabric is None:
        raise MissingHookError("Fabric")
    with ExitStack() as undo:
        undo.enter_context(give_loaders_state())
        wrap(undo, fabric, "save", _saving)
        wrap(undo, fabric, "load", _loading)
        return undo.pop_all()


def _saving(original: Any) -> Any:
    def save(self: Any, path: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if in_force() is not None and isinstance(state, dict):
            with going_on_without("fabric", "the state of the run in a checkpoint"):
                state = {**state, KEY: checkpoint_entry(of_all_ranks(state_of_rank()))}
        return original(self, path, state, *args, **kwargs)

    return save


def _loading(original: Any) -> Any:
    def load(self: Any, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        with loaded_states() as loaders:
            rest = original(self, path, state, *args, **kwargs)
            entry = rest.pop(KEY, None) if isinstance(rest, dict) else None
            # A program that goes on with a training loads an optimizer as well. Weights alone are
            # those of a teacher, of the best model, of what is fine-tuned.
            parts = state.values() if isinstance(state, dict) else ()
            if in_force() is not None and any(hasattr(part, "param_groups") for part in parts):
                with going_on_without("fabric", f"going on from {path}"):
                    where = f"fabric: {path}"
                    run = own_state(entry, where)
                    if run is not None and put_back(run, where):
                        begin_interrupted_epochs(run)
                        for loader, saved in loaders:
                            if not saved["over"]:
                                resume_loader(loader, saved, run)
        return rest

    return load
