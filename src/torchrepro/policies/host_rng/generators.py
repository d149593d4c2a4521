"""The CPU generators that stand in for a program's own generators of a device."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

_SEED_AND_OFFSET = 16  # bytes: how the generators of CUDA and of Ascend keep their state
_STEP = 4  # what a device's generator advances by at the least
_GENERATORS, _STATES = 256, 64  # kept at most; a state has 5 kB


@dataclass(slots=True)
class _Pair:
    """A device's generator, the one of the CPU that stands in for it, and where both have been."""

    own: Any
    stand_in: Any
    left: bytes = b""
    """The state in which the device's generator was left."""

    states: OrderedDict[bytes, Any] = field(default_factory=OrderedDict)
    """State of the device's generator -> that of its stand-in, the latest ones."""


class HostGenerators:
    """A CPU generator of the same seed for every generator of a device that draws.

    A device's generator is moved on a little at every draw, so that it is noticed when it is
    seeded again or given back a state it had: its stand-in then goes there too.
    """

    def __init__(self) -> None:
        # Every call sees another Python object for one generator, whose address stays: each is
        # kept alive here, so that no other generator can have that address.
        self._pairs: OrderedDict[int, _Pair] = OrderedDict()

    def of(self, generator: Any) -> Any:
        """Return the CPU generator that stands in for `generator`, which may be one itself."""
        if generator.device.type == "cpu":
            return generator
        pair, state = self._pair(generator), _state(generator)
        if state != pair.left:
            known = pair.states.get(state)
            if known is None:
                pair.stand_in.manual_seed(generator.initial_seed())
            else:
                pair.stand_in.set_state(known)
        _keep(pair.states, state, pair.stand_in.get_state(), _STATES)
        pair.left = _moved_on(generator)
        return pair.stand_in

    def _pair(self, generator: Any) -> _Pair:
        address = generator._cdata  # noqa: SLF001 - see __init__; torch has no public identity
        pair = self._pairs.get(address) or _Pair(generator, import_module("torch").Generator())
        _keep(self._pairs, address, pair, _GENERATORS)
        return pair


def _keep(kept: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Keep `value` as the latest of at most `most`."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


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
