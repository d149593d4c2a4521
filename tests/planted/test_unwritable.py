"""A trace that cannot be written: a full disk, or a limit on the size of files."""

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchrepro.trace.reader import read_run

TORCHREPRO = str(Path(sysconfig.get_path("scripts")) / "torchrepro")
STEPS = 60
LIMIT = 400_000
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
LIMITED = f'ulimit -f {LIMIT // 1024}; exec "$@"'
"""Words of a shell that limit the size of a file, as a quota does, and then start a command."""

FULL = (
    f'mount -t tmpfs -o size={LIMIT // 1024}k tmpfs disk && "$@" ;'
    " status=$?; cp disk/trace/* saved; exit $status"
)
"""Words that start a command beside a small disk, and save what it left there."""


@dataclass(frozen=True)
class Place:
    """A place that soon takes no more data."""

    words: tuple[str, ...]
    """What a command is started by."""
    trace: str
    """The folder to record into."""
    left: str
    """Where the trace is found afterwards."""
    error: str


PLACES = {
    "a limit on files": Place(("sh", "-c", LIMITED, "sh"), "trace", "trace", "trace"),
    "a full disk": Place(
        ("unshare", "--map-root-user", "--mount", "sh", "-c", FULL, "sh"),
        *("disk/trace", "saved", "full"),
    ),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A place that takes 400 kB, and a program beside it."""
    for folder in ("disk", "saved"):
        (tmp_path / folder).mkdir()
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    found = PLACES[request.param]
    mounting = f"mount -t tmpfs -o size=64k tmpfs {tmp_path / 'disk'}"
    if request.param == "a full disk":
        ready = (
            shutil.which("unshare")
            and not subprocess.run(
                [*found.words[:3], "sh", "-c", mounting], capture_output=True, check=False
            ).returncode
        )
        if not ready:
            pytest.skip("this system lets no test mount a disk of its own")
    return found


def _ended(place: Place, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "train.py")
    recording = (TORCHREPRO, "run", "seed-only", "--record", place.trace, *options, "--")
    return subprocess.run(
        [*place.words, *recording, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _steps_left(folder: Path) -> int:
    (trace,) = read_run(folder)
    whole = [row for row in trace.steps.values() if row.finished]
    counted = {step: len(trace.records(step)) for step in trace.steps}
    trace.close()
    assert counted == {row.step: row.records for row in whole}
    assert len(whole) == len(trace.steps)
    return len(whole)


def _plain_result(folder: Path) -> str:
    words = [TORCHREPRO, "run", "seed-only", "--", sys.executable, "train.py"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.slow
def test_a_run_stops_whose_trace_cannot_be_written(place: Place, tmp_path: Path) -> None:
    """It ends with status 3 and says why, without a traceback; recorded steps survive."""
    done = _ended(place, tmp_path)

    print(done.stderr)
    assert done.returncode == 3
    assert "went on" not in done.stdout
    assert "the trace cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert "make room, or record into another folder" in done.stderr
    assert 0 < _steps_left(tmp_path / place.left) < STEPS


@pytest.mark.slow
def test_a_run_goes_on_unrecorded_if_asked_to(place: Place, tmp_path: Path) -> None:
    """It says so once and comes to the result of a run without a recording."""
    done = _ended(place, tmp_path, "--on-unwritable", "warn")

    print(done.stderr)
    assert done.returncode == 0
    assert done.stdout == _plain_result(tmp_path)
    assert done.stderr.count("the trace cannot be written") == 1
    assert done.stderr.count("unrecorded from here") == 1
    assert "Traceback" not in done.stderr
    assert 0 < _steps_left(tmp_path / place.left) < STEPS
