"""Fingerprints of the states of the global generators, taken anew only where one has changed."""

from __future__ import annotations

import ctypes
import marshal
import os
import random
import struct
import sys
from _random import Random as _Words
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from torchrepro.callers import address
from torchrepro.seeding import generators
from torchrepro.trace.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping


class GeneratorStates:
    """Reads the states of the global generators, and remembers the last fingerprints."""

    def __init__(self) -> None:
        self._python: tuple[bytes, Any, str] | None = None
        self._numpy: tuple[bytes, str] | None = None

    def read(self) -> Mapping[str, str]:
        """Return a fingerprint of the state of every global generator; draws nothing."""
        found = {"python": self._of_python()}
        if "numpy.random" in sys.modules:
            found["numpy"] = self._of_numpy(sys.modules["numpy.random"])
        found["torch"] = fingerprint(torch.get_rng_state()).hex()
        for name, module in generators.devices_in_use().items():
            for index in range(module.device_count()):
                found[f"{name}:{index}"] = fingerprint(module.get_rng_state(index)).hex()
        return found

    def _of_python(self) -> str:
        """Return a fingerprint of Python's generator, whose `getstate` makes 625 numbers.

        The state is the same as long as its memory is, and what `gauss` has left for its next call.
        """
        generator = getattr(random.getstate, "__self__", None)
        memory = _memory_of_python(generator)
        left = getattr(generator, "gauss_next", None)
        known = self._python
        if known is None or known[0] != memory or known[1] is not left:
            digest = xxhash.xxh3_128_hexdigest(marshal.dumps(random.getstate(), 2))
            known = self._python = memory, left, digest
        return known[2]

    def _of_numpy(self, numpy: Any) -> str:
        """Return a fingerprint of numpy's global generator, whose `get_state` takes long."""
        memory = _memory_of_numpy(numpy)
        if self._numpy is None or self._numpy[0] != memory:
            state = numpy.get_state(legacy=False)
            own = state["state"]
            digest = xxhash.xxh3_128(own["key"] if "key" in own else repr(own).encode())
            rest = (own.get("pos"), state.get("has_gauss"), state.get("gauss"))
            digest.update(repr(rest).encode())
            self._numpy = memory, digest.hexdigest()
        return self._numpy[1]


def _memory_of_python(generator: Any) -> bytes:
    """Return the memory of a generator of Python's; new bytes each time if it is not found.

    Where an object keeps its words is not documented. They are looked for once: where another
    Python has them elsewhere, the state is read in full each time.
    """
    if type(generator) is not random.Random or not _python_is_inline():
        return os.urandom(16)
    return _memory_of(generator, _Words)


@cache
def _python_is_inline() -> bool:
    """Whether the words and the position of a generator lie within its object."""
    generator = random.Random(0)  # noqa: S311 - one to look at
    *words, position = _Words.getstate(generator)
    memory = _memory_of(generator, _Words)
    return struct.pack(f"=i{len(words)}I", position, *words) in memory


def _memory_of_numpy(numpy: Any) -> bytes:
    """Return the memory of numpy's global generator; new bytes each time if its kind is unknown.

    A Mersenne twister is 624 words and a position:
    https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html
    Half a pair of normal numbers lies in the object around it, which is not documented and
    therefore tried once.
    """
    generator: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    around = getattr(numpy.get_state, "__self__", None)
    if (
        type(generator).__name__ != "MT19937"
        or type(around) is not numpy.RandomState
        or not _gauss_is_inline(numpy)
    ):
        return os.urandom(16)
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4) + _memory_of(
        around, numpy.RandomState
    )


@cache
def _gauss_is_inline(numpy: Any) -> bool:
    """Whether the object around a generator changes where half a pair of normal numbers is used."""
    around = numpy.RandomState(0)
    seen = []
    for _ in range(3):
        around.standard_normal()
        seen.append(_memory_of(around, numpy.RandomState))
    return seen[0] != seen[1] != seen[2]


def _memory_of(value: Any, kind: type) -> bytes:
    """Return the memory of what `kind` adds to an object, without what counts its references."""
    head = object.__basicsize__
    return ctypes.string_at(address(value) + head, kind.__basicsize__ - head)
