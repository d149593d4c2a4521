"""What a step is besides its ops: generators, parameters, gradients."""

from __future__ import annotations

import ctypes
import marshal
import os
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from torchrepro.seeding import devices
from torchrepro.trace.fingerprint import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def random_states() -> Mapping[str, str]:
    """Return a fingerprint of the state of every global generator; draws nothing."""
    found = {"python": xxhash.xxh3_128_hexdigest(marshal.dumps(random.getstate(), 2))}
    if "numpy.random" in sys.modules:
        found["numpy"] = _of_numpy(sys.modules["numpy.random"])
    found["torch"] = fingerprint(torch.get_rng_state()).hex()
    for name, module in devices.in_use().items():
        for index in range(module.device_count()):
            found[f"{name}:{index}"] = fingerprint(module.get_rng_state(index)).hex()
    return found


_numpy_seen: dict[bytes, str] = {}  # the last state, as it lies in memory


def _of_numpy(numpy: Any) -> str:
    """Return a fingerprint of numpy's global generator, which takes long to say its state.

    As long as its memory is what it was, so is the state; only whether half a pair of normal
    numbers is left lies elsewhere, and is seen again with the next number drawn.
    """
    memory = _memory_of_numpy(numpy)
    if memory not in _numpy_seen:
        state = numpy.get_state(legacy=False)
        own = state["state"]
        digest = xxhash.xxh3_128(own["key"] if "key" in own else repr(own).encode())
        rest = (own.get("pos"), state.get("has_gauss"), state.get("gauss"))
        digest.update(repr(rest).encode())
        _numpy_seen.clear()
        _numpy_seen[memory] = digest.hexdigest()
    return _numpy_seen[memory]


def _memory_of_numpy(numpy: Any) -> bytes:
    """Return the state of numpy's global generator as bytes; never the same twice if unknown.

    A Mersenne twister is 624 words and a position:
    https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html
    """
    generator: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":
        return os.urandom(16)
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(parameters: Iterable[Any]) -> Iterator[Any]:
    """Yield the gradients that there are."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad
