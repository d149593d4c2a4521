"""A trace that cannot be written, because a disk is full or a quota is used up."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchrepro.trace.reader import read_run

STEPS = 60
PROGRAM = f"""
import hashlib, torch

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
for step in range({STEPS}):
    model(torch.ones(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
bits = b"".join(bytes(one.detach().numpy()) for one in model.parameters())
print("went on", hashlib.sha256(bits).hexdigest())
"""
LIMITED = ("sh", "-c", 'ulimit -f 390; exec "$@"', "sh")
"""Words that start a command whose files may have so many kilobytes, as a quota has it.

SQLite says of a full disk what it says of that: that it could not write.
"""
RUN = (sys.executable, "-m", "torchrepro", "run", "seed-only")
Execute = Callable[..., Any]


@pytest.fixture
def limited(execute: Execute, tmp_path: Path) -> Execute:
    """Record a program with little disk space, and return the finished process."""
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")

    def limited(*options: str) -> Any:
        recording = (*RUN, "--record", "trace", *options, "--", sys.executable, "train.py")
        done = execute(*LIMITED, *recording)
        print(done.stderr)
        assert done.stderr.count("the trace cannot be written") == 1
        assert "Traceback" not in done.stderr
        (trace,) = read_run(tmp_path / "trace")
        assert all(row.finished for row in trace.steps.values())
        assert all(len(trace.records(row.step)) == row.records for row in trace.steps.values())
        assert 0 < len(trace.steps) < STEPS
        trace.close()
        return done

    return limited


@pytest.mark.slow
def test_a_run_stops_if_its_trace_cannot_be_written(limited: Execute) -> None:
    """It exits with status 3 and the reason, without a traceback; recorded steps survive."""
    done = limited()

    assert done.returncode == 3
    assert "went on" not in done.stdout
    assert "make room, or record into another folder" in done.stderr


@pytest.mark.slow
def test_a_run_continues_unrecorded_on_request(limited: Execute, execute: Execute) -> None:
    """It reports this once and has the result of a run without a recording."""
    done = limited("--on-unwritable", "warn")

    assert done.returncode == 0
    assert done.stdout == execute(*RUN, "--", sys.executable, "train.py").stdout
    assert done.stderr.count("continues without recording") == 1
