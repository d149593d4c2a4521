"""Two profiles compared by what they come to on this machine.

A key that a profile leaves out has the value that is in effect here without a profile, so a
default that is spelt out is no difference. How likely a difference changes numbers follows from
what the setting is for, and from whether anything here reads it.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torchrepro.imports import import_torch
from torchrepro.knobs.knob import MissingState
from torchrepro.lock.diff import Comparison, Difference, Impact, compare, impact_of, ordered
from torchrepro.lock.snapshot import snapshot_of
from torchrepro.process_state import absent_hardware
from torchrepro.profile.resolved import DEFAULTS, knobs_for_key

if TYPE_CHECKING:
    from collections.abc import Collection

DECIDES_NUMBERS = (
    *("seed", "streams*", "ranks*", "dropout", "device.rng", "device.modules*"),
    *("dataloader.seeding", "*precision*", "*_hf32", "*tf32*", "*FPMATH*", "*fp16_accumulation"),
    *("*default_dtype", "*num_threads", "*NUM_THREADS", "*CPU_CAPABILITY", "*MAX_CPU_ISA"),
)
"""Keys that decide numbers themselves. Others choose between kernels that may round alike."""


def differences_of(left: str, right: str) -> Comparison:
    """Return in what two profiles, manifests, locks or runs differ, each given by name or path.

    Two profiles are compared by what they come to on this machine, which imports torch. Raises
    `ProfileError` or `TraceError` for what cannot be read.
    """
    one, two = snapshot_of(left), snapshot_of(right)
    found = compare(one, two)
    return effective(found) if {one.kind, two.kind} == {"profile"} else found


def effective(found: Comparison) -> Comparison:
    """Return what is left of the differences of two profiles here, and how likely it matters."""
    if not found.differences:
        return found
    import_torch()
    absent = absent_hardware()
    left = [
        replace(each, here=_impact_here(each, absent))
        for each in found.differences
        if each.section != "profile" or not _is_default_spelt_out(each)
    ]
    return replace(found, differences=ordered(left))


def _is_default_spelt_out(found: Difference) -> bool:
    values = (found.left, found.right)
    if None not in values:
        return False
    spelt_out = next(value for value in values if value is not None)
    return bool(spelt_out == _without_profile(found.key))


def _without_profile(key: str) -> Any:
    """Return what a process here has for a key that its profile leaves out, None if nothing."""
    if key in DEFAULTS:
        return DEFAULTS[key]
    knobs = [knob for knob in knobs_for_key(key) if knob.name == key]
    if not knobs or knobs[0].moves_on or knobs[0].variable or not knobs[0].loaded:
        return None
    try:
        return knobs[0].access.read()
    except MissingState:
        return None


def _impact_here(found: Difference, absent: Collection[str]) -> Impact:
    general = impact_of(found.section, found.key)
    if found.section != "profile" or general is not Impact.CHANGES:
        return general
    if found.key in DEFAULTS:
        return Impact.SHOULD_NOT  # it decides what is refused, not what is computed
    knobs = knobs_for_key(found.key)
    if knobs and all(knob.hardware in absent for knob in knobs):
        return Impact.NOTHING_HERE
    decides = any(fnmatchcase(found.key, pattern) for pattern in DECIDES_NUMBERS)
    return Impact.CHANGES if decides else Impact.MAY
