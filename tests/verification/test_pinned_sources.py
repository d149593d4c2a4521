"""Pinned sources return the same values in every run, at some lines or in the whole program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrepro.seeding.nondeterministic_calls import CLOCK, THREADS
from torchrepro.verification.perturbations import pinning
from torchrepro.verification.pinned_sources import PINNED_TOGETHER

PROGRAM = """
import os, random, secrets, time, uuid
import concurrent.futures as futures
import numpy as np, torch
print(time.time(), time.monotonic_ns())
print(time.time())
print(os.urandom(3), uuid.uuid4(), secrets.token_hex(2), random.SystemRandom().random())
print(random.Random().random(), np.random.default_rng().random())
print(os.getpid(), os.listdir("."), [entry.name for entry in os.scandir(".")])
class Item: pass
items = [Item() for _ in range(20)]
print([items.index(item) for item in set(items)], id(items) == id(items), id(items))
weights = [torch.ones(1) for _ in range(20)]
print([[w is each for each in weights].index(True) for w in set(weights)], hash("text"))
def late(number):
    time.sleep(random.SystemRandom().random() / 100)
    return number
with futures.ThreadPoolExecutor(4) as pool:
    jobs = [pool.submit(late, number) for number in range(8)]
    print([job.result() for job in futures.as_completed(jobs)])
    done = []
    list(pool.map(lambda number: done.append(late(number)), range(8)))
    print(done)
print(torch.empty(4).tolist(), np.empty(3).tolist())
"""


def _lines(folder: Path, pins: dict[str, list[str]]) -> list[str]:
    variables = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    variables |= pinning(pins).all_variables() if pins else {}
    done = subprocess.run(
        [sys.executable, "-m", "torchrepro", "run", "seed-only", "--", sys.executable, "reads.py"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_pinned_source_is_the_same_in_every_run(tmp_path: Path) -> None:
    """Every source is the same in two runs where it is pinned, and differs elsewhere."""
    for name in ("reads.py", "b", "a", "c"):
        (tmp_path / name).write_text(PROGRAM, encoding="utf-8")
    everything: dict[str, list[str]] = {source: [] for source in PINNED_TOGETHER}
    pinned = [_lines(tmp_path, everything) for _ in range(2)]
    at_a_line = [_lines(tmp_path, {CLOCK: ["reads.py:6"]}) for _ in range(2)]

    assert pinned[0] == pinned[1]
    assert "['a', 'b', 'c', " in pinned[0][4]
    assert at_a_line[0][1] == at_a_line[1][1]
    assert at_a_line[0][0] != at_a_line[1][0]
    assert at_a_line[0][2:5] != at_a_line[1][2:5]


@pytest.mark.slow
def test_a_thread_that_waits_for_its_starter_ends(tmp_path: Path) -> None:
    """A started thread is waited for only for a limited time: a consumer gets its item."""
    (tmp_path / "reads.py").write_text(
        "import queue, threading\n"
        "items, seen = queue.Queue(), []\n"
        "thread = threading.Thread(target=lambda: seen.append(items.get()))\n"
        "thread.start()\n"
        "items.put(7)\n"
        "thread.join()\n"
        "print(seen)\n",
        encoding="utf-8",
    )

    assert _lines(tmp_path, {THREADS: []}) == ["[7]"]
