"""The CPU generators that stand in for a program's own generators of a device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_SEED_AND_OFFSET = 16  # bytes: how the generators of CUDA and of Ascend keep their state
_STEP = 4  # what a device's generator advances by at the least


class HostGenerators:
    """A CPU generator of the same seed for every generator of a device that draws.

    A device's generator is moved on a little at every draw, so that seeding it again with the
    same seed is noticed, and its stand-in starts again too.
    """

    def __init__(self) -> None:
        # Every call sees another Python object for one generator, whose address stays: each is
        # kept alive here, so that no other generator can have that address.
        self._known: dict[int, tuple[Any, Any, bytes]] = {}

    def of(self, generator: Any) -> Any:
        """Return the CPU generator that stands in for `generator`, which may be one itself."""
        if generator.device.type == "cpu":
            return generator
        address = generator._cdata  # noqa: SLF001 - see __init__; torch has no public identity
        _, stand_in, left = self._known.get(address, (None, None, b""))
        if stand_in is None or left != _state(generator):
            stand_in = import_module("torch").Generator().manual_seed(generator.initial_seed())
        self._known[address] = generator, stand_in, _moved_on(generator)
        return stand_in


def _state(generator: Any) -> bytes:
    return bytes(generator.get_state().tolist())


def _moved_on(generator: Any) -> bytes:
    """Advance `generator` by one step, where its state is a seed and an offset; return it."""
    state = _state(generator)
    if len(state) != _SEED_AND_OFFSET:
        return state
    seed, offset = state[:8], int.from_bytes(state[8:], "little") + _STEP
    torch = import_module("torch")
    generator.set_state(torch.tensor([*seed, *offset.to_bytes(8, "little")], dtype=torch.uint8))
    return _state(generator)
