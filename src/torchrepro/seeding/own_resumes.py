"""Says where a program goes on within an epoch by itself, and its samples cannot.

Under `dataloader.seeding: auto` the samples of an epoch draw from the base seed with which it
began. A program that puts torch's generator where it was at a step, and not where it was as the
epoch began, is exact in plain Python as long as it loads in the main process: there its samples
draw from that generator. Here they draw from another base seed than in the uninterrupted run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.callers import package
from torchrepro.console import say_once
from torchrepro.seeding.call_listeners import listen, stop_listening
from torchrepro.seeding.loader import FollowingLoading
from torchrepro.seeding.loader_places import deliveries

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

_READ, _PUT = "get_rng_state", "set_rng_state"
_last_read: list[int] = []
_last_put: list[int] = []
"""How many iterations had begun when the program last read, or put, the state of the generator."""


def watch(*, begins: bool) -> None:
    """Hear of the program's reading and putting of torch's generator from now on, or no more."""
    _last_read.clear()
    _last_put.clear()
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
    running = [each for each in deliveries() if not each.is_over]
    number = running[-1].number if running else -1
    if function.endswith(_READ):
        _last_read[:] = [number]
        return
    began_from_it = bool(_last_put)
    _last_put[:] = [number]
    late = [each for each in running if each.batches and each.samples_draw]
    if not late or began_from_it or _last_read[-1:] == [number]:
        return
    delivery = late[-1]
    if isinstance(delivery.loading, FollowingLoading):
        say_once(
            f"the program put torch's generator back after {delivery.batches} batches of an epoch. "
            "Samples draw from a base seed that torch draws as an epoch begins, so they may not be "
            "those of the uninterrupted run: save torch.get_rng_state() before the epoch as well, "
            "and put it back there (or: dataloader.seeding=none)"
        )
