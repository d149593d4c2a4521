"""A separate program that tests the undo from random initial states, as torch reports them.

It changes the settings of torch as programs do. In the end it freezes them, which cannot be
undone.
"""

import os
import random
from contextlib import suppress
from typing import Any

import torch
import torch._inductor.config as inductor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torchrepro
from conftest import values_of_profiles

BACKENDS = torch.backends
FINEST = [
    owner
    for backend in (BACKENDS.cuda, BACKENDS.cudnn, BACKENDS.mkldnn)
    for owner in (getattr(backend, name, None) for name in ("matmul", "conv", "rnn"))
    if hasattr(owner, "fp32_precision")
]
PRECISIONS = st.sampled_from(["ieee", "tf32", "none"])
OPTIONS = [
    name
    for name in ("deterministic", "max_autotune", "use_fast_math", "batch_invariant")
    if hasattr(inductor, name)
]


def world() -> dict[str, Any]:
    """Return the settings that torch reports."""
    readers = {
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled,
        "fills": lambda: torch.utils.deterministic.fill_uninitialized_memory,
        "precision": torch.get_float32_matmul_precision,
        "cuda.matmul.allow_tf32": lambda: BACKENDS.cuda.matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: BACKENDS.cudnn.allow_tf32,
        "finest": lambda: [owner.fp32_precision for owner in FINEST],
        "cudnn": lambda: [
            getattr(BACKENDS.cudnn, name) for name in ("enabled", "benchmark", "deterministic")
        ],
        "mkldnn": lambda: [BACKENDS.mkldnn.enabled, BACKENDS.mkldnn.deterministic],
        "sums": lambda: BACKENDS.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "attention": lambda: [BACKENDS.cuda.flash_sdp_enabled(), BACKENDS.cuda.math_sdp_enabled()],
        "dtype": torch.get_default_dtype,
        "threads": torch.get_num_threads,
        "inductor": lambda: [getattr(inductor, name) for name in OPTIONS],
        "generators": lambda: (torch.get_rng_state().tolist(), random.getstate()),
        "environment": lambda: dict(os.environ),
    }
    return {name: _read(reader) for name, reader in readers.items()}


def _read(reader: Any) -> Any:
    try:
        return reader()
    except RuntimeError:
        return "raises"


def start(data: st.DataObject) -> None:
    """Change some settings, as a program may do before; a frozen setting does not change."""
    boolean = st.booleans()
    moves = [
        lambda: torch.use_deterministic_algorithms(
            data.draw(boolean), warn_only=data.draw(boolean)
        ),
        lambda: torch.set_float32_matmul_precision(
            data.draw(st.sampled_from(["highest", "high", "medium"]))
        ),
        lambda: (
            setattr(data.draw(st.sampled_from(FINEST)), "fp32_precision", data.draw(PRECISIONS))
            if FINEST
            else None
        ),
        lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", data.draw(boolean)),
        lambda: setattr(BACKENDS.cudnn, "allow_tf32", data.draw(boolean)),
        lambda: setattr(BACKENDS.cudnn, "benchmark", data.draw(boolean)),
        lambda: setattr(BACKENDS.mkldnn, "deterministic", data.draw(boolean)),
        lambda: setattr(inductor, data.draw(st.sampled_from(OPTIONS)), data.draw(boolean)),
        lambda: torch.set_num_threads(data.draw(st.integers(1, 3))),
        lambda: BACKENDS.cuda.enable_flash_sdp(data.draw(boolean)),
    ]
    for move in data.draw(st.lists(st.sampled_from(moves), max_size=5)):
        with suppress(RuntimeError):
            move()


@settings(max_examples=80, database=None, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def undo_is_exact(data: st.DataObject) -> None:
    start(data)
    strict = {"guarantee": "aligned"} if data.draw(st.booleans()) else {}
    values = data.draw(values_of_profiles()) | strict
    before = world()
    with suppress(torchrepro.TorchreproError):
        torchrepro.apply(values).restore()
    after = world()
    moved = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert moved == {}


if __name__ == "__main__":
    undo_is_exact()
    BACKENDS.disable_global_flags()
    undo_is_exact()
