"""Common bugs that make the runs of a program differ, each with what `verify` must report.

The line to be named, or one of several, ends with ``# <- here``.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = """
model = torch.nn.Linear({width}, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    loss = model({batch}).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

COUNTED = """
with open("runs", "ab") as runs:
    runs.write(b".")
    run = runs.tell()
"""
"""Numbers the runs of a program. Threads that take their turns by chance now and then take the same
ones in two runs, so what chance decides elsewhere is decided here by the number of the run.
"""


def _trained(before: str, batch: str, width: int) -> str:
    return before + TRAIN.format(batch=batch, width=width)


@dataclass(frozen=True, slots=True)
class Bug:
    """A program with a bug, what the verdict says of it, and the fix that it proposes."""

    program: str
    cause: str
    """A part of the likely cause; with a `|`, one of two, where chance decides what shows it."""
    has_edit: bool = False
    """Whether the verdict offers an edit of one line."""
    profile: str = "debug-strict"
    stress: tuple[str, ...] = ()
    in_forks: bool = True
    """Whether forks of one Python show it: they have its hash seed and its addresses."""


RACE = _trained(
    COUNTED
    + """
import threading, time, torch
total, lock, begun = torch.ones(4), threading.Lock(), threading.Event()
def add(number):
    for _ in range(8):
        time.sleep(0.0005)
        with lock:
            total.index_add_(0, torch.tensor([1]), total[1:2] * (0.1 + number))  # <- here
            begun.set()
def add_up():
    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for number in range(run, run + 4):
        threads[number % 4].start()
        begun.wait()
    for thread in threads:
        thread.join()
add_up()
""",
    *("total.log()", 4),
)
LEARNING_RATE = """
import time, torch
def rate(step):
    return 0.1 / (step + 1 + time.time() % 1)  # <- here
weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.Adam([weight], lr=0.1)
for step in range(3):
    weight.square().mean().backward()
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    optimizer.step()  # <- here
"""
UNINITIALIZED_MEMORY = _trained(
    """
import torch
def batch():
    rows = torch.empty(64, 4096)
    rows[:60] = torch.randn(60, 4096)
    return rows
""",
    *("batch().nan_to_num().clamp(-9, 9)", 4096),
).replace("mean()", "mean()  # <- here")
CUSTOM_KERNEL = _trained(
    """
import os, torch
@torch.library.custom_op("lab::sum_by_atomics", mutates_args=())
def sum_by_atomics(values: torch.Tensor) -> torch.Tensor:
    order = list(range(len(values)))
    order.sort(key=lambda place: os.urandom(4))
    total = torch.zeros(64)
    for place in order:
        total = total + values[place]
    return total
data = torch.logspace(-4, 4, 50 * 64).reshape(50, 64)
""",
    *("sum_by_atomics(data * (step + 1))", 64),
).replace(".square().mean()", ".square().mean()  # <- here")
STALE_BUFFER = _trained(
    COUNTED
    + """
import threading, numpy as np, torch
buffer = np.zeros((256, 4), "float32")
def refill(step, half_done, go_on):
    for row in range(256):
        if row == run:
            half_done.set()
            go_on.wait()
        buffer[row] = step + row + 1
def batch(step):
    half_done, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=refill, args=(step, half_done, go_on))  # <- here
    thread.start()  # <- here
    half_done.wait()
    rows = torch.tensor(buffer)  # <- here
    go_on.set()
    thread.join()
    return rows
""",
    *("batch(step)", 4),
)
ORDER = _trained(
    COUNTED
    + """
import threading, time, torch
done = []
def work(number):
    time.sleep(0.05 * ((number + run) % 3))
    done.append(float(number))
threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()  # <- here
for thread in threads:
    thread.join()
""",
    *("torch.tensor(done)", 3),
)
POOL = _trained(
    COUNTED
    + """
import multiprocessing, time, numpy as np, torch
np.random.seed(0)
def noise(number):
    time.sleep(0.05 * ((number + run) % 2))
    return np.random.rand()  # <- here
with multiprocessing.get_context("fork").Pool(2) as pool:  # <- here
    drawn = pool.map(noise, range(6), chunksize=1)
""",
    *("torch.tensor(drawn).float()", 6),
)
CHANCE = _trained(
    """
import multiprocessing, random, torch
def noise(number):
    return random.random()  # <- here
with multiprocessing.get_context("fork").Pool(2) as pool:
    drawn = pool.map(noise, range(6), chunksize=1)
""",
    *("torch.tensor(drawn)", 6),
)

BUGS = {
    "race under a lock": Bug(RACE, "The timing of threads: threading.Thread.start at train.py:"),
    "learning rate from the clock": Bug(LEARNING_RATE, "The clock: time.time at train.py:"),
    "memory that nobody wrote": Bug(
        UNINITIALIZED_MEMORY,
        "emory that nothing|reads uninitialized memory",  # a pinned source, or the perturbation
        has_edit=True,
        profile="seed-only",
        stress=("memory contents",),
        in_forks=False,
    ),
    "a kernel of one's own": Bug(CUSTOM_KERNEL, "Entropy of the operating system: os.urandom"),
    "results as threads end": Bug(
        ORDER, "The timing of threads: threading.Thread.start at train.py:", has_edit=True
    ),
    "draws of a forked pool": Bug(
        POOL, "Random numbers in a child process: numpy.random.rand at train.py:", has_edit=True
    ),
    "draws of children that seed themselves": Bug(
        CHANCE, "Random numbers in a child process: random.random at train.py:", has_edit=True
    ),
    # Its edit is no remedy: joined at once, the thread waits for ever, and the trial is ended.
    "a stale buffer": Bug(
        STALE_BUFFER,
        "The timing of threads: threading.Thread.start at train.py:",
        in_forks=False,
    ),
}
