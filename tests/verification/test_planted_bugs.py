"""A bug is named at the line of the program, with a fix that works, in a verdict of one screen."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from torchrepro.console import height
from torchrepro.verification.result import verification_parts
from torchrepro.verification.verifier import verify

from .bugs import BUGS

pytestmark = pytest.mark.slow
COLUMNS, LINES = 80, 25


def _verified(bug, folder, program, *overrides):
    Path("train.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "train.py"]
    options = {"overrides": overrides, "stress": bug.stress}
    return verify(bug.profile, command, folder=folder, **options)


def _named(bug, found):
    """Return whether a line that is marked in the program is named, as source or in the advice."""
    lines = bug.program.splitlines()
    marked = [number for number, line in enumerate(lines, 1) if line.endswith("# <- here")]
    first, advice = found.verdict.first, found.verdict.advice
    told = f"{first.source}\n{advice.cause}\n{advice.edit}"
    return any(re.search(rf"train\.py:{number}\b", told) for number in marked)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_named_and_its_fix_works(name, tmp_path, request):
    """The verdict names the line and the cause; what it proposes makes the runs the same."""
    bug = BUGS[name]
    if bug.in_forks:
        request.getfixturevalue("forked")
    found = _verified(bug, tmp_path / "found", bug.program)
    advice = found.verdict.advice

    assert not found.same
    assert bug.cause in advice.cause, advice
    assert bug.advice in advice.edit, advice
    assert _named(bug, found), (found.verdict.first.source, advice)
    assert height(COLUMNS, *verification_parts(found)) <= LINES
    assert not advice.closer
    assert not found.next_level or advice.setting in found.next_level.overrides

    assert bug.edit[0] in bug.program
    fixed = _verified(bug, tmp_path / "fixed", bug.program.replace(*bug.edit))
    assert fixed.same, fixed.verdict.first
    if bug.setting:
        assert advice.setting == bug.setting
        assert _verified(bug, tmp_path / "set", bug.program, bug.setting).same
