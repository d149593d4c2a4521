"""Put the inherited profile in force in a process that `torchrepro run` started.

The environment was set before this process began. What is left is set as soon as the library
that holds it has been imported, so that a program which never imports torch pays nothing for it.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from torchrepro.errors import ApplyError, TorchreproError
from torchrepro.imports import AfterImport
from torchrepro.process import inherited

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.applier import Applied
    from torchrepro.planner import Step
    from torchrepro.profile.resolved import Resolved

_OWN_MODULE = {"random": "python", "numpy.random": "numpy"}  # module -> target of its knobs
_MODULES = (*_OWN_MODULE, "torch")  # with torch comes everything else
SEED_PLAN = "seed plan"  # target of the knobs that are torchrepro's own state
_NOT_IN_FORCE = 3
_state: dict[str, Any] = {}


def put_in_force_on_import() -> None:
    """Wait for the imports of random, numpy.random and torch; changes `sys.meta_path`."""
    try:
        _state["resolved"] = inherited()
    except TorchreproError as error:
        _end(error)
    AfterImport(_MODULES, _carry_out).watch()
    for module in _MODULES:
        if module in sys.modules:
            _carry_out(module)


def in_force_now() -> Applied | None:
    """Import what is still waited for, and return the profile that is then wholly in force."""
    if "resolved" not in _state:
        return None
    for module in _MODULES:
        import_module(module)
        _carry_out(module)
    return _applied()


def _carry_out(module: str) -> None:
    """Set the knobs that `module` makes reachable, once, or end the process with status 3."""
    if module in _state:
        return
    _state[module] = True
    try:
        applied = _applied()
        applied.carry_out(_steps_for(module, applied.plan.steps))
    except TorchreproError as error:
        _end(error)
    if module == "torch":
        _record_if_asked()
    if module == "torch" and os.environ.get("TORCHREPRO_FIRST") == str(os.getpid()):
        from torchrepro.tables import announce

        announce(applied.report)
        atexit.register(_tell_what_policies_did)


def _record_if_asked() -> None:
    from torchrepro.trace.request import Request

    request = Request.inherited(os.environ)
    if request is not None:
        from torchrepro.trace.recorder import record_process

        record_process(request, _end)


def _tell_what_policies_did() -> None:
    from torchrepro.tables import announce_effects

    announce_effects(_applied().report)


def _steps_for(module: str, steps: Sequence[Step]) -> list[Step]:
    target = _OWN_MODULE.get(module)
    if target is not None:
        return _steps_of(target, steps)
    others = (*_OWN_MODULE.values(), SEED_PLAN)
    return [step for step in steps if step.knob.target not in others]


def _steps_of(target: str, steps: Sequence[Step]) -> list[Step]:
    return [step for step in steps if step.knob.target == target]


def _end(error: TorchreproError) -> None:
    # An exception could be caught by whoever imports the module; a run that is not under its
    # profile must not go on.
    _leave(error, _NOT_IN_FORCE)


def _refuse(error: TorchreproError) -> None:
    """End a run whose profile turns out not to hold, after what the program has said so far."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stdout.flush()
    _leave(error, error.exit_status)


def _leave(error: TorchreproError, status: int) -> NoReturn:
    sys.stderr.write(f"torchrepro: {error}\n")
    sys.stderr.flush()
    os._exit(status)


def _applied() -> Applied:
    from torchrepro.applier import begin

    if "applied" not in _state:
        resolved: Resolved | None = _state["resolved"]
        if resolved is None:
            raise ApplyError("no profile came with this process")
        _state["applied"] = begin(resolved, "the process was started by `torchrepro run`")
        _state["applied"].refuse = _refuse
        # What all seeds depend on, before the first of them.
        _state["applied"].carry_out(_steps_of(SEED_PLAN, _state["applied"].plan.steps))
    applied: Applied = _state["applied"]
    return applied
