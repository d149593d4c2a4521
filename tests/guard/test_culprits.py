"""Libraries that change knobs when they are imported, with the writes that they really make."""

# ruff: noqa: PT012 - what raises is a step, or the end of the profile

from typing import Any

import pytest

import torchrepro

TF32 = ("ieee", "tf32")
NCCL = "env.NCCL_ALGO"
CULPRITS: tuple[tuple[str, dict[str, tuple[Any, Any]]], ...] = (
    # https://github.com/MouseLand/cellpose/issues/1253
    ("torch.backends.cuda.matmul.allow_tf32 = True", {"backends.cuda.matmul_fp32_precision": TF32}),
    # https://github.com/NVlabs/curobo/issues/720
    ("torch.backends.cudnn.benchmark = True", {"backends.cudnn.benchmark": (False, True)}),
    (
        "torch.backends.cudnn.allow_tf32 = True",
        {
            "backends.cudnn.conv_fp32_precision": TF32,
            "backends.cudnn.rnn_fp32_precision": TF32,
        },
    ),
    (
        'torch.set_float32_matmul_precision("high")',
        {"backends.cuda.matmul_fp32_precision": TF32},
    ),
    (
        "torch.use_deterministic_algorithms(True, warn_only=True)",
        {"backends.torch.deterministic_algorithms": ("error", "warn")},
    ),
    ('os.environ["NCCL_ALGO"] = "^Tree"', {NCCL: ("Ring", "^Tree")}),
    ('os.environ.update(NCCL_ALGO="^Tree")', {NCCL: ("Ring", "^Tree")}),
    ('os.environb[b"NCCL_ALGO"] = b"^Tree"', {NCCL: ("Ring", "^Tree")}),
    ('del os.environ["NCCL_ALGO"]', {NCCL: ("Ring", None)}),
    ('os.environ.pop("NCCL_ALGO")', {NCCL: ("Ring", None)}),
    (
        "import torch._inductor.config; torch._inductor.config.deterministic = False",
        {"backends.torch.inductor_deterministic": (True, False)},
    ),
)
"""Other flags are written as their rows write them, which the law of every knob tries."""

ASKED = "backends.cpu.mkldnn_matmul_fp32_precision=ieee"  # the older names of precision move it too


@pytest.mark.parametrize(("statement", "changed"), CULPRITS, ids=[line for line, _ in CULPRITS])
def test_a_library_that_writes_at_import_is_reported_at_the_next_step(
    statement, changed, importing, step
):
    """The error names every knob, its old and its new value, and the line that wrote it."""
    with (
        pytest.raises(torchrepro.DriftError) as caught,
        torchrepro.apply("debug-strict", ["guard=error", ASKED]) as applied,
    ):
        if not all(applied.report[knob].is_set for knob in changed):
            pytest.skip("this torch has no such knob")
        step()
        place = importing(statement)
        step()

    seen = {drift.knob: drift for drift in caught.value.drift}
    assert {knob: (seen[knob].was, seen[knob].now) for knob in changed} == changed
    assert {(drift.where, drift.when) for drift in seen.values()} == {(place, "before step 1")}
    assert applied.report.drift == caught.value.drift
    lines = str(caught.value).splitlines()
    assert sum(line.startswith(f"{place}: ") for line in lines) == 1
    for knob in changed:
        named = [line for line in lines if f": {knob} = " in line]
        assert len(named) == 1
