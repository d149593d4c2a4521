"""Fingerprints of the states of the global generators, read again only where they have changed."""

from __future__ import annotations

import marshal
import random
import struct
import sys
from _random import Random as _Words
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import xxhash

from torchrepro.ground.callers import address
from torchrepro.seeding import generators
from torchrepro.trace.fingerprint import arrays, fingerprint

_digest = xxhash.xxh3_128_digest


class GeneratorStates:
    """Reads the states of the global generators, and remembers the last fingerprints.

    The state of a generator on the host is the same as long as its memory is.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}  # memory, and fingerprint of the state
        self._views: dict[str, tuple[Any, Any]] = {}  # an object, and its memory
        self._last: dict[str, str] = {}
        self._built_for: set[str] | None = None

    def read(self) -> Mapping[str, str]:
        """Return a fingerprint of the state of every global generator; draws nothing.

        While none has changed, it is the very same mapping, which nobody may change.
        """
        found = {
            "python": self._of(
                "python",
                self._memory_of_python(),
                lambda: xxhash.xxh3_128_hexdigest(marshal.dumps(random.getstate(), 2)),
            )
        }
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            memory = self._memory_of_numpy(numpy)
            found["numpy"] = self._of("numpy", memory, lambda: _state_of_numpy(numpy))
        state = fingerprint(torch.get_rng_state())
        found["torch"] = self._of("torch", state, state.hex)
        if self._built_for is None:
            self._built_for = generators.built_for()
        if self._built_for or "npu" in vars(torch):  # which is put there later
            for name, module in generators.devices_in_use().items():
                for index in range(module.device_count()):
                    found[f"{name}:{index}"] = fingerprint(module.get_rng_state(index)).hex()
        if found != self._last:
            self._last = found
        return self._last

    def _of(self, name: str, memory: Any, read: Callable[[], str]) -> str:
        known = self._known.get(name)
        if known is None or known[0] != memory:
            known = self._known[name] = memory, read()
        return known[1]

    # Where an object keeps its words is not documented. They are searched for once: where another
    # Python or numpy has them elsewhere, a new object stands for the memory, and the state, which
    # takes long, is read in full each time.

    def _memory_of_python(self) -> Any:
        generator = getattr(random.getstate, "__self__", None)
        if type(generator) is not random.Random or not _python_is_inline():
            return object()
        left = repr(getattr(generator, "gauss_next", None))  # half a pair of normal numbers
        return self._digest_of("python", generator, _words_of_python), left

    def _memory_of_numpy(self, numpy: Any) -> Any:
        words: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
        around = getattr(numpy.get_state, "__self__", None)  # has half a pair of normal numbers
        if (
            type(words).__name__ != "MT19937"
            or type(around) is not numpy.RandomState
            or not _gauss_is_inline(numpy)
        ):
            return object()
        return (
            # A Mersenne twister is 624 words and a position:
            # https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html
            self._digest_of(
                "numpy", words, lambda its: arrays[625 * 4].from_address(its.ctypes.state_address)
            ),
            self._digest_of("around", around, _memory_of),
        )

    def _digest_of(self, name: str, value: Any, find: Callable[[Any], Any]) -> bytes:
        known = self._views.get(name)
        if known is None or known[0] is not value:
            known = self._views[name] = value, find(value)
        return _digest(known[1])


def _state_of_numpy(numpy: Any) -> str:
    state = numpy.get_state(legacy=False)
    own = state["state"]
    digest = xxhash.xxh3_128(own["key"] if "key" in own else repr(own).encode())
    rest = (own.get("pos"), state.get("has_gauss"), state.get("gauss"))
    digest.update(repr(rest).encode())
    return digest.hexdigest()


@cache
def _python_is_inline() -> bool:
    """Whether the words and the position of a generator lie within its object."""
    generator = random.Random(0)  # noqa: S311 - an example
    *words, position = _Words.getstate(generator)
    memory = bytes(_words_of_python(generator))
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


def _words_of_python(generator: Any) -> Any:
    return _memory_of(generator, _Words)


def _memory_of(value: Any, kind: type | None = None) -> Any:
    head = object.__basicsize__
    size = (kind or type(value)).__basicsize__ - head
    return arrays[size].from_address(address(value) + head)
