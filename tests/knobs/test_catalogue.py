"""The catalogue: one row per setting, and each row has everything that torchrepro needs."""

import os
import re
from typing import Any

import pytest
import torch

import torchrepro
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.knobs.knob import PHASES, Knob, MissingState
from torchrepro.knobs.variables import refusal
from torchrepro.profile.resolved import OPAQUE, knobs_for_key
from torchrepro.profile.schema import Profile
from torchrepro.reporting.outcomes import Outcome
from torchrepro.reporting.process_state import LATCHES
from torchrepro.seeding.global_seeds import SeedQueue

ROWS = [pytest.param(knob, id=knob.name) for knob in CATALOGUE]

ASKED_FOR = {
    "seed": "python numpy torch cuda npu mps xpu",
    "env": (
        "PYTHONHASHSEED CUBLAS_WORKSPACE_CONFIG CUDA_LAUNCH_BLOCKING NCCL_ALGO NCCL_PROTO "
        "HCCL_DETERMINISTIC LCCL_DETERMINISTIC CLOSE_MATMUL_K_SHIFT "
        "ATB_MATMUL_SHUFFLE_K_ENABLE ATB_LLM_LCOC_ENABLE TASK_QUEUE_ENABLE "
        "ASCEND_LAUNCH_BLOCKING OMP_NUM_THREADS MKL_CBWR ATEN_CPU_CAPABILITY "
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO TORCHINDUCTOR_DETERMINISTIC "
        "TORCHINDUCTOR_MAX_AUTOTUNE"
    ),
    "backends.npu": (
        "deterministic_level jit_compile conv_allow_hf32 matmul_allow_hf32 cube_math_type "
        "allow_internal_format compatible_impl"
    ),
    "backends.torch": (
        "deterministic_algorithms fill_uninitialized_memory inductor_deterministic "
        "opt_einsum_enabled opt_einsum_strategy"
    ),
    "backends.cudnn": (
        "enabled benchmark benchmark_limit deterministic conv_fp32_precision rnn_fp32_precision"
    ),
    "backends.cuda": (
        "matmul_fp32_precision allow_fp16_reduced_precision_reduction "
        "allow_bf16_reduced_precision_reduction flash_sdp mem_efficient_sdp math_sdp "
        "cudnn_sdp preferred_linalg_library preferred_blas_library"
    ),
    "backends.cpu": "mkldnn_deterministic mkldnn_matmul_fp32_precision num_threads",
}


def test_the_catalogue_has_every_technique_in_common_use() -> None:
    """Every technique that people use today is a row."""
    asked = {f"{section}.{name}" for section, names in ASKED_FOR.items() for name in names.split()}

    assert asked - knobs_by_name().keys() == set()


@pytest.mark.parametrize("knob", ROWS)
def test_every_row_is_complete(knob: Knob) -> None:
    """A row has a summary, a cost, a source and a latch.

    Its examples are legal values, and all are different.
    """
    examples = knob.legal.examples()

    assert knob.summary.endswith((".", ")"))
    assert knob.cost
    assert re.match(r"https://\S+\.\S+", knob.source)
    assert knob.door in {"", *LATCHES} & PHASES.keys()
    assert knob.legal.words
    assert examples
    assert [value for value in examples if knob.legal.complaint(value)] == []
    assert len({repr(value) for value in examples}) == len(examples)


def test_names_are_unique_and_each_state_has_one_row() -> None:
    """No two rows have the same name or set the same state."""
    names = [knob.name for knob in CATALOGUE]
    variables = [knob.variable for knob in CATALOGUE if knob.variable]

    assert len(names) == len(set(names))
    assert len(variables) == len(set(variables))


def test_environment_comes_first_then_flags_then_seeds() -> None:
    """Knobs are set in the order of the catalogue: variables, then flags, then seeds."""
    kinds = [0 if k.variable else 2 if k.key == "seed" else 1 for k in CATALOGUE]

    assert sorted(kinds) == kinds


def test_every_key_of_the_schema_reaches_a_row() -> None:
    """Every key that a profile accepts sets a knob."""
    not_knobs = {"schema", "name", "description", "guarantee", "on_late", "requires", "env_extra"}
    keys = list(_leaf_keys(Profile, ""))

    assert {key for key in keys if not knobs_for_key(key)} == not_knobs


def _leaf_keys(model: Any, prefix: str) -> Any:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
            yield from _leaf_keys(field.annotation, f"{key}.")
        else:
            yield key
    assert OPAQUE  # the one mapping that is a single value is a key as well


@pytest.mark.parametrize("knob", ROWS)
def test_reading_and_restoring_change_nothing_and_need_no_hardware(knob: Knob, world: Any) -> None:
    """A row can be read on any machine: it returns a value, or raises `MissingState`.

    Restoring a state directly after saving it changes nothing.
    """
    before = world()
    try:
        knob.access.read()
        knob.access.restore(knob.access.save())
    except MissingState as missing:
        text = str(missing)
        assert text

    assert before == world()


def test_inductor_gets_its_flag_without_being_imported() -> None:
    """If inductor has a deterministic mode, its variable is set; otherwise nothing is set."""
    with torchrepro.apply("debug-strict") as applied:
        row = applied.report["backends.torch.inductor_deterministic"]
        variable = os.environ.get("TORCHINDUCTOR_DETERMINISTIC")

    assert variable == (None if row.outcome is Outcome.UNSUPPORTED else "1")


@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
def test_every_generator_starts_from_the_seed(seed: int) -> None:
    """The seed determines the random numbers of Python, numpy and torch."""
    import random

    import numpy as np

    drawn = []
    for _ in range(2):
        with torchrepro.apply({"seed": seed}):
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))

    assert drawn[0] == drawn[1]


def test_an_undo_before_device_init_removes_the_queued_seed() -> None:
    """The undo restores the queue of torch for a device that is not in use yet."""
    module = torch.cuda
    tracker = getattr(module, "_lazy_seed_tracker", None)
    before = list(module._queued_calls), dict(vars(tracker)) if tracker else None
    saved = SeedQueue.of(module)

    module.manual_seed_all(7)
    changed = (list(module._queued_calls), dict(vars(tracker)) if tracker else None) != before
    restored = saved.put_back(module)

    assert changed
    assert restored
    assert before == (list(module._queued_calls), dict(vars(tracker)) if tracker else None)


@pytest.mark.parametrize("knob", [p for p in ROWS if p.values[0].variable])
def test_no_variable_of_the_catalogue_is_refused(knob: Knob) -> None:
    """No variable is in the catalogue and in the list of refused variables."""
    assert refusal(knob.variable) == ""
