"""What the host's generators are drawn for at present: the program, an order, a sample."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem
from torchrepro.seeding.generators import HostState, host_state, seed_host

if TYPE_CHECKING:
    import numpy as np

    from torchrepro.seeding.streams import Stream


class _Draw:
    """What the host's generators are drawn for now."""

    __slots__ = ("generator", "stream")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.generator: np.random.Generator | None = None


class _Present(threading.local):
    """What this thread draws for; empty outside of loading."""

    def __init__(self) -> None:
        self.draws: list[_Draw] = []


_here = _Present()


def sample_rng() -> np.random.Generator:
    """Return the numpy `Generator` of the sample that is being loaded, ready to draw from.

    Within one sample it goes on where the last call left it; within `collate_fn` it is that of
    the batch. Raises `SeedingError` where no sample is being loaded by a seeded DataLoader.
    """
    if not _here.draws:
        raise SeedingError(
            Problem(
                "no sample is being loaded by a seeded DataLoader",
                found="sample_rng()",
                todo="call it in the dataset of a DataLoader made with dataloader_kwargs, or "
                "under a profile with dataloader.seeding: auto",
            )
        )
    draw = _here.draws[-1]
    if draw.generator is None:
        draw.generator = draw.stream.part(b"ready").numpy()
    return draw.generator


def is_loading() -> bool:
    """Whether a sample or a batch is being loaded in this process now."""
    return bool(_here.draws)


def draw_from(stream: Stream) -> None:
    """Start the host's generators and `sample_rng` from `stream`, until told otherwise."""
    _here.draws[:] = [_Draw(stream)]
    seed_host(stream)


class Position:
    """A place in the host's generators that is not the program's: entered, moved, and left."""

    def __init__(self) -> None:
        self._inside, self._draws = host_state(), list(_here.draws)
        self._outside: list[tuple[HostState, list[_Draw]]] = []

    def __enter__(self) -> None:
        self._outside.append((host_state(), list(_here.draws)))
        self._inside.put_back()
        _here.draws[:] = self._draws

    def __exit__(self, *_: object) -> None:
        self._inside, self._draws = host_state(), list(_here.draws)
        leave(self._outside.pop())


def leave(outside: tuple[HostState, list[_Draw]]) -> None:
    """Go back to what `enter` returned."""
    outside[0].put_back()
    _here.draws[:] = outside[1]


def enter() -> tuple[HostState, list[_Draw]]:
    """Return where the program stands in the host's generators, for `leave`."""
    return host_state(), list(_here.draws)


def worker_stream(stream: Stream, worker: int) -> Stream:
    """Return what worker number `worker` of an epoch draws from outside of samples."""
    return stream.part(b"worker/%d" % worker)
