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


def test_a_newer_checkpoint_that_was_passed_over_is_named() -> None:
    """One that reads the first of its checkpoints agrees, and it is said what is done twice."""
    text = EXACT["rotating checkpoints"].text().replace("files[-1]", "files[0]")
    text = text.replace("step_{i - 7}", "step_{i - 99}")
    Path("train.py").write_text(text, encoding="utf-8")

    found = relate("resume", None, [sys.executable, "train.py"])

    newer = "went on from step_4.pt; step_12.pt is newer: 8 steps are done twice"
    assert found.status == 0
    assert [newer in side.said for side in found.sides] == [False, True]


def test_it_cannot_tell_where_no_checkpoint_shows_that_it_went_on_from_it() -> None:
    """Nothing was read, no parameter is as in any of several checkpoints: it has no place."""
    text = EXACT["rotating checkpoints"].text()
    Path("train.py").write_text(text, encoding="utf-8")
    anew = text.replace("if files", "if 0").replace("range(first", "range(9")
    Path("anew.py").write_text(anew, encoding="utf-8")
    resume = f"{sys.executable} anew.py {{checkpoint}}"

    found = relate("resume", None, [sys.executable, "train.py"], resume_command=resume)

    assert found.sides[1].status == 4
    assert "no parameter is as it was" in found.sides[1].unknown


def test_no_line_says_that_nothing_later_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compared by what they end with: of ops that differ later nothing is known."""
    Path("train.py").write_text(EXACT["scheduler"].text("s"), encoding="utf-8")

    found = relate("resume", None, [sys.executable, "train.py"])

    monkeypatch.setenv("TORCHREPRO_VERBOSE", "1")
    assert found.status == 1
    assert "nothing later differs" not in str(found)


def test_what_is_drawn_after_the_restoring_is_named_where_nothing_else_draws() -> None:
    """The generator is restored, then draws the data: both lines are named."""
    data = "x = torch.randn(24, 4, 3)\n"
    head, loop = EXACT["torch's generator"].text().replace(data, "").split("for i in")
    text = f"{head}{data}for i in{loop}".replace("torch.randn(2)", "1")
    Path("train.py").write_text(text, encoding="utf-8")
    lines = text.splitlines()
    restored, drawn = (
        next(n for n, line in enumerate(lines, start=1) if word in line)
        for word in ("set_rng_state", "x = ")
    )

    found = relate("resume", None, [sys.executable, "train.py"])

    (lost,) = found.deciding.not_restored
    assert (lost.name, lost.restored) == ("torch", f"train.py:{restored}")
    assert lost.what == f"then drawn from at train.py:{drawn} before the first batch"
