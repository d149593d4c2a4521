"""Fingerprints the states of the global generators. Only changed states are read again."""

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
    """Reads the states of the global generators and caches the fingerprint of each state.

    A generator on the host is read again only if the bytes of its memory have changed.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}  # memory, and fingerprint of the state
        self._views: dict[str, tuple[Any, Any]] = {}  # a generator, and a view of its memory
        self._last: dict[str, str] = {}
        self._built_for: set[str] | None = None

    def read(self) -> Mapping[str, str]:
        """Return a fingerprint of the state of each global generator. Draws no random numbers.

        Do not change the returned mapping: every call returns it again until a generator changes.
        """
        states = {
            "python": self._of(
                "python",
                self._memory_of_python(),
                lambda: xxhash.xxh3_128_hexdigest(marshal.dumps(random.getstate(), 2)),
            )
        }
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            memory = self._memory_of_numpy(numpy)
            states["numpy"] = self._of("numpy", memory, lambda: _state_of_numpy(numpy))
        state = fingerprint(torch.get_rng_state())
        states["torch"] = self._of("torch", state, state.hex)
        if self._built_for is None:
            self._built_for = generators.built_for()
        if self._built_for or "npu" in vars(torch):  # torch_npu may be imported late
            for name, module in generators.devices_in_use().items():
                for index in range(module.device_count()):
                    states[f"{name}:{index}"] = fingerprint(module.get_rng_state(index)).hex()
        if states != self._last:
            self._last = states
        return self._last

    def _of(self, name: str, memory: Any, read: Callable[[], str]) -> str:
        known = self._known.get(name)
        if known is None or known[0] != memory:
            known = self._known[name] = memory, read()
        return known[1]

    # The memory layout of generators is not documented, so it is checked once. If this Python or
    # numpy has another layout, a new object is returned in place of the memory. It differs from the
    # previous object, so the full state is read every time, which is slow.

    def _memory_of_python(self) -> Any:
        generator = getattr(random.getstate, "__self__", None)
        if type(generator) is not random.Random or not _python_is_inline():
            return object()
        next_normal = repr(getattr(generator, "gauss_next", None))  # unused second of a pair
        return self._digest_of("python", generator, _words_of_python), next_normal

    def _memory_of_numpy(self, numpy: Any) -> Any:
        get_bit_generator = getattr(numpy, "get_bit_generator", None)
        bit_generator: Any = get_bit_generator and get_bit_generator()
        random_state = getattr(numpy.get_state, "__self__", None)  # stores the second normal number
        if (
            type(bit_generator).__name__ != "MT19937"
            or type(random_state) is not numpy.RandomState
            or not _gauss_is_inline(numpy)
        ):
            return object()
        return (
            self._digest_of("numpy", bit_generator, _words_of_numpy),
            self._digest_of("random_state", random_state, _memory_of),
        )

    def _digest_of(self, name: str, value: Any, find: Callable[[Any], Any]) -> bytes:
        known = self._views.get(name)
        if known is None or known[0] is not value:
            known = self._views[name] = value, find(value)
        return _digest(known[1])


def _state_of_numpy(numpy: Any) -> str:
    state = numpy.get_state(legacy=False)
    words = state["state"]
    digest = xxhash.xxh3_128(words["key"] if "key" in words else repr(words).encode())
    rest = (words.get("pos"), state.get("has_gauss"), state.get("gauss"))
    digest.update(repr(rest).encode())
    return digest.hexdigest()


@cache
def _python_is_inline() -> bool:
    """Whether Python stores a generator's words and position in the generator object itself."""
    generator = random.Random(0)  # noqa: S311 - an example
    *words, position = _Words.getstate(generator)
    memory = bytes(_words_of_python(generator))
    return struct.pack(f"=i{len(words)}I", position, *words) in memory


@cache
def _gauss_is_inline(numpy: Any) -> bool:
    """Whether a RandomState stores an unused second normal number in its own memory."""
    random_state = numpy.RandomState(0)
    snapshots = []
    for _ in range(3):
        random_state.standard_normal()
        snapshots.append(bytes(_memory_of(random_state)))
    return snapshots[0] != snapshots[1] != snapshots[2]


def _words_of_python(generator: Any) -> Any:
    return _memory_of(generator, _Words)


def _words_of_numpy(bit_generator: Any) -> Any:
    # A Mersenne twister is 624 words and a position:
    # https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html
    return arrays[625 * 4].from_address(bit_generator.ctypes.state_address)


def _memory_of(value: Any, base: type | None = None) -> Any:
    """Return the memory of an object from the end of its header to the last field of `base`."""
    head = object.__basicsize__
    size = (base or type(value)).__basicsize__ - head
    return arrays[size].from_address(address(value) + head)
