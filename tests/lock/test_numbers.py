"""A lock holds the numbers of a command, and a later run either has them or is told where not."""

from __future__ import annotations

import json
import operator
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

import torchrepro
from torchrepro.ground.imports import installed_version
from torchrepro.lock.locked_results import Numbers, first_difference, numbers_of
from torchrepro.manifest.environment import platform_name

from ..benchmarks.paired import compare, require
from ..verification.repositories import write
from .training import COMMAND, FILES

THREADED = """
import threading, torch

def train(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.rand(4, generator=generator))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        (weight * torch.rand(4, generator=generator)).sum().backward()
        optimizer.step()

threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.slow
def test_equal_results_are_reported_with_the_differences_that_have_no_effect(training, monkeypatch):
    """The run gives the locked results; other differences have no effect on them."""
    status, out, _ = training.lock()
    equal = training.check()
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    other = training.run("check", "repro.lock", "--", *COMMAND)
    strict = training.run("check", "repro.lock", "--strict", "--", *COMMAND)
    without = training.run("check", "repro.lock")

    torch_here = installed_version("torch")
    assert (status, "with the results of 3 steps" in out) == (0, True)
    assert equal == (
        0,
        {"same": True, "first": None, "who": None, "steps": 3, "machine": platform_name()},
    )
    assert other[0] == 0
    assert other[1].splitlines() == [
        f"same results: 3 steps as in the lock (torch {torch_here}, this platform)",
        "without effect on them: exported OMP_PROC_BIND (not set -> false)",
    ]
    assert (strict[0], without[0]) == (1, 1)


def test_a_lock_has_a_line_for_each_step(training):
    """Losses are exact; a change of one step changes one line; locking is repeatable."""
    training.lock()
    text = (training.folder / "repro.lock").read_text()
    training.lock()
    section = training.contents["machines"][platform_name()]
    first, *others = section["numbers"]["steps"]

    assert (training.folder / "repro.lock").read_text() == text
    assert [f'  "{line}"' in text for line in (first, *others)] == [True] * 3
    step, loss, bar, digest = first.split()
    assert (step, bar, len(digest)) == ("0:", "|", 16)
    assert float.fromhex(loss) > 0
    assert set(section["files"]) == {"train.py", "model.py", "plain.yaml"}


def test_quiet_prints_the_answer_without_progress(training, monkeypatch):
    """With --quiet, `lock` and `check` print the same answer and nothing else."""
    monkeypatch.delenv("TORCHREPRO_QUIET")
    answers, progress = [], []
    for options in ((), ("--quiet",)):
        for words in (("lock", "plain.yaml", "-o", "repro.lock"), ("check", "repro.lock")):
            status, out, err = training.run(*words, *options, "--", *COMMAND)
            answers.append((status, out))
            progress.append(err)

    assert answers[:2] == answers[2:]
    assert [status for status, _ in answers] == [0] * 4
    assert all("run" in err for err in progress[:2])
    assert progress[2:] == ["", ""]


@pytest.mark.slow
def test_results_that_do_not_repeat_are_not_locked(training):
    """The verdict of the two runs is printed, with exit status 1; the lock is unchanged."""
    training.lock()
    before = (training.folder / "repro.lock").read_text()
    training.change("model.py", "SEED = 3", "import time\nSEED = time.time_ns() % 9973")
    status, out, _ = training.lock()
    updated = training.run("check", "repro.lock", "--update", "why", "--", *COMMAND)

    assert (status, updated[0]) == (1, 1)
    assert "not the same" in out
    assert "repro.lock is unchanged: these results do not repeat" in out
    assert (training.folder / "repro.lock").read_text() == before


@pytest.mark.slow
def test_the_options_steps_and_every_are_stored_in_the_lock(training):
    """Only these steps are locked, and `check` reads the options from the lock."""
    training.lock("--steps", "1:2")
    some = next(iter(training.contents["machines"].values()))["numbers"]["steps"]
    checked = training.check()
    training.lock("--every", "2")
    each = next(iter(training.contents["machines"].values()))["numbers"]["steps"]
    training.change("train.py", "step in range(3)", "step in range(5)")
    more = training.check("--no-blame")

    assert [line.split(":")[0] for line in some] == ["1", "2"]
    assert (checked[0], checked[1]["steps"]) == (0, 2)
    assert [line.split(":")[0] for line in each] == ["0", "2"]
    assert (more[0], more[1]["first"]["what"], more[1]["first"]["step"]) == (1, "steps", 4)


REFUSED = {
    "another command": (
        ("check", "repro.lock", "--", sys.executable, "other.py"),
        "another command",
    ),
    "no reason": (
        ("check", "repro.lock", "--update", " ", "--", *COMMAND),
        "the reason is missing",
    ),
    "no command": (("check", "repro.lock", "--update", "why"), "no command to start"),
    "steps alone": (("lock", "plain.yaml", "--steps", "1"), "--steps and --every need a command"),
    "no lock": (("check", "train.py", "--", *COMMAND), "neither a manifest nor a lock"),
    "every nothing": (("lock", "plain.yaml", "--every", "0", "--", *COMMAND), "whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_is_refused(training, name):
    """The exit status is 2, before any run, and the message tells what to do."""
    words, expected = REFUSED[name]
    if words[0] == "check" and "repro.lock" in words:
        training.run("lock", "plain.yaml", "-o", "repro.lock")
        its = {"command": ["python", "train.py"], "folder": ".", "steps": None, "every": 1}
        its |= {**training.contents, "machines": {platform_name(): {}}}
        (training.folder / "repro.lock").write_text(json.dumps(its))
    status, _, err = training.run(*words)

    assert status == 2
    assert expected in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_each_platform_has_a_section(training):
    """Other sections are kept; a missing section is reported with exit status 4."""
    training.lock()
    its, here = training.contents, platform_name()
    elsewhere = its["machines"].pop(here)
    (training.folder / "repro.lock").write_text(json.dumps(its | {"machines": {"H100": elsewhere}}))
    status, _, err = training.run("check", "repro.lock", "--", *COMMAND)
    as_json = training.check()
    started = training.run("run", "--lock", "repro.lock", "--", *COMMAND)
    added = training.run("check", "repro.lock", "--update", "CI, too", "--", *COMMAND)
    both, now = training.contents, training.check()
    training.lock()
    kept = set(training.contents["machines"])
    training.lock("--every", "2")

    assert (status, started[0], as_json[0], as_json[1]["same"]) == (4, 4, 4, None)
    assert "no results of this platform" in err
    assert "legal: H100" in err
    assert "--update" in err
    assert added[0] == 0
    assert set(both["machines"]) == kept == {"H100", here}
    assert both["machines"]["H100"] == elsewhere
    assert both["machines"][here]["reason"] == "CI, too"
    assert now[0] == 0
    assert set(training.contents["machines"]) == {here}  # another request: a new lock


def test_an_update_stores_the_reason_and_the_new_results(training):
    """Afterwards the run gives the locked results again."""
    training.lock()
    training.change("model.py", "LR = 0.1", "LR = 0.2")
    before = training.check("--no-blame")
    updated = training.run("check", "repro.lock", "--update", "a larger\nrate", "--", *COMMAND)
    after = training.check()

    assert (before[0], before[1]["who"]) == (1, None)
    assert before[1]["first"] == {**before[1]["first"], "step": 0, "what": "parameters"}
    assert (updated[0], after[0]) == (0, 0)
    assert training.contents["machines"][platform_name()]["reason"] == "a larger rate"


def test_ranks_have_one_digest_and_the_losses_of_the_first(tmp_path, monkeypatch):
    """A parameter counts on every rank, a loss only on rank 0."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    def recorded(name, *, seeds):
        for rank, seed in enumerate(seeds):
            monkeypatch.setenv("RANK", str(rank))
            with torchrepro.record(tmp_path / name / str(rank), level="step"):
                parameter = torch.nn.Parameter(torch.tensor([float(seed)]))
                optimizer = torch.optim.SGD([parameter], lr=0.1)
                (parameter * (rank + 1)).sum().backward()
                optimizer.step()
        for rank in range(1, len(seeds)):
            for file in (tmp_path / name / str(rank)).iterdir():
                file.rename(tmp_path / name / "0" / file.name)
        return numbers_of(tmp_path / name / "0")

    one, again, other = (recorded(name, seeds=(1, s)) for name, s in (("a", 2), ("b", 2), ("c", 3)))

    assert one == again
    assert one.steps[0].losses == ("0x1p+0",)
    assert first_difference(one, other).what == "parameters"


NUMBERS = ["0: 0x1.8p-1 | aa", "1: 0x1p+0 0x1p-1 | bb"]
UNEQUAL = {
    "a loss": (
        ["0: 0x1.8p-1 | aa", "1: 0x1p+0 0x1.1p-1 | bb"],
        "",
        "step 1: loss 0.5 in the lock, 0",
    ),
    "parameters": (["0: 0x1.8p-1 | a0", "1: 0x1p+0 0x1p-1 | bb"], "", "step 0: other parameters"),
    "fewer steps": (NUMBERS[:1], "", "2 steps in the lock, 1 step here"),
    "fewer losses": ([NUMBERS[0], "1: 0x1p+0 | bb"], "", "step 1: loss 0.5 in the lock, none here"),
    "no number": ([NUMBERS[0], "1: nan 0x1p-1 | bb"], "", "step 1: loss 1 in the lock, nan here"),
    "the end": (NUMBERS, "cc", "results differ at the end: other parameters or"),
    "nothing": (NUMBERS, "", ""),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_the_first_difference_is_reported(name):
    """The message names the step and both values, with enough digits to see the difference."""
    steps, end, expected = UNEQUAL[name]
    locked = Numbers.from_json({"steps": NUMBERS, "end": ""}, "a.lock")
    found = first_difference(locked, Numbers.from_json({"steps": steps, "end": end}, "b.lock"))

    assert expected in str(found) if expected else found is None
    assert locked.to_json() == {"steps": NUMBERS, "end": ""}


def test_a_run_whose_steps_end_in_several_threads_is_not_locked(training):
    """The number of a step is then chance: it says so, and writes nothing. One thread has one."""
    training.write({"train.py": THREADED.replace("(1, 2)", "(1,)")})
    assert training.lock()[0] == 0
    (training.folder / "repro.lock").unlink()
    training.write({"train.py": THREADED})
    status, out, err = training.lock()

    assert (status, out) == (2, "")
    assert "several threads end steps, so the results of a step depend on their timing" in err
    assert not (training.folder / "repro.lock").exists()


@pytest.mark.benchmark
def test_a_check_costs_one_run_and_a_second(tmp_path):
    """`check` without a difference takes at most 1 s more than the run that it makes, recorded."""
    write(tmp_path, FILES | {"acme.py": "SCALE = 1.0\n"})
    ours = str(Path(sys.executable).with_name("torchrepro"))
    numbers = count()

    def took(*words):
        start = time.perf_counter()
        subprocess.run([ours, *words], cwd=tmp_path, check=True, capture_output=True, timeout=300)
        return time.perf_counter() - start

    def recorded():
        folder = f"runs/{next(numbers)}"
        return took("run", "plain.yaml", "--record", folder, "--level", "step", "--", *COMMAND)

    took("lock", "plain.yaml", "-o", "repro.lock", "--", *COMMAND)
    checked = partial(took, "check", "repro.lock", "--", *COMMAND)
    seen = compare(recorded, checked, 1.0, by=operator.sub)
    print(f"\na recorded run: {seen.plain:.2f} s, torchrepro check: {seen.other:.2f} s")
    print(": ".join(seen.cells("added, in s", 1.0)))

    require(not seen.refutes(1.0), "1 s beyond a recorded run")
