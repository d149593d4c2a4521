"""A trace says what the program read that no seed controls: what, where, when."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import torchrepro
from torchrepro.trace.reader import read_run

from .conftest import Net, Recorder, train

if TYPE_CHECKING:
    from collections.abc import Callable


def program() -> None:
    random.Random(7).random()
    secrets.token_hex()
    torch.arange(3.0).sin()
    for _ in range(2):
        time.time_ns()
        train(Net(), steps=1)
    np.random.default_rng()


def _line(part: str) -> str:
    """``file:line`` of the program above that holds `part`."""
    first = program.__code__.co_firstlineno
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    return f"{__file__}:{next(n for n in range(first, 99) if part in lines[n - 1])}"


def test_a_trace_in_detail_holds_every_source(recorded: Recorder) -> None:
    """Each read has its line, its count, the running step and the records taken by then."""
    trace = recorded(program, detail=True)
    found: list[dict[str, Any]] = trace.meta["sources"]

    assert [(read["name"], read["value"]) for read in found] == [
        ("random.Random", "7"),
        ("secrets.token_hex", None),
        ("time.time_ns", None),
        ("numpy.random.default_rng", None),
    ]
    assert [read["where"] for read in found] == [
        _line(part) for part in ("Random(7)", "token_hex", "time_ns", "default_rng")
    ]
    assert [read["times"] for read in found] == [1, 1, 2, 1]
    assert [read["step"] for read in found] == [0, 0, 0, 2]
    assert [read["record"] for read in found[:3]] == [0, 0, 2]
    assert found[3]["record"] == sum(len(list(trace.records(step))) for step in trace.steps)
    assert all(read["what"] and read["instead"] for read in found)


def test_a_plain_trace_holds_draws_and_seeds_and_none_that_is_empty(recorded: Recorder) -> None:
    """What is read all the time is left to recordings in detail; without a read there is no key."""
    own = np.random.default_rng, os.urandom, time.time, id
    found = recorded(program).meta["sources"]

    assert [read["name"] for read in found] == [
        "random.Random",
        "secrets.token_hex",
        "numpy.random.default_rng",
    ]
    assert "sources" not in recorded(lambda: torch.ones(2), detail=True).meta
    assert own == (np.random.default_rng, os.urandom, time.time, id)


BEFORE_TORCH = """
import os, time
seed = os.getpid()
import torch
torch.manual_seed(seed)
model = torch.nn.Linear(2, 1)
torch.optim.SGD(model.parameters(), lr=0.1).step()
time.time()
"""


def test_what_is_read_before_torch_is_imported_is_seen(
    fork_python: Callable[..., Any], tmp_path: Path
) -> None:
    """A recording in detail of a process sees reads from its start, and its own are none."""
    boot = tmp_path / "boot"
    boot.symlink_to(Path(torchrepro.__file__).parent / "boot")
    request = f'{{"folder": "{tmp_path}/out", "detail": true}}'
    (tmp_path / "program.py").write_text(BEFORE_TORCH)
    done = fork_python("program.py", env={"TORCHREPRO_RECORD": request, "PYTHONPATH": str(boot)})
    (trace,) = read_run(tmp_path / "out")
    found = trace.meta["sources"]

    assert done.returncode == 0, done.stderr
    assert [(read["name"], read["step"]) for read in found] == [
        ("os.getpid", -1),
        ("torch.manual_seed", 0),
        ("time.time", 1),
    ]
    assert [int(read["where"].rpartition(":")[2]) for read in found] == [3, 5, 8]
    assert found[1]["value"].isdecimal()


def test_torch_is_imported_while_every_source_is_watched(tmp_path: Path) -> None:
    """A new process that is recorded in detail imports torch as any other, and is recorded."""
    program = "key = id(tuple())\nimport torch\ntorch.tensor(float(key % 7)) + 1"
    command = ["run", "seed-only", "--record", str(tmp_path), "--detail", "--"]
    command += [sys.executable, "-c", program]
    done = subprocess.run(
        [sys.executable, "-m", "torchrepro", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert done.returncode == 0, done.stderr
    (trace,) = read_run(tmp_path)
    assert {"new tensor", "aten::add.Tensor"} <= {site.op for site in trace.sites.values()}
