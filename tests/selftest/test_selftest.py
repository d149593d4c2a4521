"""`torchrepro selftest`: what is held is said to be held, what is broken is said to be broken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.selftest import tester
from torchrepro.selftest.promises import PROMISES, promises_by_name
from torchrepro.selftest.trials import DEVICES, Result

PLANTED = Path(__file__).with_name("planted")
SIMULATED = Path(__file__).parents[1] / "devices"
AUTOLOADED = "[torch.backends]\nsimulated = simulated_npu:install\n"

pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.fixture
def plant(monkeypatch, tmp_path):
    """Have the processes of a self-test start with these faults, and files in a folder of ours."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tester.tempfile, "tempdir", None)  # where the variable is noticed

    def plant(*faults, promises=()):
        monkeypatch.setenv("PLANTED", ",".join(faults))
        monkeypatch.setenv("PYTHONPATH", str(PLANTED))
        if promises:
            rows = tuple(promises_by_name()[name] for name in promises)
            monkeypatch.setattr(tester, "PROMISES", rows)

    yield plant
    tester.tempfile.tempdir = None


def by_trial(document):
    """The rows of a self-test by what they are about."""
    return {(row["knob"] or row["promise"], row["device"]): row for row in document["rows"]}


def test_a_row_for_every_promise_and_device():
    """Each promise has a trial for each of its devices, and each knob one on its own."""
    trials = [trial for promise in PROMISES for trial in promise.trials()]
    knobs = [trial.knob for trial in trials if trial.knob]
    others = {(trial.promise, trial.device) for trial in trials if not trial.knob}

    assert len(set(trials)) == len(trials)
    assert knobs == [knob.name for knob in CATALOGUE]
    assert others == {
        (row.name, its) for row in PROMISES if not row.of_each_knob for its in DEVICES
    }
    assert {trial.device for trial in trials} == set(DEVICES)


def test_planted_faults_are_found_and_named(plant, answer):
    """A knob that does not hold, one that stays and dropout left on fail, and nothing else does.

    Each row says what was expected and what was found.
    """
    faults = "write_that_does_not_hold", "undo_that_forgets", "dropout_left_on"
    plant(*faults, promises=("knob", "dropout", "fallback"))
    status, document = answer("selftest")
    rows = by_trial(document)
    failed = {name for name, row in rows.items() if row["result"] == "failed"}
    variables = {(knob.name, "cpu") for knob in CATALOGUE if knob.variable} & rows.keys()
    forgotten = {name for name in variables if rows[name]["result"] == "failed"}

    assert status == 1
    assert failed - forgotten == {("backends.torch.default_dtype", "cpu"), ("dropout", "cpu")}
    assert len(forgotten) > 5
    assert "ineffective" in rows["backends.torch.default_dtype", "cpu"]["found"]
    assert "nn.Dropout" in rows["dropout", "cpu"]["found"]
    assert all(rows[name]["expected"] for name in failed)


def test_a_process_that_dies_fails_one_promise(plant, command):
    """Where a process dies, the promise that it tried failed, and the next one is tried."""
    plant("crash", promises=("dropout", "fallback"))
    status, out, err = command("selftest")

    assert (status, err) == (1, "")
    assert "signal SIGABRT" in next(line for line in out.splitlines() if "failed" in line)
    assert "1 held, 1 failed" in out
    assert "--json" in out.splitlines()[-1]


def test_it_ends_when_it_is_asked_to(plant, tmp_path):
    """Interrupted, it ends with the status of a shell, without a file or a process left."""
    plant("hang")
    words = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for line in process.stdout:
            if line.startswith(b"dropout"):
                break
        (child,) = children(process.pid)
        time.sleep(0.2)  # until the child waits
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)

    assert (process.returncode, said) == (130, b"")
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{child}").exists()


INTERRUPTED = """
import sys
from torchrepro.cli import main
from torchrepro.cli.progress import Progress
from torchrepro.selftest import promises, tester

tester.PROMISES = (promises.promises_by_name()["dropout"],)
Progress.for_now = lambda self, text: print(text.partition(": ")[2], flush=True)
main(["selftest"])
"""


def children(pid):
    """Return the processes that a process has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()


@pytest.mark.slow
def test_every_promise_is_held_here_and_on_an_accelerator(plant, answer, tmp_path, monkeypatch):
    """Whole, within two minutes: on the CPU, and on an accelerator that torch loads by itself.

    Nothing stays in the folder of temporary files.
    """
    plant()
    package = tmp_path / "packages" / "simulated-1.dist-info"
    package.mkdir(parents=True)
    (package / "entry_points.txt").write_text(AUTOLOADED, encoding="utf-8")
    (package / "METADATA").write_text("Name: simulated\nVersion: 1\n", encoding="utf-8")
    path = os.pathsep.join(map(str, (SIMULATED, package.parent)))
    monkeypatch.setenv("PYTHONPATH", path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    began = time.monotonic()
    status, document = answer("selftest")
    results = {name: row["result"] for name, row in by_trial(document).items()}
    npu = {row.name: results[row.name, "npu"] for row in PROMISES if not row.of_each_knob}

    assert time.monotonic() - began < 120
    assert (status, document["counts"]["failed"]) == (0, 0), json.dumps(document, indent=1)
    assert {"cpu", "npu"} <= set(document["machine"]["devices"])
    assert set(npu.values()) == {Result.HELD}
    assert list(temporary.iterdir()) == []
