"""A trace has the nondeterministic reads of the program: source, line and step."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchrepro
from torchrepro.seeding.nondeterministic_calls import CLOCK, FORKED
from torchrepro.trace.reader import read_run

from .conftest import Net, Recorder, train

if TYPE_CHECKING:
    from torchrepro.trace.reader import Trace


def program() -> None:
    random.Random(7).random()
    secrets.token_hex()
    torch.arange(3.0).sin()
    for _ in range(2):
        time.time_ns()
        train(Net(), steps=1)
    np.random.default_rng().random()


def _line(part: str) -> str:
    """``file:line`` of the line of the program above that contains `part`."""
    first = program.__code__.co_firstlineno
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    return f"{__file__}:{next(n for n in range(first, 99) if part in lines[n - 1])}"


def _here(trace: Trace) -> list[dict[str, Any]]:
    """The reads by lines of this file."""
    return [read for read in trace.meta["sources"] if read["where"].startswith(__file__)]


def test_a_detailed_trace_has_every_nondeterministic_read(recorded: Recorder) -> None:
    """Each read has its line, its count, the running step and the number of earlier records."""
    trace = recorded(program, detail=True)
    found = _here(trace)

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


def test_a_trace_without_detail_omits_only_addresses_and_hashes(recorded: Recorder) -> None:
    """Libraries read those constantly. Without any reads, the key is absent."""
    own = np.random.default_rng, os.urandom, time.time, id, open, os.path.exists
    found = _here(recorded(lambda: (program(), {id(own): hash("text")})))

    assert [read["name"] for read in found] == [
        "random.Random",
        "secrets.token_hex",
        "time.time_ns",
        "numpy.random.default_rng",
    ]
    assert "sources" not in recorded(lambda: torch.ones(2), detail=True).meta
    assert own == (np.random.default_rng, os.urandom, time.time, id, open, os.path.exists)


def test_the_seed_of_a_generator_is_stored_with_the_line_that_draws_from_it(
    recorded: Recorder,
) -> None:
    """For explicit generators of the program; a loader's are seeded from the global one."""
    own, bare = torch.Generator().manual_seed(5), torch.Generator()

    def draws() -> None:
        train(Net(), steps=1)
        for _ in range(20):
            torch.rand(2, generator=own)
        torch.nn.init.normal_(torch.ones(2), generator=bare)
        list(torch.utils.data.DataLoader(range(4), shuffle=True))
        list(torch.utils.data.DataLoader(range(4), shuffle=True, generator=own))

    trace = recorded(draws)
    first = draws.__code__.co_firstlineno

    assert [
        (read["name"], read["value"], int(read["where"].rpartition(":")[2]) - first, read["step"])
        for read in _here(trace)
    ] == [
        ("torch.Generator.manual_seed", "5", 3, 1),
        ("torch.Generator.manual_seed", str(bare.initial_seed()), 4, 1),
    ]
    assert _here(trace)[0]["record"] == trace.steps[0].records


BEFORE_TORCH = """
import os, time
seed = os.getpid()
import torch
torch.manual_seed(seed)
model = torch.nn.Linear(2, 1)
torch.optim.SGD(model.parameters(), lr=0.1).step()
time.time()
torch.tensor(float(id(seed) % 7)) + 1
"""


def _record_with_run(program: Path, code: str, *options: str) -> Trace:
    program.write_text(code)
    command = ["run", "seed-only", "--record", str(program.with_name("out")), *options, "--"]
    done = subprocess.run(
        [sys.executable, "-m", "torchrepro", *command, sys.executable, str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (trace,) = read_run(program.with_name("out"))
    return trace


@pytest.mark.slow
def test_reads_before_the_import_of_torch_are_recorded(tmp_path: Path) -> None:
    """A detailed recording sees reads from the start of the process, imports torch like any other
    program, and does not record its own reads.
    """
    program = tmp_path / "program.py"
    trace = _record_with_run(program, BEFORE_TORCH, "--detail")

    found = trace.meta["sources"]
    assert [(read["name"], read["step"]) for read in found] == [
        ("os.getpid", -1),
        ("torch.manual_seed", 0),
        ("time.time", 1),
        ("builtins.id", 1),
    ]
    assert [read["where"] for read in found] == [f"{program}:{line}" for line in (3, 5, 8, 9)]
    assert found[1]["value"].isdecimal()
    assert str(program) in trace.meta["modules"]
    assert {"new tensor", "aten::add.Tensor"} <= {site.op for site in trace.sites.values()}


SPAWNED = """
import multiprocessing, random, time
def draws(item):
    time.time_ns()
    random.seed(item) if item < 0 else random.random()
    return item
if __name__ == "__main__":
    import torch
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(draws, range(4))
    torch.ones(2).sum()
"""


@pytest.mark.slow
def test_reads_of_spawned_children_are_in_the_trace_of_their_parent(tmp_path: Path) -> None:
    """Also reads of children without a recording, as they compute nothing with torch."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    boot = Path(torchrepro.__file__).parent / "start" / "boot"
    (tmp_path / "out").mkdir()  # as `torchrepro run` does
    request = json.dumps({"folder": str(tmp_path / "out")})
    variables = {**os.environ, "TORCHREPRO_RECORD": request, "PYTHONPATH": str(boot)}
    subprocess.run([sys.executable, str(program)], env=variables, check=True)
    (trace,) = read_run(tmp_path / "out")

    assert {(read["name"], read["what"], read["where"]) for read in trace.meta["sources"]} == {
        ("time.time_ns", CLOCK, f"{program}:4"),
        ("random.random", FORKED, f"{program}:5"),
    }
    assert {each.name for each in (tmp_path / "out").iterdir()} == {trace.path.name}


@pytest.mark.slow
def test_draws_in_tasks_of_a_pool_are_nondeterministic_even_under_a_profile(tmp_path: Path) -> None:
    """A profile seeds every child in the same way, but timing decides which child runs a task."""
    program = tmp_path / "program.py"
    trace = _record_with_run(program, SPAWNED)

    drawn = {read["where"] for read in trace.meta["sources"] if read["what"] == FORKED}
    assert drawn == {f"{program}:5"}


def test_libraries_of_a_base_environment_do_not_count_as_the_program(tmp_path: Path) -> None:
    """A package of the base Python, or of the user's site-packages, is a library."""
    folders = [tmp_path / name for name in ("site-packages", "dist-packages")]
    for path in (folders[0] / "one.py", folders[1] / "other.py", tmp_path / "program_part.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    code = (
        f"import site; site.addsitedir({str(folders[0])!r}); site.addsitedir({str(folders[1])!r})\n"
        "import one, other, program_part\n"
        "from torchrepro.ground.callers import program_files\n"
        "print(*program_files())"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert done.stdout.split() == [str(tmp_path / "program_part.py")]
