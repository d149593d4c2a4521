"""Fingerprints of the states of the global generators, taken anew only where one has changed."""

from __future__ import annotations

import marshal
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
from torchrepro.trace.fingerprint import arrays, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class GeneratorStates:
    """Reads the states of the global generators, and remembers the last fingerprints.

    The state of a generator on the host is the same as long as its memory is.
    """

    def __init__(self) -> None:
        self._python: tuple[Any, Any, str] | None = None
        self._numpy: tuple[Any, str] | None = None
        self._torch = b"", ""
        self._last: dict[str, str] = {}
        self._found: dict[str, tuple[Any, Any]] = {}
        self._built_for: set[str] | None = None

    def read(self) -> Mapping[str, str]:
        """Return a fingerprint of the state of every global generator; draws nothing.

        While none has changed, it is the very same mapping, which nobody may change.
        """
        found = {"python": self._of_python()}
        if "numpy.random" in sys.modules:
            found["numpy"] = self._of_numpy(sys.modules["numpy.random"])
        found["torch"] = self._of_torch()
        for name, module in self._devices().items():
            for index in range(module.device_count()):
                found[f"{name}:{index}"] = fingerprint(module.get_rng_state(index)).hex()
        if found != self._last:
            self._last = found
        return self._last

    def _devices(self) -> Mapping[str, Any]:
        """Return the accelerators in use; asks no more where torch is built for none."""
        if self._built_for is None:
            self._built_for = generators.built_for()
        if self._built_for or "npu" in vars(torch):  # which is put there later
            return generators.devices_in_use()
        return {}

    def _of_torch(self) -> str:
        state = fingerprint(torch.get_rng_state())
        if state != self._torch[0]:
            self._torch = state, state.hex()
        return self._torch[1]

    def _of_python(self) -> str:
        """Return a fingerprint of Python's generator, whose `getstate` makes 625 numbers."""
        generator = getattr(random.getstate, "__self__", None)
        left = getattr(generator, "gauss_next", None)  # half a pair of normal numbers
        memory = self._digest_of_python(generator)
        known = self._python
        if known is None or known[0] != memory or known[1] is not left:
            digest = xxhash.xxh3_128_hexdigest(marshal.dumps(random.getstate(), 2))
            known = self._python = memory, left, digest
        return known[2]

    def _digest_of_python(self, generator: Any) -> Any:
        """Return a digest of the memory of a generator of Python's; a new value if it is not found.

        Where an object keeps its words is not documented. They are looked for once: where another
        Python has them elsewhere, the state is read in full each time.
        """
        if type(generator) is not random.Random or not _python_is_inline():
            return object()
        return _digest(self._memory("python", generator, _of_python))

    def _of_numpy(self, numpy: Any) -> str:
        """Return a fingerprint of numpy's global generator, whose `get_state` takes long."""
        memory = self._digest_of_numpy(numpy)
        if self._numpy is None or self._numpy[0] != memory:
            state = numpy.get_state(legacy=False)
            own = state["state"]
            digest = xxhash.xxh3_128(own["key"] if "key" in own else repr(own).encode())
            rest = (own.get("pos"), state.get("has_gauss"), state.get("gauss"))
            digest.update(repr(rest).encode())
            self._numpy = memory, digest.hexdigest()
        return self._numpy[1]

    def _digest_of_numpy(self, numpy: Any) -> Any:
        """Return a digest of the memory of numpy's generator; a new value if its kind is unknown.

        A Mersenne twister is 624 words and a position:
        https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html
        Half a pair of normal numbers lies in the object around it, which is not documented and
        therefore tried once.
        """
        words: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
        around = getattr(numpy.get_state, "__self__", None)
        if (
            type(words).__name__ != "MT19937"
            or type(around) is not numpy.RandomState
            or not _gauss_is_inline(numpy)
        ):
            return object()
        return (
            _digest(self._memory("numpy", words, _words_of_numpy)),
            _digest(self._memory("around", around, _memory_of)),
        )

    def _memory(self, name: str, value: Any, find: Callable[[Any], Any]) -> Any:
        """Return the memory of `value`, which is looked up where it is another than last time."""
        known = self._found.get(name)
        if known is None or known[0] is not value:
            known = self._found[name] = value, find(value)
        return known[1]


_digest = xxhash.xxh3_128_digest


@cache
def _python_is_inline() -> bool:
    """Whether the words and the position of a generator lie within its object."""
    generator = random.Random(0)  # noqa: S311 - one to look at
    *words, position = _Words.getstate(generator)
    memory = bytes(_of_python(generator))
    return struct.pack(f"=i{len(words)}I", position, *words) in memory


@cache
def _gauss_is_inline(numpy: Any) -> bool:
    """Whether the object around a generator changes where half a pair of normal numbers is used."""
    around = numpy.RandomState(0)
    seen = []
    for _ in range(3):
        around.standard_normal()
        seen.append(bytes(_memory_of(around)))
    return seen[0] != seen[1] != seen[2]


def _words_of_numpy(words: Any) -> Any:
    return arrays[625 * 4].from_address(words.ctypes.state_address)


def _of_python(generator: Any) -> Any:
    return _memory_of(generator, _Words)


def _memory_of(value: Any, kind: type | None = None) -> Any:
    """Return the memory of what `kind` adds to an object, without what counts its references."""
    head = object.__basicsize__
    size = (kind or type(value)).__basicsize__ - head
    return arrays[size].from_address(address(value) + head)
