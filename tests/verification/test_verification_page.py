"""A verification has one page with all of its runs, in the names that the program uses."""

from __future__ import annotations

import sys
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from torchrepro.verification.result import COMPARISONS, verification_page

from ..verdict.browser import PROGRAM, tab

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.verification.result import Verification

RECOMMENDER = """
import random, torch
class Recommender:
    def __init__(self):
        self.users = torch.nn.Embedding(9, 4)
        self.items = torch.nn.Embedding(9, 4)
    def looked_up(self, table, numbers):
        return table(numbers)
    def score(self, numbers):
        return (self.looked_up(self.users, numbers) * self.looked_up(self.items, numbers)).sum(-1)
recommender = Recommender()
optimizer = torch.optim.SGD(
    [*recommender.users.parameters(), *recommender.items.parameters()], lr=0.1
)
for step in range(3):
    scale = torch.tensor(random.SystemRandom().random() if step == 1 else 1.0)
    loss = (recommender.score(torch.arange(4)) * scale).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def verification(forked: None, verified: Callable[..., Verification]) -> Verification:
    """The verification of a program that calls two models of one class."""
    Path("train.py").write_text(RECOMMENDER, encoding="utf-8")
    return verified([sys.executable, "train.py"], runs=4)


@pytest.mark.slow
def test_many_runs_are_on_one_page(verification: Verification, tmp_path: Path) -> None:
    """Each run has a row that links to its comparison; values have the program's names."""
    page = verification_page(verification)
    text = unescape(page)

    assert [verdict.same for verdict in verification.verdicts] == [False] * 3
    assert len(verification.verdicts) <= COMPARISONS
    for number in (2, 3, 4):
        assert text.count(f'href="#run-{number}"') == 1
        assert text.count(f'<article id="run-{number}"') == 1
    assert "runs: 4 runs, run-2, run-3, run-4 differ from run-1" in text
    assert "First elements that differ" in text
    assert "ulp apart" in text
    assert 'title="items"' in text
    assert 'title="users"' in text
    assert "Embedding#2" not in text
    for fact in ("Host", "Commit", "plain (repeatable)", " UTC"):
        assert fact in text
    file = tmp_path / "page.html"
    file.write_text(page, encoding="utf-8")
    if PROGRAM:
        _is_fine_in_a_browser(file, tmp_path / "browser")


def _is_fine_in_a_browser(file: Path, profile: Path) -> None:
    with tab(profile) as browser:
        browser.open(file)
        assert browser.complaints == []
        assert browser.value("document.title").startswith("not the same: diverged at step 1")
        ids = browser.value("[...document.querySelectorAll('[id]')].map(each => each.id)")
        assert len(ids) == len(set(ids))
        browser.value("document.querySelector('#run-3 .map').focus()")
        said = browser.value("document.querySelector('#run-3 .said').textContent")
        assert said.startswith("step 1, ")
