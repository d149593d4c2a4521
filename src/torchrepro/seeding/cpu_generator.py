"""The state of torch's CPU generator as a whole: more than the 32 bits that a seed gives it.

torch publishes how to get and set that state as bytes, but not what the bytes mean: the struct of
`at::CPUGeneratorImpl` (ATen/CPUGeneratorImpl.cpp) holds the seed, then the position in and the 624
words of a Mersenne Twister, then what is left over from normal numbers. `_layout` looks whether
this torch keeps to it; where it does not, seeding raises rather than giving other numbers.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torchrepro.errors import SeedingError
from torchrepro.locks import fork_safe_lock
from torchrepro.messages import Problem

if TYPE_CHECKING:
    import torch

WORDS = 624
STATE_BYTES = 4 * WORDS
_FIRST_WORD = 24  # after the seed, the words left and seeded, and the position
_PROBE_SEED = 20260101
_TOP_BIT = 0x80000000
_lock = fork_safe_lock()  # one buffer serves every caller


def start(generator: torch.Generator, seed: int, material: bytes) -> torch.Generator:
    """Start the CPU `generator` from `material`, 2496 bytes of entropy, and return it.

    `seed` is what its `initial_seed()` then says.
    """
    import torch

    with _lock:
        template, words = _layout()
        template[:8] = _as_words(seed.to_bytes(8, "little"), "u1")
        words[:] = _as_words(material, "<u4")
        words[0] = _TOP_BIT  # the twister never starts from nothing but zeros
        generator.set_state(torch.from_numpy(template))
    return generator


@cache
def _layout() -> tuple[Any, Any]:
    """Return the state of a freshly seeded generator and a view of its words, to be overwritten.

    Raises `SeedingError` if this torch lays the state out in another way.
    """
    import numpy as np
    import torch

    state = torch.Generator().manual_seed(_PROBE_SEED).get_state().numpy().copy()
    words = state[_FIRST_WORD : _FIRST_WORD + 8 * WORDS].view(np.uint64)
    # The same seeding of the same twister in numpy, whose documentation fixes it.
    expected: Any = np.random.RandomState(_PROBE_SEED).get_state()
    if len(words) != WORDS or not np.array_equal(words, np.asarray(expected[1], np.uint64)):
        raise SeedingError(
            Problem(
                "this torch keeps the state of its CPU generator in a way that torchrepro does "
                "not know",
                found=f"torch {torch.__version__}, {len(state)} bytes",
                todo="upgrade torchrepro, or draw from .numpy() instead",
            )
        )
    return state, words


def _as_words(material: bytes, dtype: str) -> Any:
    import numpy as np

    return np.frombuffer(material, dtype)
