"""Files that one run leaves for the next are found, and no file of the user is changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrepro.ground.errors import printable
from torchrepro.verdict.render import reach
from torchrepro.verification.runner import LARGEST_LOG, run_to_end
from torchrepro.verification.verifier import verify

RESUMES = """
import os, torch
os.makedirs("ck", exist_ok=True)
saved = sorted(os.listdir("ck"))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
if saved:
    model.load_state_dict(torch.load("ck/" + saved[-1]))  # read
for step in range(len(saved), 6):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), f"ck/{step}.pt")  # written
"""
CACHES = """
import os, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(1)
scale = torch.load("cache.pt") if os.path.exists("cache.pt") else torch.full((1,), 0.25)
torch.save(torch.cat([scale * 2, torch.zeros(EXTRA)])[:1 + EXTRA], "cache.pt")
for step in range(2):
    model(torch.ones(8, 4) * scale[0]).square().mean().backward()
    optimizer.step()
"""
COUNTS = (
    """
import torch
with open("count", "r+") as count:
    number = int(count.read())
    count.seek(0)
    count.write(str(number + 1))
"""
    + CACHES
)
PREPARES = """
import os, torch
torch.manual_seed(0)
if not os.path.exists("mean.pt"):
    torch.save(torch.arange(8.).mean(), "mean.pt")
mean = torch.load("mean.pt")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2):
    model(torch.ones(8, 4) * mean).square().mean().backward()
    optimizer.step()
"""
REFUSES = """
import os, torch
{}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(8, 4)).sum().backward()
optimizer.step()
{}
"""
REFUSALS = {
    "a folder": ("os.makedirs('out')", "", "FileExistsError", 3, "out"),
    "a lock file": ("open('run.lock', 'x').close()", "", "FileExistsError", 3, "run.lock"),
    "its input is gone": ("text = open('in.txt').read()", "os.remove('in.txt')", "in.txt", 3, ""),
}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("-rf x", "rm -f -- '\"'\"'-rf x'\"'\"'"),
        ("$(touch y)", "rm -f -- '\"'\"'$(touch y)'\"'\"'"),
        ("a\x1b[31m\nb", ""),
        ("\udcff\udcfe", ""),
    ],
    ids=ascii,
)
def test_a_file_with_any_name_is_named_and_no_other_is_removed(name, command, tmp_path):
    """No command contains unprintable names, and no name is executed by the shell."""
    text = CACHES.replace('"cache.pt"', ascii(name)).replace("EXTRA", "3")
    Path("in.txt").write_text("")
    Path("train.py").write_text(f"open('in.txt'){text}")
    advice = verify(None, [sys.executable, "train.py"], folder=tmp_path / "out").verdict.advice

    assert advice.cause.startswith(f"A file that one run leaves for the next: {printable(name)}, ")
    assert advice.tried == "the same in 3 runs"
    assert command in advice.command
    assert advice.command or not command


def _state(folder: Path) -> dict[str, tuple[int, int, bytes | str]]:
    """What is in a folder: contents, times of change and inodes of all files, and links."""
    verification: dict[str, tuple[int, int, bytes | str]] = {}
    for path in folder.rglob("*"):
        its = path.lstat()
        if path.is_symlink():
            verification[str(path)] = its.st_mtime_ns, its.st_ino, str(path.readlink())
        elif path.is_file():
            verification[str(path)] = its.st_mtime_ns, its.st_ino, path.read_bytes()
    return verification


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("reads", ["", "open('in.txt')"])
def test_a_resuming_unseeded_program_is_distinguished_from_an_unseeded_one(tmp_path, reads):
    """The file is named with both lines, and the repeatable command starts in a new folder.

    If the program needs its own folder, only the files that run 1 created are removed.
    """
    Path("in.txt").write_text("")
    Path("train.py").write_text(reads + RESUMES)
    verification = verify(None, [sys.executable, "train.py"], folder=tmp_path / "out")
    advice, place = verification.verdict.advice, Path("train.py").absolute()

    assert advice.cause.startswith("A file that one run leaves for the next: ck/5.pt, written at")
    assert (
        "train.py:12 and read at train.py:8. Also, the program seeds no generator." in advice.cause
    )
    assert advice.tried == "the same in 3 runs"
    assert all(trial.what.startswith("each run ") for trial in verification.tried)
    if reads:
        files = "ck/0.pt ck/1.pt ck/2.pt ck/3.pt ck/4.pt ck/5.pt"
        assert f"'rm -f -- {files}; exec {sys.executable} train.py'" in advice.command
    else:
        alone = f"""'cd "$(mktemp -d)" && exec {sys.executable} {place}'"""
        assert advice.command.endswith(alone)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_cache_that_the_first_run_fills_is_named_if_results_are_the_same(verified):
    """The answer also reports that the cache reaches no result."""
    Path("train.py").write_text(PREPARES)
    verification = verified([sys.executable, "train.py"])

    assert not verification.same
    assert not verification.verdict.reaches
    assert verification.verdict.advice.cause.startswith(
        "A file that one run leaves for the next: mean.pt, written at train.py:5 and read at"
    )
    assert "losses and parameters of all 2 steps are the same" in reach(verification.verdict)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("matters", [False, True])
def test_a_created_file_is_the_cause_if_an_overwritten_one_reaches_nothing(matters, verified):
    """Trials start with overwritten files as they are now; if these matter, no trial counts."""
    Path("count").write_text("1")
    text = COUNTS.replace("EXTRA", "3")
    Path("train.py").write_text(text.replace("0.25", "0.25 * number") if matters else text)
    verification = verified([sys.executable, "train.py"])
    advice, tried = (
        verification.verdict.advice,
        [trial for trial in verification.tried if "left" in trial.what],
    )

    if matters:
        assert {trial.answer for trial in tried} == {
            "existed before, and overwritten by run 1: count"
        }
        assert "A file that one run" not in advice.cause
    else:
        assert advice.cause.startswith("A file that one run leaves for the next: cache.pt, written")
        assert advice.tried == "the same in 3 runs"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", ["created", "was there", "outside", "by a link"])
def test_trials_change_no_file_of_the_user(place, verified, tmp_path):
    """Trials in copies leave the files of the runs unchanged; after any trial the files exist.

    Trials in the folder itself change what the program changes, and no other file.
    """
    text, outside, others = CACHES.replace("EXTRA", "3"), tmp_path / "outside", {}
    outside.mkdir()
    Path("data").mkdir()
    Path("data/mine.bin").write_bytes(bytes(3_000_000))
    Path("latest").symlink_to("data")
    if place == "was there":
        Path("cache.pt").write_bytes(b"")
        text = text.replace('os.path.exists("cache.pt")', 'os.path.getsize("cache.pt")')
    elif place == "outside":
        text = text.replace('"cache.pt"', repr(str(outside / "cache.pt")))
    elif place == "by a link":
        Path("cache.pt").symlink_to(outside / "kept.pt")
    Path("train.py").write_text(text)
    left = outside / "kept.pt" if place == "by a link" else Path("cache.pt").absolute()
    left = outside / "cache.pt" if place == "outside" else left

    def say(progress):
        if progress.startswith("looking for the cause:"):
            others.update(_state(Path.cwd()), **_state(outside))

    verification = verified([sys.executable, "train.py"], say=say)
    now = {**_state(Path.cwd()), **_state(outside)}

    assert not verification.same
    assert now.keys() == others.keys()
    assert now[str(left)][1] == others[str(left)][1]
    if place == "created":
        assert now == others
        assert verification.verdict.advice.tried == "the same in 3 runs"
    else:
        (trial,) = (each for each in verification.tried if "left" in each.what)
        assert (trial.same, trial.runs) == (False, 0)
        now.pop(str(left))
        others.pop(str(left))
        assert now == others


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_an_absolute_link_into_the_folder_prevents_a_copy(verified):
    """The copy of an absolute link would lead to the user's own file, so no run is tried."""
    Path("data").mkdir()
    Path("data/log.txt").write_text("")
    Path("log.txt").symlink_to(Path("data/log.txt").absolute())
    text = CACHES.replace("EXTRA", "3") + "print('trained', file=open('log.txt', 'a'))\n"
    Path("train.py").write_text(text)
    trial = next(
        each for each in verified([sys.executable, "train.py"]).tried if "left" in each.what
    )

    assert (trial.same, trial.runs) == (False, 0)
    assert trial.answer == "log.txt is a link that leads out of a copy"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("first", REFUSALS.values(), ids=REFUSALS)
def test_a_second_run_that_refuses_to_start_is_the_answer_after_two_runs(first, verified):
    """Its last line, the program line, and the files that run 1 created; nothing is tried."""
    before, after, said, line, made = first
    Path("in.txt").write_text("text")
    Path("train.py").write_text(REFUSES.format(before, after))
    verification = verified([sys.executable, "train.py"])
    cause = verification.verdict.advice.cause

    assert (len(verification.runs), verification.tried) == (2, ())
    assert cause.startswith("run 2 failed: FileExistsError" if made else "run 2 failed: FileNot")
    assert said in cause
    assert f"(train.py:{line})" in cause
    assert cause.endswith(f"run 1 created {made}." if made else f"train.py:{line}).")


def test_a_long_output_keeps_its_beginning_and_its_end(tmp_path):
    """A program that prints without end leaves a small log."""
    text = "import sys; print('first'); print('x' * 9_000_000); print('last')"
    log = tmp_path / "log"

    assert run_to_end(sys.executable, [sys.executable, "-c", text], os.environ, log) == 0
    assert log.stat().st_size < LARGEST_LOG + 100
    assert log.read_text().startswith("first\n")
    assert log.read_text().endswith("x\nlast\n")


def test_a_long_output_is_bounded_while_it_is_printed(tmp_path):
    """The last output is complete."""
    log = tmp_path / "log"
    text = "import os, sys, time\nfor at in range(120): print('x' * 500_000 + str(at)); "
    text += "sys.stdout.flush(); time.sleep(0.02)\n"
    text += f"print(os.stat({str(log)!r}).st_blocks * 512); print('last')"

    assert run_to_end(sys.executable, [sys.executable, "-c", text], os.environ, log) == 0
    *_, before, used, last = log.read_text().splitlines()
    assert (before[-4:], last) == ("x119", "last")
    if int(used) > 50_000_000:
        pytest.skip("the file system gives no blocks back")
    assert int(used) < 40_000_000


RUNS = """
import os, sys
from pathlib import Path
from torchrepro.verification.runner import run_to_end
program = "import os, subprocess, sys, time; print(1, flush=True); "
inner = "[sys.executable, '-c', 'import time; time.sleep(60)']"
program += f"a = subprocess.Popen({inner}); b = subprocess.Popen({inner}, start_new_session=True); "
program += "open('pids', 'w').write(f'{os.getpid()} {a.pid} {b.pid} .'); time.sleep(60)"
run_to_end(sys.executable, [sys.executable, "-c", program], os.environ, Path("log"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT, signal.SIGINT])
def test_processes_of_a_run_end_with_verify_however_it_ends(number, tmp_path):
    """Its children end too, except a process that started another session."""
    ours = subprocess.Popen([sys.executable, "-c", RUNS], cwd=tmp_path, stderr=subprocess.DEVNULL)
    pids = tmp_path / "pids"
    while not (pids.exists() and pids.read_text().endswith(".")):
        time.sleep(0.05)
    *attached, detached = map(int, pids.read_text().split()[:-1])
    try:
        ours.send_signal(number)
        ours.wait(30)
        deadline = time.monotonic() + 30
        while any(map(_runs, attached)) and time.monotonic() < deadline:
            time.sleep(0.05)

        assert not any(map(_runs, attached))
        assert _runs(detached)
    finally:
        os.kill(detached, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
