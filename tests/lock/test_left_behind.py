"""Files of earlier runs are named if they prevent a check from reproducing its lock."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchrepro.checking.check_runs import check_numbers, lock_numbers
from torchrepro.checking.locked_command import LockedCommand
from torchrepro.ground.errors import TraceError

from ..verification.repositories import commit

TRAIN = """
import os, torch
{before}
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range({begin}, 4):
    (model(torch.randn(8, 4)).square().mean() * {scale}).backward()
    optimizer.step()
if "LEAVES" in os.environ:
    {after}
"""
NOTHING = {"before": "", "begin": "0", "scale": "1", "after": "pass"}
REFUSES = {"before": "if 'LEAVES' in os.environ: os.makedirs('out')"}
IS_DONE = {
    "begin": "os.path.exists('n') and int(open('n').read())",
    "after": "open('n', 'w').write('4')",
}
COUNTS = {
    "scale": "(1 + int(open('n').read()) // 2 if os.path.exists('n') else 1)",
    "after": "open('n', 'w').write('3')",
}


@pytest.fixture
def locked(forked, tmp_path, monkeypatch):
    """Lock the results of a program in a repository, and return a check after it left files."""

    def locked(changes):
        folder, ours = tmp_path / "work", [sys.executable, "train.py"]
        commit(folder, {"train.py": TRAIN.format(**NOTHING | changes), ".gitignore": "n\nout\n"})
        monkeypatch.chdir(folder)
        lock_numbers(Path("repro.lock"), "seed-only", (), LockedCommand.here(ours))
        monkeypatch.setenv("LEAVES", "1")
        first = check_numbers(Path("repro.lock"), ours)

        assert first.first is None
        return lambda: check_numbers(Path("repro.lock"), ours)

    return locked


@pytest.mark.parametrize(("changes", "left"), [(REFUSES, "out"), (IS_DONE, "n")])
def test_a_run_that_stops_because_of_files_of_earlier_runs_names_them(locked, changes, left):
    """It refuses its folder, or has nothing left to do: the file that it found is named."""
    check = locked(changes)

    with pytest.raises(TraceError, match=f"without files of earlier runs, such as {left}$"):
        check()


def test_a_file_that_counts_runs_is_named_and_the_cause_stays_unknown(locked):
    """Neither the code nor the environment changed the results; the file is named."""
    who = locked(COUNTS)().who

    assert who.who == "unknown"
    assert "they depend on files that runs leave behind (n)" in who.why
