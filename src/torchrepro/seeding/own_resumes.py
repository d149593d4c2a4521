"""Says where a program goes on within an epoch by itself, and its samples cannot.

Under `dataloader.seeding: auto` the samples of an epoch draw from the base seed with which it
began. A program that puts torch's generator where it was at a step, and not where it was as the
epoch began, is exact in plain Python as long as it loads in the main process: there its samples
draw from that generator. Here they draw from another base seed than in the uninterrupted run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torchrepro.callers import package
from torchrepro.console import say_once
from torchrepro.seeding.call_listeners import listen, stop_listening
from torchrepro.seeding.loader import FollowingLoading
from torchrepro.seeding.loader_places import deliveries

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from torchrepro.seeding.loader_places import Delivery

_READ, _PUT = "get_rng_state", "set_rng_state"
_MANY = 1000
_states_read: dict[int, None] = {}
"""Digests of the states of torch's generator that the program has read in this process."""

_states_put: list[bool] = []
"""One entry for each state that it has put back without having read it here: it was saved."""


def watch(*, begins: bool) -> None:
    """Hear of the program's reading and putting of torch's generator from now on, or no more."""
    _states_read.clear()
    _states_put.clear()
    if not begins:
        stop_listening(_note)
        return
    for module in ("torch", "torch.random"):
        for name in (_READ, _PUT):
            listen(module, name, _note)


def _note(
    function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
) -> None:
    if package(frame) in ("torch", "torchrepro"):
        return  # `fork_rng` and checkpointed layers put back what they have read
    state = hash(sys.modules["torch"].default_generator.get_state().numpy().tobytes())
    if function.endswith(_READ):
        while len(_states_read) >= _MANY:
            del _states_read[next(iter(_states_read))]
        _states_read[state] = None
    elif state not in _states_read:
        if len(_states_put) <= 1:
            _states_put.append(True)
        _tell_of_late(deliveries())


def _tell_of_late(begun: list[Delivery]) -> None:
    """Say it where a saved state is put back in the middle of an epoch, and was not before it."""
    late = [each for each in begun if each.batches and each.samples_draw and not each.is_over]
    if len(_states_put) == 1 and late and isinstance(late[-1].loading, FollowingLoading):
        say_once(
            f"the program put torch's generator back after {late[-1].batches} batches of an epoch. "
            "Samples draw from a base seed that torch draws as an epoch begins, so they may not be "
            "those of the uninterrupted run: save torch.get_rng_state() before the epoch as well, "
            "and put it back there (or: dataloader.seeding=none)"
        )
