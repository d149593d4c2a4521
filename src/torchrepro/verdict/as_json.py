"""The verdict as JSON, for programs and pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrepro.verdict.ladder import Rung
    from torchrepro.verdict.value import Verdict


def verdict_json(verdict: Verdict, rung: Rung | None = None) -> dict[str, Any]:
    """Return a verdict as plain JSON values, with what to try next, if that is known."""
    return {**verdict.to_json(), "next_rung": _of_rung(rung)}


def _of_rung(rung: Rung | None) -> dict[str, Any] | None:
    if rung is None:
        return None
    return {"name": rung.name, "overrides": list(rung.overrides), "why": rung.why}
