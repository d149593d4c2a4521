"""A bug is named with its program line and a fix that works, in a verdict of one screen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from torchrepro.ground.console import as_text
from torchrepro.verdict.render import LINES
from torchrepro.verification.result import verification_parts
from torchrepro.verification.verifier import verify

from .bugs import BUGS

pytestmark = pytest.mark.slow


def _verified(bug, folder, program):
    Path("train.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "train.py"]
    return verify(bug.profile, command, folder=folder, stress=bug.stress)


def _named(bug, verification):
    """Return whether a line that is marked in the program is named, as source or in the advice."""
    lines = bug.program.splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# <- here")]
    first, advice = verification.verdict.first, verification.verdict.advice
    said = f"{first.source}\n{advice.cause}\n{advice.edit}"
    return any(re.search(rf"train\.py:{number}\b", said) for number in marked)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_named_and_its_remedy_works(name, tmp_path, request):
    """The verdict names the line and the cause; its advice, followed as printed, fixes the bug."""
    bug = BUGS[name]
    if bug.in_forks:
        request.getfixturevalue("forked")
    verification = _verified(bug, tmp_path / "found", bug.program)
    advice = verification.verdict.advice
    lines = as_text(*verification_parts(verification)).splitlines()

    assert not verification.same
    assert any(cause in advice.cause for cause in bug.cause.split("|")), advice
    assert _named(bug, verification), (verification.verdict.first.source, advice)
    assert len(lines) <= LINES
    assert not advice.closer
    assert (bool(advice.edit), advice.command) == (bug.has_edit, "")

    if advice.edit:
        number = int(advice.edit.where.rpartition(":")[2])
        text = bug.program.splitlines()
        assert text[number - 1].strip() == advice.edit.before
        text[number - 1] = text[number - 1].replace(advice.edit.before, advice.edit.after)
        fixed = _verified(bug, tmp_path / "fixed", "\n".join(text) + "\n")
        assert fixed.same, fixed.verdict.first
