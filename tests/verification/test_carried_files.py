"""A file that one run leaves and the next one reads is known, with both lines of the program."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from torchrepro.seeding.uncontrolled import IF_THERE
from torchrepro.verification.carried_files import CarriedFile, carried

IMPORTS = "import os, sqlite3, subprocess, numpy as np"
CACHE = """
if not os.path.exists("cache.npy"):
    np.save("cache.npy", np.ones((16, 4), "float16"))  # written
    batch = batch + 1
else:
    batch = torch.from_numpy(np.load("cache.npy")).float()  # read
subprocess.run(["cp", "cache.npy", "copy.npy"], check=True) if step == 2 else None
np.load("copy.npy") if step == 0 and os.path.exists("copy.npy") else None  # copied
np.load("data.npy") if step == 0 else None
with sqlite3.connect("kept.db") as database:  # kept
    database.execute("create table if not exists seen (step int)")
np.save("result.npy", batch), np.load("result.npy")
"""


@pytest.mark.usefixtures("forked")
def test_what_a_run_reads_as_the_one_before_it_left_it_is_known(training, verified, tmp_path):
    """Neither data from before nor what a run itself has written counts, and no writer is needed.

    Once runs agree, the file is one of their reads.
    """
    np = pytest.importorskip("numpy")
    np.save("data.npy", np.ones(1))
    time.sleep(0.05)
    command = training("\n    ".join(CACHE.strip().splitlines()), IMPORTS)
    program = Path("train.py").absolute()
    lines = {
        mark: f"{program}:{number}"
        for number, line in enumerate(program.read_text().splitlines(), 1)
        for mark in ("written", "read", "copied", "kept")
        if line.endswith(f"# {mark}")
    }

    differ = verified(command, closer=False)
    agree = verified(command, folder=tmp_path / "again")

    assert not differ.same
    assert carried(*differ.runs) == (
        CarriedFile(f"{program.parent}/cache.npy", lines["written"], lines["read"]),
        CarriedFile(f"{program.parent}/copy.npy", "", lines["copied"]),
        CarriedFile(f"{program.parent}/kept.db", lines["kept"], lines["kept"]),
    )
    assert agree.same
    assert {
        (read.name, read.where) for read in agree.verdict.program.reads if read.what == IF_THERE
    } == {("cache.npy", lines["read"]), ("copy.npy", lines["copied"])}
