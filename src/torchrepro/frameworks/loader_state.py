"""A state for torch's loaders, by which Lightning and Fabric resume one within an epoch.

Both ask whether a loader has `state_dict` and `load_state_dict`. torch's own has neither.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchrepro.frameworks.run_state import KEY, generators_of
from torchrepro.patching import MissingHookError
from torchrepro.seeding.loader_places import place_of, take_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_taken_up: list[tuple[Any, Mapping[str, Any]]] = []
_given: list[ExitStack] = []  # one entry for everyone who asks for it


def give_state() -> ExitStack:
    """Give ``torch.utils.data.DataLoader`` a state until what is returned is closed.

    Raises `MissingHookError` where loaders have one by themselves.
    """
    from torch.utils.data import DataLoader

    with ExitStack() as undo:
        undo.callback(_take_away, DataLoader)
        _given.append(undo)
        for name, method in _METHODS.items():
            if getattr(DataLoader, name, method) is not method:
                raise MissingHookError(
                    "use for our state of loaders: torch gives them one of its own"
                )
            setattr(DataLoader, name, method)
        return undo.pop_all()


def _take_away(owner: Any) -> None:
    _given.pop()
    for name, method in _METHODS.items() if not _given else ():
        if vars(owner).get(name) is method:
            delattr(owner, name)


def _state_dict(loader: Any) -> dict[str, Any]:
    return {KEY: place_of(loader)}


def _load_state_dict(loader: Any, state: Mapping[str, Any]) -> None:
    saved = state.get(KEY)
    if saved is not None and "run" in state:
        go_on(loader, saved, state["run"])
    elif saved is not None:
        _taken_up.append((loader, saved))


_METHODS = {"state_dict": _state_dict, "load_state_dict": _load_state_dict}


def go_on(loader: Any, saved: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Have `loader` go on after the batches of `saved`, with the generators of the state `run`."""
    take_up(
        loader, saved, generators_of(run), saved["done"] if "done" in saved else saved["batches"]
    )


@contextmanager
def loaded_states() -> Iterator[list[tuple[Any, Mapping[str, Any]]]]:
    """Collect the loaders whose state is loaded within the block, each with that state."""
    _taken_up.clear()
    try:
        yield _taken_up
    finally:
        _taken_up.clear()
