"""What every knob of the profiles in force should read, and what it reads instead."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.fp32_precision import Fp32Precision
from torchrepro.knobs.knob import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchrepro.knobs.knob import Knob

PER_THREAD = frozenset({"backends.cpu.num_threads", "backends.torch.inductor_deterministic"})
"""Knobs of which other threads may read another value although nobody changed it: a thread keeps
the number of threads with which it first used torch, and inductor's settings are context variables
(https://github.com/pytorch/pytorch, torch/utils/_config_module.py)."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One knob, and what it read when a profile had set it."""

    knob: Knob
    value: Any
    thread: int
    """The only thread in which the knob can be read, or 0 for any."""

    def drifted_to(self) -> Any:
        """Return what the knob reads now if that is something else, and else `HOLDS`."""
        if self.thread and self.thread != threading.get_ident():
            return HOLDS
        now = reading(self.knob)
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
    per_thread = knob.scope is Scope.THREAD or knob.name in PER_THREAD
    return Expected(knob, reading(knob), threading.get_ident() if per_thread else 0)


def reading(knob: Knob) -> Any:
    """Return what `knob` reads, or in words why it can no longer be read."""
    try:
        now = knob.access.read()
        return _FULL if now == "none" and isinstance(knob.access, Fp32Precision) else now
    except Exception as error:  # noqa: BLE001 - a state that cannot be read any more has drifted
        return f"unreadable: {error}"


def innermost(layers: Iterable[Mapping[str, Expected]]) -> tuple[Expected, ...]:
    """Return what counts of `layers`, outermost first: the last one that names a knob decides."""
    deciding: dict[str, Expected] = {}
    for layer in layers:
        deciding.update(layer)
    return tuple(deciding.values())


def in_loader_worker() -> bool:
    """Whether this process loads data for another: what it sets is its own affair."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None
