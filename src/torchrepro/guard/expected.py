"""What a knob should read, as a profile in force has set it, and what it reads instead."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.fp32_precision import Fp32Precision
from torchrepro.knobs.inductor import InductorVariable
from torchrepro.knobs.knob import Scope

if TYPE_CHECKING:
    from torchrepro.knobs.knob import Knob

PER_THREAD = frozenset({"backends.cpu.num_threads"})
"""Knobs of which other threads may read another value although nobody changed it: a thread keeps
the number of threads with which it first used torch."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a knob read after the last write to anything that was seen, and the line that set it."""

    now: Any
    place: str = ""


@dataclass(eq=False, slots=True)
class Expected:
    """One knob, and what it read when a profile had set it."""

    knob: Knob
    value: Any
    thread: int
    """The only thread in which the knob can be read, or 0 for any."""

    written: Written

    @property
    def readable_here(self) -> bool:
        """Whether what the present thread reads is what is held."""
        return self.thread in (0, threading.get_ident())

    def drifted_to(self) -> Any:
        """Return what the knob reads now, or `HOLDS` if that is as expected."""
        now = reading(self.knob) if self.readable_here else self.value
        return HOLDS if now == self.value else now


_FULL = "ieee"
"""What an unset float32 precision comes to: torch asks only whether it is tf32 or bf16
(https://github.com/pytorch/pytorch, aten/src/ATen/Context.cpp). Leaving
``torch.backends.cudnn.flags`` unsets those of cuDNN."""


class _Holds:
    """The answer of a knob that is as expected."""

    __slots__ = ()


HOLDS = _Holds()


def expected(knob: Knob) -> Expected:
    """Return what is to be expected of `knob` from now on: what it reads in this thread."""
    # Inductor's options are context variables (torch/utils/_config_module.py of pytorch).
    per_thread = (
        knob.scope is Scope.THREAD
        or knob.name in PER_THREAD
        or isinstance(knob.access, InductorVariable)
    )
    now = reading(knob)
    return Expected(knob, now, threading.get_ident() if per_thread else 0, Written(now))


def reading(knob: Knob) -> Any:
    """Return what `knob` reads, or in words why it can no longer be read."""
    try:
        now = knob.access.read()
        return _FULL if now == "none" and isinstance(knob.access, Fp32Precision) else now
    except Exception as error:  # noqa: BLE001 - a state that cannot be read any more has drifted
        return f"unreadable: {error}"
