"""Framework programs that resume exactly raise no false alarm."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from torchrepro.trace.request import RecordingRequest
from torchrepro.verification.relations.relation import relate
from torchrepro.verification.runner import RunRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("own_temporary")
RUNS = Path(__file__).with_name("framework_runs.py")
CLEAN: dict[str, tuple[str, dict[str, Any]]] = {
    "Checkpoint": ("own_loop", {}),
    "Lightning": ("lightning", {"every": 7}),
    "Hugging Face Trainer": ("huggingface", {"every": 7}),
    "accelerate": ("accelerate", {"every": 7}),
    "accelerate, StatefulDataLoader": (
        "accelerate",
        {"every": 7, "use_stateful_dataloader": True},
    ),
}


@pytest.fixture(scope="module")
def fork(forks: Callable[..., Any]) -> Iterator[Callable[..., int]]:
    """Run programs in forks of one Python that has the frameworks."""
    with forks(RUNS) as fork:
        yield fork


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", CLEAN)
def test_a_framework_that_resumes_exactly_agrees(name: str) -> None:
    """Killed within an epoch after its checkpoint, it continues bit for bit."""
    program, options = CLEAN[name]

    command = [sys.executable, str(RUNS), program, json.dumps(options)]
    recording = RecordingRequest("", "step")

    related = relate("resume", RunRequest(command, profile="seed-only", recording=recording))

    assert (related.status, [variant.not_restored for variant in related.variants]) == (
        0,
        [()] * len(related.variants),
    )
    assert all(variant.verdict.compared.steps > 1 for variant in related.variants)
