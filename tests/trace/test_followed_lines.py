"""Following lines does not change the program, and finds the line where a difference began."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import torchrepro
from torchrepro.trace.followed_lines import PREFIX
from torchrepro.verdict.first_line import Origins, threads_of
from torchrepro.verdict.value import Divergence, Kind

FOLLOWS = """
import os, runpy, sys
from torchrepro.trace.followed_lines import follow
follow(sys.argv[1], None, os.environ)
runpy.run_path(sys.argv[2], run_name="__main__")
"""

# Programs whose last line shows the difference, with a comment at the line where it begins, and the
# library function that this line calls. No recording observes these sources by name.
BEGINS = {
    "a value that a function of another file of the program returns": """
        import hashlib, ssl
        def key():
            noise = ssl.RAND_bytes(8)  # here
            return hashlib.sha256(noise).digest()
        rows = sorted(range(9), key=lambda row: row)
        order = [key()[0], *rows]
        shown = order[0]
        """,
    "a table that another program sorts": """
        import subprocess, time
        began = time.perf_counter()
        text = subprocess.run(["sh", "-c", "od -An -N8 -tx1 /dev/urandom"],
                              capture_output=True).stdout  # before
        words = text.split()
        shown = words[0]
        """,
    "rows in the order of a query": """
        import sqlite3, time
        base = sqlite3.connect(":memory:")
        base.execute("create table t (x)")
        base.executemany("insert into t values (?)", [(n,) for n in range(50)])
        log = [time.time_ns()]
        rows = base.execute("select x from t order by random()").fetchall()  # here
        log.append(time.time_ns())
        first = [x for (x,) in rows]
        shown = first[:3]
        """,
    "an attribute that a method sets": """
        import ctypes, time
        class Index:
            def __init__(self, size):
                self.made = time.time_ns()
                self.size = size
            def build(self):
                memory = (ctypes.c_char * 8)()
                ctypes.CDLL(None).getrandom(memory, 8, 0)
                self.order = memory.raw  # here
        index = Index(3)
        index.build()
        def use(index):
            return index.order[0]
        shown = use(index)
        """,
    "a value that is handed to a thread": """
        import queue, ssl, threading, time
        put = queue.Queue()
        def make():
            stamp = time.time_ns()
            noise = ssl.RAND_bytes(4)  # here
            put.put(noise)
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        shown = put.get()
        """,
    "a branch": """
        import ssl
        total = 0
        for step in range(64):
            if ssl.RAND_bytes(1)[0] > 127:  # here
                total = total * 3 + step
        shown = total
        """,
    "a value that a generator yields": """
        import ssl, time
        def rows(many):
            for number in range(many):
                stamp = time.time_ns()
                yield number, ssl.RAND_bytes(2)  # here
        made = dict(rows(4))
        shown = made[3]
        """,
    "a sum of ten thousand rows": """
        import ssl
        def add(total, row):
            return total + row
        total = ssl.RAND_bytes(4)[0] * 1000 + ssl.RAND_bytes(4)[1]  # here
        for row in range(5000):
            total = total + row
            total = add(total, row)
        shown = total
        """,
    "many threads, one after the other": """
        import ssl, threading
        made = []
        def make():
            made.append(ssl.RAND_bytes(4))  # here
        for number in range(20):
            thread = threading.Thread(target=make)
            thread.start()
            thread.join()
        shown = made[3][0:3]
        """,
    "tasks that end in any order": """
        import asyncio, ssl
        async def one(number):
            await asyncio.sleep(ssl.RAND_bytes(1)[0] / 4000)
            return number
        async def all_of():
            found = []
            for done in asyncio.as_completed([one(number) for number in range(12)]):
                found.append(await done)  # here
            return found
        rows = asyncio.run(all_of())
        shown = rows[:4]
        """,
    "a loop that skips different rows": """
        noise = open("/dev/urandom", "rb")
        kept = []
        for row in range(60):
            if noise.read(1)[0] % 2:  # here
                continue
            kept.append(row)
        shown = kept[-20:]
        """,
    "one of two stamps of time": """
        import time
        began = time.time_ns()
        sizes = [1, 2, 3]
        other = time.time_ns()  # here
        log = (began, sizes)
        shown = other + sum(sizes)
        """,
}


def _followed(folder: Path, text: str) -> tuple[Path, str]:
    program = folder / "train.py"
    program.write_text(textwrap.dedent(text))
    for run in ("a", "b"):
        (folder / run).mkdir()
        words = [sys.executable, "-c", FOLLOWS, str(folder / run), str(program)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "Exception ignored" not in done.stderr, done.stderr
    return program, done.stdout


def _origin(folder: Path, program: Path, line: int):
    first = Divergence(0, 0, "forward", "", "aten::mul", f"{program}:{line}", kind=Kind.DATA)
    return Origins(str(folder / "a"), str(folder / "b"), 0).of(first)


@pytest.mark.parametrize("text", BEGINS.values(), ids=BEGINS)
def test_the_line_at_which_a_difference_began_is_named(text, tmp_path):
    """Also if the difference shows lines later; different values that are not read are ignored."""
    program, _ = _followed(tmp_path, text)
    lines = program.read_text().splitlines()
    found = _origin(tmp_path, program, len(lines))
    here = next(
        number for number, line in enumerate(lines, 1) if "# here" in line or "# before" in line
    )
    here -= "# before" in lines[here - 1]

    assert found is not None
    assert found.where == f"{program}:{here}"


CLOSURE = """
import sys, threading
sys.setswitchinterval(1e-6)
lock = threading.Lock()
def counter():
    count = 0
    def add():
        nonlocal count
        with lock:
            count += 1
    def read():
        return count
    return add, read
add, read = counter()
def work():
    for _ in range(3000):
        add()
threads = [threading.Thread(target=work) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
print(read())
"""
INTERRUPTED = """
import signal, time
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
caught = 0
for _ in range(20):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        while True:
            x = [1, 2, 3]
    except KeyboardInterrupt:
        caught += 1
print(caught)
"""
DIES = """
import weakref
class Big: pass
def use():
    big = Big()
    seen = weakref.ref(big)
    big = None
    one = 1
    return seen() is None
def lives():
    kept = Big()
    return weakref.ref(kept)
print(use(), lives()() is None)
"""
ASKS = """
def own():
    x = 1
    seen = locals()
    y = 2
    return sorted(seen)
print(own())
"""
TRACED = """
import sys
seen = []
def trace(frame, event, value):
    seen.append(event)
    return trace
def call():
    return 1
sys.settrace(trace)
call()
sys.settrace(None)
print(seen)
"""


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (CLOSURE, "12000"),
        (INTERRUPTED, "20"),
        (DIES, "True True"),
        (ASKS, "['x']"),
        (TRACED, "['call', 'line', 'return']"),
    ],
    ids=["a closure", "a signal", "a life", "locals()", "a tracer"],
)
def test_following_lines_does_not_change_what_a_program_does(text, printed, tmp_path):
    """Threads' writes stay, signals raise, values are freed, and the program's tracer works."""
    _, said = _followed(tmp_path, text)

    assert said.strip() == printed


def test_an_existing_tracer_is_not_replaced(tmp_path):
    """Then no lines are followed."""
    text = FOLLOWS.replace("follow(", "sys.settrace(lambda *_: None); follow(")
    program = tmp_path / "train.py"
    program.write_text("import sys; print(sys.gettrace() is None)")
    words = [sys.executable, "-c", text, str(tmp_path), str(program)]

    assert subprocess.check_output(words, text=True).strip() == "False"
    assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_the_lines_followed_in_one_step_are_bounded(tmp_path):
    """A loop of a million lines continues, and the recording notes where following stopped."""
    _followed(tmp_path, "for number in range(1_000_000):\n    x = 1\n")
    (thread,) = threads_of(str(tmp_path / "a")).values()

    assert "200,000 lines" in thread.stopped
    assert len(thread.executions) <= 200_001


REBINDS = """
import resource, sys
import numpy as np
def use():
    for number in range(6):
        kept = np.ones(12_500_000)
        kept += number
    return kept.sum()
print(use())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(peak, file=open(sys.argv[2] + ".peak", "w"))
"""


@pytest.mark.slow
def test_a_local_of_100_megabytes_that_is_rebound_has_the_peak_of_two(tmp_path):
    """Values of a frame are not kept alive beyond the next line."""
    program, _ = _followed(tmp_path, REBINDS)
    followed = int(Path(f"{program}.peak").read_text())
    subprocess.run([sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv[2])",
                    "", str(program)], check=True, capture_output=True)  # fmt: skip
    plain = int(Path(f"{program}.peak").read_text())

    print(f"peak {plain} MB alone, {followed} MB followed")
    assert followed < plain + 110


TRAINS = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters())
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.randn(8) + index
def train():
    for batch in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, shuffle=True):
        loss = compiled(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item().hex()
print(*train(), torch.random.get_rng_state().sum().item())
"""


@pytest.mark.slow
def test_results_are_those_of_the_program_alone_bit_for_bit(tmp_path):
    """With workers, a compiled model and random numbers."""
    program, followed = _followed(tmp_path, TRAINS)
    alone = subprocess.check_output([sys.executable, str(program)], text=True)

    assert followed == alone
    assert {process for _, process, _ in threads_of(str(tmp_path / "a"))} >= {
        "MainProcess",
        "Process-1",
        "Process-2",
    }


def test_an_object_deleted_at_the_end_of_python_behaves_as_without_following(tmp_path):
    """Lines are followed until a process begins to delete its modules."""
    text = """
        import os, sys
        class Last:
            def __del__(self, write=os.write):
                total = 0
                for row in [1, 2]:
                    total = total + row
                write(1, b"%d" % total)
        sys.last = Last()
        """
    assert _followed(tmp_path, text)[1] == "3"


def test_library_calls_are_named_as_users_write_them(tmp_path):
    """Functions, methods, classes and called objects; not names of the program."""
    text = """
        import random, statistics
        import numpy as np
        rng = np.random.default_rng(0)
        def own(x): return x
        rng.normal()
        statistics.mean([1])
        np.random.default_rng(1)
        own(1)
        """
    _followed(tmp_path, text)
    (thread,) = threads_of(str(tmp_path / "a")).values()
    called = {line.number: its for line, its in thread.called.items()}

    assert called[6] == ["numpy.Generator.normal"]
    assert called[7] == ["statistics.mean"]
    assert called[8] == ["numpy.default_rng"]
    assert called[9] == []


def test_allocated_memory_is_reported_at_the_line_that_fills_it(tmp_path):
    """Its value before is not an argument of the line that fills it."""
    text = """
        import ctypes
        import numpy as np
        seen = np.empty(64, dtype=np.uint8)
        seen[:] = 3
        mask = np.empty(4096, dtype=np.uint8)
        ctypes.CDLL(None).getrandom(mask.ctypes.data_as(ctypes.c_void_p), 64, 0)
        shown = int(mask[:64].sum()) + int(mask[0]) * 7
        """
    program, _ = _followed(tmp_path, text)

    assert _origin(tmp_path, program, 8).where == f"{program}:7"


def test_a_list_with_an_opaque_element_does_not_count_as_equal(tmp_path):
    """Both the line that created such a list and the line that reads it are named."""
    text = """
        import ssl
        class Hidden:
            __slots__ = ("own",)
            def __getattribute__(self, name):
                return ssl.RAND_bytes(4)
        hits = [(1.0, iter([0])), (2.0, iter([1]))]
        names = [ssl.RAND_bytes(8) for _, hit in hits]
        shown = names[0]
        """
    program, _ = _followed(tmp_path, text)
    found = _origin(tmp_path, program, 9)

    assert found.where == f"{program}:8"
    assert [(each.name, each.made) for each in found.opaque] == [("hits", f"{program}:7")]
    assert "hits" not in found.same


def test_a_recording_started_by_the_program_reports_no_other_tool(tmp_path):
    """It begins too late to follow lines; the note does not mention a debugger."""
    for run in ("a", "b"):
        with torchrepro.record(tmp_path / run, detail=True):
            torch.tensor([float(run == "a")]).exp()
    found = torchrepro.compare(tmp_path / "a", tmp_path / "b")

    assert not found.same
    assert not any("debugger" in note for note in found.notes)
