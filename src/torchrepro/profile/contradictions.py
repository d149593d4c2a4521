"""Values that are legal one by one and cannot hold together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.knobs.catalogue import knobs_by_name, other_names
from torchrepro.knobs.fallback_value import waits_for_refusal
from torchrepro.messages import shown
from torchrepro.profile.composition import flatten
from torchrepro.profile.needs import NEEDS, folded

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved


def contradictions(resolved: Resolved) -> list[tuple[str, str, str]]:
    """Return (key, value, reason) for everything in `resolved` that cannot hold together."""
    leaves = flatten(resolved.values)
    found = [
        (key, shown(leaves[key]), f"contradicts guarantee: {resolved.guarantee}; {row.because}")
        for row in NEEDS
        for key in leaves
        if resolved.guarantee in row.guarantees
        and row.knob in (key, *(knob.name for knob in other_names().get(key, ())))
        and folded(leaves[key]) in row.broken_by
    ]
    found += _two_names(leaves)
    found += _npu_modes(leaves)
    found += _idle_fallback(leaves)
    return found


def _two_names(leaves: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the keys of `leaves` that name a piece of state which another key names too."""
    found = []
    for key in leaves:
        knob = knobs_by_name().get(key)
        for alias in knob.aliases if knob else ():
            twice_listed = alias in knobs_by_name() and key < alias
            if alias in leaves and (twice_listed or alias not in knobs_by_name()):
                found.append((alias, shown(leaves[alias]), f"is another name of `{key}`; set one"))
    return found


def _idle_fallback(leaves: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the fallback if the profile sees to it that no op ever falls back."""
    fallback = leaves.get("device.fallback")
    algorithms = leaves.get("backends.torch.deterministic_algorithms")
    if fallback is None or algorithms not in ("none", "warn") or not waits_for_refusal(fallback):
        return []
    return [
        (
            "device.fallback",
            shown(fallback),
            f"with deterministic_algorithms: {algorithms} no op raises, and none would fall back",
        )
    ]


def _npu_modes(leaves: dict[str, Any]) -> list[tuple[str, str, str]]:
    level = leaves.get("backends.npu.deterministic_level")
    algorithms = leaves.get("backends.torch.deterministic_algorithms")
    if level is None or algorithms is None or (level > 0) == (algorithms != "none"):
        return []
    return [
        (
            "backends.npu.deterministic_level",
            shown(level),
            f"and deterministic_algorithms: {algorithms} undo each other: the level moves "
            "torch's own flag along",
        )
    ]
