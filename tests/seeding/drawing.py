"""Generators of every type, and draws by which a test moves them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st

import torchrepro

if TYPE_CHECKING:
    from collections.abc import Callable

OWN: dict[str, Callable[[], Any]] = {
    "own python": lambda: random.Random(5),
    "own PCG64": lambda: np.random.default_rng(5),
    "own PCG64DXSM": lambda: np.random.Generator(np.random.PCG64DXSM(5)),
    "own MT19937": lambda: np.random.Generator(np.random.MT19937(5)),
    "own Philox": lambda: np.random.Generator(np.random.Philox(5)),
    "own SFC64": lambda: np.random.Generator(np.random.SFC64(5)),
    "own RandomState": lambda: np.random.RandomState(5),
    "own RandomState on PCG64": lambda: np.random.RandomState(np.random.PCG64(5)),
    "own torch": lambda: torch.Generator().manual_seed(5),
}
GLOBAL: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle(list(range(20))),
    "numpy rand": lambda: np.random.rand(3).tolist(),
    "numpy randn": lambda: np.random.randn(1).tolist(),
    "torch rand": lambda: torch.rand(3).tolist(),
    "torch randn": lambda: torch.randn(1).tolist(),
    "torch randn of doubles": lambda: torch.randn(1, dtype=torch.float64).tolist(),
    "torch randperm": lambda: torch.randperm(20).tolist(),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(8)).tolist(),
    "seed python": lambda: random.seed(3),
    "seed numpy": lambda: np.random.seed(3),
    "seed torch": lambda: torch.manual_seed(3).initial_seed(),
}
DRAWS = st.lists(st.sampled_from([*GLOBAL, *OWN]), max_size=12)
own: dict[str, Any] = {}


def register_own() -> None:
    """Register one generator of each type."""
    for name, make in OWN.items():
        own[name] = torchrepro.register_generator(name, make())


def draw(name: str) -> Any:
    """Draw from a generator, or seed a global one."""
    if name in GLOBAL:
        return GLOBAL[name]()
    generator = own[name]
    if isinstance(generator, torch.Generator):
        return torch.randn(1, generator=generator).item()
    if isinstance(generator, random.Random):
        return generator.gauss(0, 1)
    # Numbers of several widths: 32 bits leave half a word behind, normals another normal.
    integers = getattr(generator, "integers", None) or generator.randint
    numbers = integers(0, 100, 1, dtype=np.uint32)
    return [generator.standard_normal(), *numbers, generator.random(1)[0], generator.bytes(5)]
