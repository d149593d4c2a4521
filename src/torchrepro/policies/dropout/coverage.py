"""Which random ops still ran while dropout was zeroed, and which code called them.

A mask that a module writes by hand looks like any other random number: nothing is assumed about
it, it is named. Code that inductor has compiled draws inside kernels of its own, unseen here.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.callers import package
from torchrepro.policies.dropout.ops import PROBABILITIES, WITH_KERNELS
from torchrepro.policies.effects import count
from torchrepro.policies.interposed import Place, interpose, random_ops, withdraw

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

POLICY = "dropout"
_inside = threading.local()


def watch() -> None:
    """Begin to count the random ops that run; changes torch's dispatcher."""
    for op in filter(_draws_whatever_happens, random_ops()):
        interpose(op, Place.RANDOM_OPS, partial(_count, op.name()))


def unwatch() -> None:
    """Count no longer."""
    for op in random_ops():
        withdraw(op, Place.RANDOM_OPS)


def _draws_whatever_happens(op: Any) -> bool:
    """Whether a call of `op` draws: dropout, and what drops inside, draws nothing when zeroed."""
    packet = op.name().partition("::")[2].partition(".")[0]
    arguments = {argument.name for argument in op._schema.arguments}  # noqa: SLF001 - the schema has no public reader
    return packet not in WITH_KERNELS and arguments.isdisjoint(PROBABILITIES)


def _count(name: str, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if getattr(_inside, "op", False):
        return proceed(*args, **kwargs)  # a random op that is made of another is one
    _inside.op = True
    try:
        count(POLICY, name, "drew random numbers", _caller(sys._getframe(1)))  # noqa: SLF001 - the stack has no other door
        return proceed(*args, **kwargs)
    finally:
        _inside.op = False


def _caller(frame: FrameType | None) -> str:
    """Return ``module.function:line`` of the nearest caller outside of torch."""
    while frame is not None:
        # Code that torch generates belongs to no module.
        if package(frame) not in ("torch", "torchrepro", ""):
            return f"{frame.f_globals['__name__']}.{frame.f_code.co_qualname}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch itself"
