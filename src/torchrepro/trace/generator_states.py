"""Fingerprints the states of the global generators."""

from __future__ import annotations

import marshal
import random
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import xxhash

from torchrepro.ground.callers import address
from torchrepro.seeding import generators
from torchrepro.trace.fingerprint import arrays, fingerprint


class GeneratorStates:
    """Reads the states of the global generators. Numpy's is read again only after a draw.

    The function with which numpy returns a state takes 25 microseconds. A digest of the memory
    behind that state takes 1, and shows whether the state has changed. `random.getstate` with its
    digest takes 14 at every reading.
    """

    def __init__(self) -> None:
        self._numpy: tuple[Any, str] = None, ""  # digests of memory, and fingerprint of the state
        self._last: dict[str, str] = {}
        self._built_for: set[str] | None = None

    def read(self) -> Mapping[str, str]:
        """Return a fingerprint of the state of each global generator. Draws no random numbers.

        Do not change the returned mapping: every call returns it again until a generator changes.
        """
        states = {"python": xxhash.xxh3_128_hexdigest(marshal.dumps(random.getstate(), 2))}
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            memory = _memory_of_numpy(numpy)
            if memory is None or memory != self._numpy[0]:
                self._numpy = memory, _state_of_numpy(numpy)
            states["numpy"] = self._numpy[1]
        states["torch"] = fingerprint(torch.get_rng_state()).hex()
        if self._built_for is None:
            self._built_for = generators.built_for()
        if self._built_for or "npu" in vars(torch):  # torch_npu may be imported late
            for name, module in generators.devices_in_use().items():
                for index in range(module.device_count()):
                    states[f"{name}:{index}"] = fingerprint(module.get_rng_state(index)).hex()
        if states != self._last:
            self._last = states
        return self._last


def _state_of_numpy(numpy: Any) -> str:
    state = numpy.get_state(legacy=False)
    words = state["state"]
    digest = xxhash.xxh3_128(words["key"] if "key" in words else repr(words).encode())
    rest = (words.get("pos"), state.get("has_gauss"), state.get("gauss"))
    digest.update(repr(rest).encode())
    return digest.hexdigest()


def _memory_of_numpy(numpy: Any) -> tuple[bytes, bytes] | None:
    """Return digests of the memory of numpy's global generator and of its second normal number.

    The layout of that memory is not documented, so it is checked once. Returns None for another
    layout or another generator.
    """
    get_bit_generator = getattr(numpy, "get_bit_generator", None)
    bit_generator: Any = get_bit_generator and get_bit_generator()
    random_state = getattr(numpy.get_state, "__self__", None)  # stores the second normal number
    if (
        type(bit_generator).__name__ != "MT19937"
        or type(random_state) is not numpy.RandomState
        or not _gauss_is_inline(numpy)
    ):
        return None
    # A Mersenne twister is 624 words and a position:
    # https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html
    words = arrays[625 * 4].from_address(bit_generator.ctypes.state_address)
    return xxhash.xxh3_128_digest(words), xxhash.xxh3_128_digest(_memory_of(random_state))


@cache
def _gauss_is_inline(numpy: Any) -> bool:
    """Whether a RandomState stores an unused second normal number in its own memory."""
    random_state = numpy.RandomState(0)
    snapshots = []
    for _ in range(3):
        random_state.standard_normal()
        snapshots.append(bytes(_memory_of(random_state)))
    return snapshots[0] != snapshots[1] != snapshots[2]


def _memory_of(value: Any) -> Any:
    """Return the memory of an object from the end of its header to its last field."""
    head = object.__basicsize__
    return arrays[type(value).__basicsize__ - head].from_address(address(value) + head)
