"""Calls of the program that seed a global generator: honoured, and recorded with their line."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.callers import package, place
from torchrepro.console import say
from torchrepro.messages import shown
from torchrepro.policies.policy import count
from torchrepro.seeding.streams import present_worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

FUNCTIONS = (
    ("random", "seed"),
    ("numpy.random", "seed"),
    ("torch", "manual_seed"),
    ("torch", "seed"),
    ("torch.random", "manual_seed"),
    ("torch.random", "seed"),
    ("torch.cuda", "manual_seed"),
    ("torch.cuda", "manual_seed_all"),
    ("torch.npu", "manual_seed"),
    ("torch.npu", "manual_seed_all"),
    ("torch.xpu", "manual_seed"),
    ("torch.xpu", "manual_seed_all"),
    ("torch.mps", "manual_seed"),
)
"""Every function that seeds a global generator: module, name."""

DEVICES = ("torch.cuda", "torch.npu", "torch.xpu", "torch.mps")
"""Modules whose functions seed nothing but generators of a device."""

_OWN = ("torchrepro", "torch")  # their calls are not calls of the program
_MANY = 1000


@dataclass(slots=True)
class SeedingCall:
    """A place from which the program seeded a global generator itself."""

    function: str
    value: str
    """The seed as it was given the last time."""

    where: str
    """``file:line`` of the program, or of the library that called, where no program did."""

    times: int = 0

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.function}({self.value}) at {self.where}{often}"


_calls: dict[tuple[str, str], SeedingCall] = {}
_originals: dict[tuple[str, str], Any] = {}


@dataclass(frozen=True, slots=True)
class SeedingCalls:
    """The knob under which seeding calls of the program are recorded, until its undo."""

    def read(self) -> Any:
        return None

    def holds(self, value: Any) -> bool:
        return bool(_originals)

    def write(self, value: Any) -> None:
        _calls.clear()
        note_calls_of_new_modules()

    def save(self) -> Any:
        return bool(_originals), dict(_calls)

    def restore(self, saved: Any) -> None:
        watched, calls = saved
        _calls.clear()
        _calls.update(calls)
        if not watched:
            for (module, name), (wrapper, original) in _originals.items():
                if getattr(sys.modules[module], name, None) is wrapper:
                    setattr(sys.modules[module], name, original)
            _originals.clear()


def seeding_calls() -> tuple[SeedingCall, ...]:
    """Return the places from which the program has seeded a generator under the present seed."""
    return tuple(_calls.values())


def note_calls() -> Callable[[], None]:
    """Record seeding calls of the program from now on; return the undo."""
    access = SeedingCalls()
    saved = access.save()
    access.write(None)
    return partial(access.restore, saved)


def note_calls_of_new_modules() -> None:
    """Record seeding calls to libraries that were loaded since as well."""
    for module, name in FUNCTIONS:
        _wrap(module, name)


def given_by_program() -> frozenset[str]:
    """Return the functions to which the program has given a seed; one left to chance is no seed."""
    of_chance = ("", shown(None))
    return frozenset(call.function for call in _calls.values() if call.value not in of_chance)


def _wrap(module: str, name: str) -> None:
    owner = _module(module)
    original = getattr(owner, name, None)
    if original is None or (module, name) in _originals:
        return
    # One function under two names keeps one wrapper, which pickle then finds under the first.
    same = (wrapper for wrapper, wrapped in _originals.values() if wrapped == original)
    wrapper = next(same, None) or _recording(module, name, original)
    _originals[module, name] = wrapper, original
    setattr(owner, name, wrapper)


def _recording(module: str, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    compiling = _compiling_check(module)

    @wraps(original)
    def seed(*args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs)
        if not compiling() and _originals:  # a name that was imported under a profile outlives it
            _note(f"{module}.{name}", (*args, *kwargs.values()), sys._getframe(1))  # noqa: SLF001
        return done

    seed.__module__, seed.__qualname__ = module, name
    return seed


def _compiling_check(module: str) -> Callable[[], bool]:
    """Return the check for torch.compile tracing, which cannot follow a look at the stack."""
    if module.partition(".")[0] != "torch":
        return bool
    check: Callable[[], bool] = sys.modules["torch"].compiler.is_compiling
    return check


def _module(name: str) -> Any:
    """Return the module `name` if its package is loaded; never imports another library."""
    package, _, rest = name.partition(".")
    if package not in sys.modules:
        return None
    return sys.modules.get(name) or (import_module(name) if rest == "random" else None)


def _note(function: str, values: tuple[Any, ...], frame: FrameType) -> None:
    if package(frame) in _OWN:
        return
    where = place(frame)
    seeds = ", ".join(shown(value) for value in values)
    if function.startswith(DEVICES) and _host_draws():
        count("device.rng", f"{function}({seeds})", "without effect: the host draws", where)
    if len(_calls) < _MANY or (function, where) in _calls:
        call = _calls.setdefault((function, where), SeedingCall(function, "", where))
        call.value, call.times = seeds, call.times + 1
        if call.times == 1 and present_worker() == 0:
            # What a worker records stays in the worker, so the first of them says it.
            say(f"seeded by the program itself, in workers: {call}")


def _host_draws() -> bool:
    policy = sys.modules.get("torchrepro.policies.host_rng")  # not loaded: not in force
    return policy is not None and policy.policy.is_on
