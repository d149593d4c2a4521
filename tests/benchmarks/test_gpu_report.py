"""The report of a GPU works: it prints every table for the host too."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_report_prints_every_table() -> None:
    """One command prints the costs of tensors, of steps beside other tools, and a profile."""
    line = "-m tests.benchmarks.gpu_report --device cpu --seconds 2 --size 1000000 tiny_ops"
    done = subprocess.run(
        [sys.executable, *line.split()],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert not done.returncode, done.stderr
    titles = ("the host's time for 16 numbers", "512 tensors", "a tensor of", "a step of tiny_ops")
    for title in (*titles, "where the host's time goes"):
        assert f"\n{title}" in done.stdout
