"""A profile that is asked for in a process which `torchrepro run` has put under one already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.errors import ApplyError
from torchrepro.process import inherited
from torchrepro.profile.difference import differences
from torchrepro.started import in_force_now

if TYPE_CHECKING:
    from torchrepro.applier import Applied
    from torchrepro.profile.resolved import Resolved


def agreeing_run(resolved: Resolved, asker: str) -> Applied | None:
    """Return what `torchrepro run` put in force in this process, if it started it.

    Raises `ApplyError` if that was another profile than the one that `asker` asks for.
    """
    outer = inherited()
    if outer is None:
        return None
    if outer.digest == resolved.digest:
        return in_force_now()
    lines = [
        f"  {difference.key}: run {difference.left!r}, {asker} {difference.right!r}"
        for difference in differences(outer, resolved)
    ]
    head = (
        f"this process was started by `torchrepro run {outer.name}`, and {asker} asks for "
        f"'{resolved.name}', which differs in:"
    )
    raise ApplyError("\n".join([head, *lines, "  to do: use the same profile in both places"]))
