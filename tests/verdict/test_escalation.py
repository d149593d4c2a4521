"""Laws of escalation: it goes level by level, and ends."""

from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.profile.load import load
from torchrepro.verdict.diagnosis import ESCALATION, EscalationLevel, levels_above, next_level

from .verdicts import divergence

NAMES = [step.name for step in ESCALATION]


def values(profile: str, *overrides: str) -> Any:
    """Return the values of a profile as it is resolved."""
    return load(profile, overrides).resolved.values


@pytest.mark.parametrize("profile", ["seed-only", "train-fast", "debug-strict", "npu-align"])
@pytest.mark.parametrize("accelerator", ["", "cuda"])
def test_escalation_ends_at_the_top_and_never_comes_back_to_a_level(
    profile: str, accelerator: str
) -> None:
    """With a level's overrides in the profile, the next one is the next higher that acts here."""
    first = divergence(module="layers.2.mlp")
    passed: list[str] = []
    overrides: tuple[str, ...] = ()
    while level := next_level(values(profile, *overrides), first, accelerator):
        passed.append(level.name)
        overrides += level.overrides

    assert passed == [name for name in NAMES if name in passed]
    assert len(set(passed)) == len(passed)
    on_cpu = NAMES[2:4] if profile != "npu-align" else NAMES[2:3]
    assert set(on_cpu) <= set(passed)
    assert ("the suspect module on the CPU" in passed) == bool(accelerator)


def test_the_levels_of_a_program_without_a_profile_are_all_there_are() -> None:
    """Nothing declared, every level is above, the lowest first."""
    found = list(levels_above({}, divergence(), "npu"))

    assert [level.name for level in found] == NAMES


def test_each_level_holds_all_below_it() -> None:
    """The overrides of a level begin with those of the level below."""
    found = list(levels_above({}, divergence(), "cuda"))

    for below, above in pairwise(found):
        assert above.overrides[: len(below.overrides)] == below.overrides


@given(
    module=st.text(min_size=1, max_size=12) | st.sampled_from(["0", "1.5", "1e5", "null", "_a_"])
)
def test_whatever_a_module_is_called_its_level_is_a_legal_override(module: str) -> None:
    """Names that the grammar of overrides has no place for become patterns that mean them."""
    *_, top = levels_above({"seed": 1}, divergence(module=module), "cuda")
    found = load("seed-only", top.overrides).resolved.values.get("device", {}).get("modules", {})

    assert all(fnmatchcase(module, pattern) for pattern in found)
    assert bool(found) == (top.name == NAMES[-1])


def test_the_model_as_a_whole_and_what_is_outside_of_modules_are_not_placed() -> None:
    """Without a module's path within the model there is no such level."""
    for module in ("", "Net"):
        assert list(levels_above({}, divergence(module=module), "cuda"))[-1].name == NAMES[-2]


def test_what_a_user_decided_op_by_op_counts_as_decided() -> None:
    """A policy per op is not replaced by one for all."""
    declared = values("debug-strict", "device.fallback={ops: {cumsum: native}}")
    found: EscalationLevel | None = next_level(declared, divergence())

    assert found is not None
    assert found.overrides == ("dataloader.num_workers=0",)
