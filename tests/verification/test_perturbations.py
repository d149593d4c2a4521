"""The changes that a perturbed process makes to itself, each in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from torchrepro.profile.load import resolve
from torchrepro.verification.at_start import IN_PROCESS, OBSERVED, VARIABLE, WORKERS
from torchrepro.verification.perturbations import EVERYTHING, RunEnvironment, StressPlan

START = "import os; from torchrepro.verification.at_start import begin\nbegin(os.environ)\n"
LOADER = """
import json, time, torch
waited, sleep = [], time.sleep
def noted(seconds):
    waited.append(seconds)
    sleep(seconds)
class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(20):
            yield torch.utils.data.get_worker_info().id, sum(waited)
if __name__ == "__main__":
    time.sleep = noted
    print(json.dumps(list(torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=None))))
"""


def perturbed(values, program):
    """Return what a program prints, as JSON, in a process that was perturbed first."""
    done = subprocess.run(
        [sys.executable, "-c", START + program],
        env={**os.environ, VARIABLE: json.dumps(values)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_every_clock_function_returns_another_day_and_intervals_stay():
    """All functions of `time` return the same moved time; clocks for intervals are unchanged.

    An explicit time is not moved, and invalid calls fail as before.
    """
    moved = 40 * 24 * 60 * 60
    program = (
        "import json, time\n"
        "try: time.strftime()\n"
        "except TypeError: pass\n"
        "print(json.dumps([time.time(), time.time_ns() / 1e9, time.mktime(time.localtime()),\n"
        "    time.mktime(time.strptime(time.ctime())),\n"
        "    time.mktime(time.strptime(time.asctime())),\n"
        "    float(time.strftime('%s')), time.gmtime(0)[0], time.monotonic()]))"
    )
    before, begun = time.time(), time.monotonic()
    *told, epoch, monotonic = perturbed({"clock": moved}, program)
    after, ended = time.time(), time.monotonic()

    # Most of them tell whole seconds.
    assert [before - 1 < moment - moved < after for moment in told] == [True] * 6
    assert epoch == 1970
    assert begun < monotonic < ended


def test_a_run_within_a_run_has_the_perturbations_of_both(monkeypatch):
    """A command in an outer run makes the changes of both to its processes.

    An environment without changes passes on those of the outer run.
    """
    monkeypatch.setenv(VARIABLE, json.dumps({"clock": 7, "allocation": 1}))
    own = RunEnvironment({"A": "b"}, {"allocation": 3}).all_variables()

    assert own.pop("A") == "b"
    assert {name: json.loads(text) for name, text in own.items()} == {
        VARIABLE: {"clock": 7, "allocation": 3}
    }
    assert RunEnvironment({"A": "b"}).all_variables() == {"A": "b"}


@pytest.mark.slow
def test_a_forked_child_writes_no_notes():
    """Notes begin when torch is imported, and not in a child that was forked before."""
    program = (
        "import json, multiprocessing, time\n"
        "def noted():\n"
        "    import torch\n"
        "    return type(time.time).__name__ == 'function'\n"
        "with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "    child = pool.apply(noted)\n"
        "print(json.dumps([child, noted()]))"
    )

    begins = {"verification.at_start:_move_the_clock": 1}
    assert perturbed({OBSERVED: begins}, program) == [False, True]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU")
def test_fewer_cpus_do_not_change_the_number_of_threads():
    """Torch counts all CPUs, also in a child of a perturbed process, and then uses fewer."""
    whole = sorted(os.sched_getaffinity(0))
    program = (
        "import json, os, subprocess, sys, torch\n"
        "mine = [torch.get_num_threads(), sorted(os.sched_getaffinity(0))]\n"
        "again = 'child' not in os.environ and subprocess.check_output(\n"
        "    [sys.executable, '-c', os.environ['PROGRAM']], env={**os.environ, 'child': '1'})\n"
        "print(json.dumps([*mine, json.loads(again) if again else None]))"
    )
    os.environ["PROGRAM"] = START + program
    try:
        threads, cpus, child = perturbed({"affinity": {"all": whole, "some": whole[:1]}}, program)
    finally:
        del os.environ["PROGRAM"]

    plain = "import torch; print(torch.get_num_threads())"
    expected = int(subprocess.check_output([sys.executable, "-c", plain]))
    assert (threads, cpus) == (expected, whole[:1])
    assert child[:2] == [expected, whole[:1]]


@pytest.mark.slow
def test_batches_of_workers_are_delayed(tmp_path):
    """Loader workers return their batches later, and no random number is drawn."""
    plain, delayed = (
        [max(waited for number, waited in told if number == worker) for worker in (0, 1)]
        for told in (perturbed(values, LOADER) for values in ({}, {"loader timing": 1}))
    )

    assert plain == [0, 0]
    assert min(delayed) > 0.05


def test_the_interpreter_is_perturbed_and_otherwise_unchanged():
    """Extra objects stay in the heap, and threads are switched more often.

    Without a perturbation nothing is changed or imported.
    """
    program = (
        "import json, sys, time; print(json.dumps([sys.getallocatedblocks(),\n"
        "sys.getswitchinterval(), 'torch' in sys.modules, type(time.time).__name__]))"
    )
    (plain, *left_alone), (littered, interval, *_) = (
        perturbed(values, program) for values in ({}, {"allocation": 3, "thread scheduling": 1e-5})
    )

    assert left_alone == [0.005, False, "builtin_function_or_method"]
    assert littered > plain + 500
    assert interval == pytest.approx(1e-5)


LISTING = """
import glob, json, os, pathlib, pickle, shutil
names = ["a", "b", "c", "d"]
os.mkdir("in")
for name in names:
    open(f"in/{name}", "w")
def scanned():
    with os.scandir("in") as entries:
        names = [entry.name for entry in entries]
    assert not list(entries)
    return names
listings = [os.listdir("in"), scanned(), [p.name for p in pathlib.Path("in").iterdir()],
    [os.path.basename(path) for path in glob.glob("in/*")], next(os.walk("in"))[2]]
try:
    os.listdir("nowhere")
except FileNotFoundError as error:
    listings.append(error.filename)
open("module_of_mine.py", "w").write("value = 1")
import module_of_mine
assert pickle.loads(pickle.dumps(os.listdir)) is os.listdir and os.scandir in os.supports_fd
assert shutil.rmtree.avoids_symlink_attacks
print(json.dumps(listings))
"""


def test_folders_list_the_same_files_in_another_order(tmp_path, monkeypatch):
    """Every function that lists a folder returns all files in another order for each number.

    Imports, pickle, errors and removing a tree work as before.
    """
    told = []
    for values in ({}, {"file order": 1}, {"file order": 2}):
        place = tmp_path / str(len(told))
        place.mkdir()
        monkeypatch.chdir(place)
        told.append(perturbed(values, LISTING))
    plain, *others = told

    for listings in (plain, *others):
        assert all(sorted(names) == ["a", "b", "c", "d"] for names in listings[:-1])
        assert listings[-1] == "nowhere"
    assert len({json.dumps(listings[:-1]) for listings in (plain, *others)}) == 3
    for listings in others:
        assert all(one != two for one, two in zip(listings[:-1], plain, strict=False))


def test_every_name_that_a_plan_sends_is_known_in_the_process():
    """Each perturbation has a function in the process, and each function is used.

    The number of workers and the observers are no perturbations: trials and relations use them.
    """
    plan = StressPlan.of(EVERYTHING, resolve("seed-only"))
    sent = {*plan.environment(1, plan.names).in_process}

    assert sent <= set(IN_PROCESS)
    assert set(IN_PROCESS) - sent <= {WORKERS, OBSERVED, *dict(plan.skipped)}
