"""Comparison of two recorded runs: are they the same, and if not, where do they diverge?"""

from __future__ import annotations

from torchrepro.ground.console import Part, parts
from torchrepro.verdict.value import Verdict


@parts.register(Verdict)
def _(verdict: Verdict) -> tuple[Part, ...]:
    """Return the parts that show a verdict in a terminal, also if it comes from a pickle."""
    from torchrepro.verdict.render import verdict_parts

    return verdict_parts(verdict)
