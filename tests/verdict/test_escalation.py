"""Laws of escalation: it goes level by level, and ends."""

from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import torchrepro
from torchrepro.profile.load import load
from torchrepro.verdict.diagnosis import DROPOUT, ESCALATION, LOADER, WORKERS, levels_above
from torchrepro.verdict.value import Kind, Program

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
    first = divergence("gradient", module="layers.2.mlp")  # any op may have computed it
    program = Program(accelerator=accelerator)
    passed: list[str] = []
    overrides: tuple[str, ...] = ()
    while level := next(levels_above(values(profile, *overrides), first, program), None):
        passed.append(level.name)
        overrides += level.overrides

    assert passed == [name for name in NAMES if name in passed]
    assert len(set(passed)) == len(passed)
    on_cpu = NAMES[2:4] if profile != "npu-align" else NAMES[2:3]
    assert set(on_cpu) <= set(passed)
    assert ("the suspect module on the CPU" in passed) == bool(accelerator)


def test_the_levels_of_a_program_without_a_profile_are_all_there_are() -> None:
    """Nothing declared, every level is above, the lowest first."""
    found = list(levels_above({}, divergence("gradient"), Program(accelerator="npu")))

    assert [level.name for level in found] == NAMES


def test_each_level_holds_all_below_it() -> None:
    """The overrides of a level begin with those of the level below."""
    found = list(levels_above({}, divergence("gradient"), Program(accelerator="cuda")))

    for below, above in pairwise(found):
        assert above.overrides[: len(below.overrides)] == below.overrides


@given(
    module=st.text(min_size=1, max_size=12) | st.sampled_from(["0", "1.5", "1e5", "null", "_a_"])
)
def test_whatever_a_module_is_called_its_level_is_a_legal_override(module: str) -> None:
    """Names that the grammar of overrides has no place for become patterns that mean them."""
    first, program = divergence("gradient", module=module), Program(accelerator="cuda")
    *_, top = levels_above({"seed": 1}, first, program)
    found = load("seed-only", top.overrides).resolved.values.get("device", {}).get("modules", {})

    assert all(fnmatchcase(module, pattern) for pattern in found)
    assert bool(found) == (top.name == NAMES[-1])


def test_the_model_as_a_whole_and_what_is_outside_of_modules_are_not_placed() -> None:
    """Without a module's path within the model there is no such level."""
    for module in ("", "Net"):
        first, program = divergence("gradient", module=module), Program(accelerator="cuda")
        assert list(levels_above({}, first, program))[-1].name == NAMES[-2]


def test_what_a_user_decided_op_by_op_counts_as_decided() -> None:
    """A policy per op is not replaced by one for all."""
    declared = values("debug-strict", "device.fallback={ops: {cumsum: native}}")
    found = next(levels_above(declared, divergence("gradient")))

    assert found.overrides == ("dataloader.num_workers=0",)


SEEDS, KERNELS, NO_WORKERS, NO_DROPOUT, HOST, ON_CPU = NAMES


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (divergence("aten::mm", module="net.0"), [KERNELS, ON_CPU]),
        (divergence("aten::native_dropout", module="net.0"), [SEEDS, NO_DROPOUT, HOST]),
        (divergence("DataLoader", Kind.DATA, phase="data"), [SEEDS, NO_WORKERS]),
        (divergence("new tensor", Kind.DATA), [SEEDS]),
        (divergence("SGD.step()", Kind.ARGUMENT, phase="optimizer"), [SEEDS]),
        (divergence("aten::mm", Kind.INPUT), []),
        (divergence("", Kind.RANDOM), [SEEDS, NO_WORKERS, NO_DROPOUT, HOST]),
    ],
)
def test_a_level_is_about_the_kind_of_divergence(first: Any, expected: list[str]) -> None:
    """Deterministic kernels do not help against other data, nor seeds against a kernel."""
    found = levels_above({}, first, Program(accelerator="cuda"))

    assert [level.name for level in found] == expected


def test_no_level_is_proposed_that_the_program_cannot_feel() -> None:
    """Without a loader, dropout and a device, no level and no setting is about them."""
    nothing = list(levels_above({}, divergence("gradient"), Program(features=())))
    text = " ".join(nothing[-1].overrides)

    assert [level.name for level in nothing] == [SEEDS, KERNELS]
    assert not any(word in text for word in ("dataloader", "dropout", "cudnn", "CUBLAS", "HCCL"))
    for feature, name in ((WORKERS, NO_WORKERS), (DROPOUT, NO_DROPOUT)):
        found = levels_above({}, divergence("gradient"), Program(features=(feature, LOADER)))
        assert [level.name for level in found] == [SEEDS, KERNELS, name]


@pytest.mark.parametrize("level", ["step", "module"])
@pytest.mark.parametrize(
    ("workers", "expected"), [(None, set()), (0, {LOADER}), (2, {LOADER, WORKERS})]
)
def test_every_level_of_recording_tells_whether_there_are_loaders(
    tmp_path: Path, level: str, workers: int | None, expected: set[str]
) -> None:
    """Of what only ops show, such as dropout, anything may be there; loaders are known."""
    for name in ("one", "other"):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.ones(4, 2)
        batches = [data] if workers is None else DataLoader(data, num_workers=workers)
        with torchrepro.record(tmp_path / name, level=level):
            for batch in batches:
                model(batch).sum().backward()
                optimizer.step()
    found = torchrepro.compare(tmp_path / "one", tmp_path / "other").program.features

    assert set(found) & {LOADER, WORKERS} == expected
    assert DROPOUT in found
