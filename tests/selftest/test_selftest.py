"""`torchrepro selftest` reports each promise that holds as held, and each broken one as failed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrepro import selftest as self_test
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.selftest import PROMISES, Result

PLANTED = Path(__file__).with_name("planted")
SIMULATED = Path(__file__).parents[1] / "devices"
TOKEN = "correct-horse-battery-staple"
AUTOLOADED = "[torch.backends]\nsimulated = simulated_npu:install\n"

pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.fixture
def plant(monkeypatch, tmp_path):
    """Start the processes of a self-test with these faults, and their files in our own folder."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(self_test.tempfile, "tempdir", None)  # where the variable is noticed

    def plant(*faults, promises=()):
        monkeypatch.setenv("PLANTED", ",".join(faults))
        monkeypatch.setenv("PYTHONPATH", os.path.relpath(PLANTED))
        monkeypatch.setenv("API_TOKEN", TOKEN)
        if promises:
            rows = tuple(row for row in PROMISES if row.name in promises)
            monkeypatch.setattr(self_test, "PROMISES", rows)

    yield plant
    self_test.tempfile.tempdir = None


VARIABLES = ("OMP_NUM_THREADS", "OMP_DYNAMIC")
DTYPE = "backends.torch.default_dtype"
FILL = "backends.torch.fill_uninitialized_memory"


def by_trial(document):
    """Return the rows of a self-test by knob or promise, and device."""
    return {(row["knob"] or row["promise"], row["device"]): row for row in document["rows"]}


@pytest.mark.slow
def test_planted_faults_are_found_and_named(plant, answer):
    """A write without effect, an incomplete undo and active dropout fail, and nothing else does.

    Each row has the expected and the actual behaviour; it shows only the names of variables that
    do not belong to the knob.
    """
    undone = "undo_that_forgets", "undo_that_leaves_another_variable"
    faults = "write_that_does_not_hold", *undone, "dropout_left_on"
    plant(*faults, promises=("knob", "dropout", "fallback"))
    status, document = answer("selftest")
    rows = by_trial(document)
    failed = {name for name, row in rows.items() if row["result"] == "failed"}
    forgotten = {(f"env.{name}", "cpu") for name in VARIABLES}

    assert status == 1
    assert failed == forgotten | {(name, "cpu") for name in (DTYPE, FILL, "dropout")}
    for name in VARIABLES:
        assert rows[f"env.{name}", "cpu"]["expected"] == f"{name} is null again after the undo"
    assert "ineffective" in rows[DTYPE, "cpu"]["found"]
    assert rows[FILL, "cpu"]["found"] == "changed: LEFT"
    assert TOKEN not in json.dumps(document)
    assert "nn.Dropout" in rows["dropout", "cpu"]["found"]
    assert all(rows[name]["expected"] for name in failed)


@pytest.mark.slow
def test_a_failure_shows_no_secret_and_the_next_promise_gets_a_new_process(plant, command):
    """If a promise fails with a secret in its error, or crashes, the next one is still tested."""
    plant("failures_that_linger", promises=("dropout", "fallback", "one bit"))
    status, out, err = command("selftest")

    assert (status, err) == (1, "")
    assert "found: RuntimeError: no access with (hidden)" in out
    assert "signal SIGABRT" in out
    assert "1 held, 2 failed" in out
    assert "--json" in out.splitlines()[-1]
    assert TOKEN not in out


def test_files_of_libraries_go_to_the_temporary_folder(tmp_path):
    """Every cache and log folder is inside the temporary folder, and no knob sets one of them."""
    environment = self_test.environment_below(tmp_path)

    assert all(Path(environment[name]).parent == tmp_path for name in self_test.CACHES)
    assert all(Path(environment[name]).is_dir() for name in self_test.CACHES)
    assert not {knob.variable for knob in CATALOGUE} & {*self_test.CACHES}


@pytest.mark.slow
def test_an_interrupted_selftest_ends_with_its_processes(plant, tmp_path):
    """Interrupted, it ends with the status of a shell, and leaves no file or process behind."""
    plant("hang")
    words = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not [*tmp_path.rglob("waits")]:
            assert process.poll() is None
            time.sleep(0.05)
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)

    assert (process.returncode, said) == (130, b"")
    assert list(tmp_path.iterdir()) == []
    assert not Path(f"/proc/{child}").exists()


INTERRUPTED = """
import sys
from torchrepro.cli import main
from torchrepro import selftest as self_test

self_test.PROMISES = [row for row in self_test.PROMISES if row.name == "dropout"]
main(["selftest"])
"""


def used():
    """Return the CPU seconds of the finished child processes of this process."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
def test_every_promise_holds_on_the_cpu_and_on_an_accelerator(plant, answer, tmp_path, monkeypatch):
    """All promises hold within two minutes, on the CPU and on an accelerator that torch loads.

    The limit is CPU time, because other work on the machine does not count. No trial waits, so it
    takes less than a quarter of an hour too. No temporary file is left behind.
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
    began, began_at = used(), time.monotonic()
    status, document = answer("selftest")
    results = {name: row["result"] for name, row in by_trial(document).items()}
    npu = {row.name: results[row.name, "npu"] for row in PROMISES if row.devices}

    assert used() - began < 120
    assert time.monotonic() - began_at < 900
    assert (status, document["counts"]["failed"]) == (0, 0), json.dumps(document, indent=1)
    assert {"cpu", "npu"} <= set(document["machine"]["devices"])
    assert set(npu.values()) == {Result.HELD}
    assert list(temporary.iterdir()) == []
