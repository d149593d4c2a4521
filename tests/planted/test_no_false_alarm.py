"""Runs with equal results are found to be the same, and recording changes no bit."""

import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrepro
from torchrepro.verdict.value import Verdict
from torchrepro.verification.perturbations import EVERYTHING
from torchrepro.verification.verifier import verify

from .reproducible import PROGRAMS
from .small_models import Tensors, items_of, memory_that_is_dirty, perceptron, trained

RUNS = 3
RECORDED_IN_EVERY_WAY = (
    *("transformer, AdamW fused", "becomes nan", "sparse", "attention"),
    *("augmented in workers", "workers that stay", "loaded ahead"),
    *("refilled every step", "clocks in tensors that no op reads", "files of listdir", "nested"),
)
THREADS = ("training on threads",)
WITHOUT_STEPS = (*THREADS, "pool of threads")  # and the second without modules


def _bits(tensors: Tensors) -> list[bytes]:
    return [
        bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()) for tensor in tensors
    ]


def _verified(program: Callable[[], Tensors], folder: Path) -> None:
    """Run a program with and without a recording; all results must be equal."""
    memory_that_is_dirty()
    plain = _bits(program())
    for run in range(RUNS):
        memory_that_is_dirty()
        with torchrepro.record(folder / str(run)):
            recorded = program()
        assert _bits(recorded) == plain
    for run in range(1, RUNS):
        _raises_no_alarm(torchrepro.compare(folder / "0", folder / str(run)))


def _raises_no_alarm(verdict: Verdict) -> None:
    assert verdict.same, verdict.first
    assert verdict.compared.ops > 0
    assert verdict.advice is None


def test_at_least_sixty_programs_are_verified() -> None:
    """The table has as many programs as the documentation promises."""
    assert len(PROGRAMS) >= 60


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")  # what old or new APIs a program uses is not the point
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_reproducible_program_raises_no_alarm(name: str, tmp_path: Path) -> None:
    """Two runs are the same, and have the same bits as a run without a recording."""
    _verified(PROGRAMS[name], tmp_path)


def _compiled() -> Tensors:
    torch.compiler.reset()
    model = perceptron(nn.GELU(), nn.Dropout(0.2))
    compiled = torch.compile(model)
    return trained(model, lambda step: compiled(items_of(step)).square().mean())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # compilers warn of much
def test_compiled_code_stays_compiled_and_raises_no_alarm(tmp_path: Path) -> None:
    """A compiled model computes the same bits with and without a recording."""
    _verified(_compiled, tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("settings", "without_steps"),
    [
        *(
            ({"level": "step"}, ()),
            ({"level": "module"}, THREADS),
            ({"detail": True}, WITHOUT_STEPS),
        ),
        ({"every": 2}, ()),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_no_option_of_a_recording_raises_an_alarm(
    settings: dict[str, Any], without_steps: tuple[str, ...], tmp_path: Path
) -> None:
    """What is recorded of steps or modules alone, or in detail, is the same in every run too."""
    for name in (*RECORDED_IN_EVERY_WAY, *without_steps):
        PROGRAMS[name]()  # what torch does once for a process is not done in one of the runs alone
        for run in ("a", "b"):
            memory_that_is_dirty()
            with torchrepro.record(tmp_path / name / run, **settings):
                PROGRAMS[name]()
        _raises_no_alarm(torchrepro.compare(tmp_path / name / "a", tmp_path / name / "b"))


def _are_called_equal(one: Path, other: Path) -> bool:
    try:
        return torchrepro.compare(one, other).same
    except torchrepro.TraceError as error:
        if "could be compared" in str(error) or "contains no trace" in str(error):
            return True  # one of them has neither modules nor steps to record
        raise


WAYS_TO_RECORD: dict[str, dict[str, Any]] = {
    **{level: {"level": level} for level in ("op", "module", "step")},
    **{f"every {number}": {"every": number} for number in (2, 3)},
    "detail": {"detail": True},
    "statistics": {"statistics": True},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        *("convolutions, SGD", "two models in turns", "saved and loaded", "filled by masks"),
        *("pool of threads", "training on threads", "loaded ahead", "channels last"),
        *("pickled in memory", "cache read whole", "becomes nan", "transformer, AdamW foreach"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_recordings_with_different_options_raise_no_alarm(name: str, tmp_path: Path) -> None:
    """Two recordings of one program are the same, or have nothing in common."""
    for way, settings in WAYS_TO_RECORD.items():
        memory_that_is_dirty()
        with torchrepro.record(tmp_path / way, **settings):
            PROGRAMS[name]()

    for one, other in combinations(WAYS_TO_RECORD, 2):
        assert _are_called_equal(tmp_path / one, tmp_path / other), (one, other)


IN_NEW_PROCESSES = """
import sys

sys.path.insert(0, {!r})
from planted.reproducible import PROGRAMS

for program in PROGRAMS.values():
    program()
"""


@pytest.mark.slow
def test_new_processes_under_stress_raise_no_alarm(tmp_path: Path) -> None:
    """All programs are the same in separate processes under every perturbation."""
    program = tmp_path / "program.py"
    tests = Path(__file__).parents[1]
    program.write_text(IN_NEW_PROCESSES.format(str(tests)), encoding="utf-8")

    command = [sys.executable, "-W", "ignore", str(program)]
    found = verify("debug-strict", command, stress=EVERYTHING, folder=tmp_path / "out")

    _raises_no_alarm(found.verdict)
    assert found.same
    assert all(run.status == 0 for run in found.runs)
    assert found.verdict.compared.steps > len(PROGRAMS)
    assert not found.tried
