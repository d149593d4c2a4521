"""Programs that resume exactly agree, and of faults the state is named that was lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchrepro.relations.relation import relate

from .resume_programs import EXACT, FAULTS

pytestmark = [pytest.mark.usefixtures("own_temporary", "forked"), pytest.mark.slow]


@pytest.mark.parametrize("name", EXACT)
def test_a_program_that_resumes_exactly_agrees(name: str) -> None:
    """It agrees wherever its checkpoint lies, and batches are compared."""
    Path("train.py").write_text(EXACT[name].text(), encoding="utf-8")

    found = relate("resume", None, [sys.executable, "train.py"])

    assert (found.status, found.unknown) == (0, "")
    assert all(side.verdict.compared.steps > 0 for side in found.sides)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_what_was_lost_is_named(name: str) -> None:
    """The first thing that is named is the one that was lost."""
    program, forgotten, words, instead = FAULTS[name]
    Path("train.py").write_text(EXACT[program].text(forgotten, instead), encoding="utf-8")

    found = relate("resume", None, [sys.executable, "train.py"])

    lost = [
        f"{'restored' if each.restored else 'not restored'}: {each}"
        for each in found.deciding.not_restored
    ]
    advice = found.verdict.advice
    assert found.status == 1
    assert words in (lost[0] if lost else advice.cause)
