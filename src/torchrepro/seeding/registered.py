"""Generators of a program's own that snapshots and scopes cover like the global ones."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem, shown

if TYPE_CHECKING:
    from collections.abc import Callable

Generator = TypeVar("Generator")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of generator: how to recognise it, and its state as a value and back."""

    name: str
    is_one: Callable[[Any], bool]
    state: Callable[[Any], Any]
    set_state: Callable[[Any, Any], None]


def _is(module: str, path: str) -> Callable[[Any], bool]:
    """Return a test for instances of a class of `module`, which is never imported for it."""

    def check(value: Any) -> bool:
        kind: Any = sys.modules.get(module)
        for part in path.split("."):
            kind = getattr(kind, part, None)
        return kind is not None and isinstance(value, kind)

    return check


def _set_numpy(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


KINDS = (
    Kind(
        "python",
        lambda value: isinstance(value, Random),
        lambda generator: generator.getstate(),
        lambda generator, state: generator.setstate(state),
    ),
    Kind(
        "numpy",
        _is("numpy", "random.Generator"),
        lambda generator: generator.bit_generator.state,
        _set_numpy,
    ),
    Kind(
        "numpy_legacy",
        _is("numpy", "random.RandomState"),
        lambda generator: generator.get_state(legacy=False),
        lambda generator, state: generator.set_state(state),
    ),
    Kind(
        "torch",
        _is("torch", "Generator"),
        lambda generator: generator.get_state(),
        lambda generator, state: generator.set_state(state),
    ),
)
"""Every kind of generator that can be registered."""

_registered: dict[str, tuple[Kind, Any]] = {}


def register_generator(name: str, generator: Generator) -> Generator:
    """Have snapshots and `isolated_rng` cover `generator` under `name`, and return it.

    It is a `random.Random`, a numpy `Generator` or `RandomState`, or a `torch.Generator`. A second
    call with the same name replaces the first. The generator is kept alive. Raises `SeedingError`
    for anything else.
    """
    if not isinstance(name, str) or not name:
        raise SeedingError(
            Problem("not a name for a generator", found=shown(name), legal="any text")
        )
    kind = next((kind for kind in KINDS if kind.is_one(generator)), None)
    if kind is None or not _has_state(kind, generator):
        raise SeedingError(
            Problem(
                "not a generator that can be registered",
                key=name,
                found=shown(generator),
                legal="random.Random, numpy.random.Generator or RandomState, torch.Generator",
            )
        )
    _registered[name] = kind, generator
    return generator


def _has_state(kind: Kind, generator: Any) -> bool:
    """Whether `generator` has a state: `random.SystemRandom` looks like one that does."""
    try:
        kind.state(generator)
    except NotImplementedError:
        return False
    return True


def unregister_generator(name: str) -> None:
    """Forget the generator registered under `name`; raises `SeedingError` if there is none."""
    if name not in _registered:
        raise SeedingError(
            Problem(
                "no generator is registered under this name",
                found=shown(name),
                legal=", ".join(sorted(_registered)),
            )
        )
    del _registered[name]


def registered() -> dict[str, tuple[Kind, Any]]:
    """Return every registered generator with its kind, by name."""
    return dict(_registered)


@dataclass(frozen=True, slots=True)
class RegisteredStates:
    """The state of every registered generator."""

    states: dict[str, tuple[Kind, Any, Any]]

    def put_back(self) -> None:
        """Make this the state again, of every generator even if one of them raises."""
        with ExitStack() as all_of_them:
            for kind, generator, state in self.states.values():
                all_of_them.callback(kind.set_state, generator, state)


def registered_states() -> RegisteredStates:
    """Return the state of every registered generator."""
    return RegisteredStates(
        {
            name: (kind, generator, kind.state(generator))
            for name, (kind, generator) in _registered.items()
        }
    )
