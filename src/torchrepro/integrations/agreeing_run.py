"""A profile that is asked for in a process which `torchrepro run` has put under one already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.bootstrap import in_force_now
from torchrepro.process_state import outer_run

if TYPE_CHECKING:
    from torchrepro.applier import Applied
    from torchrepro.profile.resolved import Resolved


def agreeing_run(resolved: Resolved, asker: str) -> Applied | None:
    """Return what `torchrepro run` put in force in this process, if it started it.

    Raises `ApplyError` if that was another profile than the one that `asker` asks for.
    """
    return in_force_now() if outer_run(resolved, asker) is not None else None
