"""What a run says as it starts: a line and what needs attention, everything, or nothing."""

import os

import pytest
import torch

import torchrepro
from torchrepro.application import launch
from torchrepro.doctor import examine
from torchrepro.profile.load import resolve
from torchrepro.reporting.process_state import absent_hardware

HELD = "torchrepro: debug-strict (repeatable) is active: "
LOWERED = "except the kernels of compiled code"
"""What a torch says whose inductor has no deterministic mode."""

HEAD = "torchrepro: seed-only (seeded) is active: "
SAYS = {
    (): "line",
    (("TORCHREPRO_VERBOSE", "1"),): "table",
    (("TORCHREPRO_QUIET", "1"),): "nothing",
    (("TORCHREPRO_QUIET", "0"), ("TORCHREPRO_VERBOSE", "")): "line",
    (("TORCHREPRO_QUIET", "1"), ("TORCHREPRO_VERBOSE", "1")): "table",
}
"""Variables, and what a job under Hydra says with them."""
NAMES = ("TORCHREPRO_QUIET", "TORCHREPRO_VERBOSE")
GIVEN = {(): ("1", "1"), ("--quiet",): ("1", "0"), ("--verbose",): ("0", "1")}
"""Options of `run`, and the values of `NAMES` that its command gets where both were 1."""


def test_a_run_starts_with_one_line(under):
    """`run debug-strict` says one line, of 80 columns where the guarantee is held."""
    done = under("debug-strict", "-c", "import torch")
    lines = done.stderr.splitlines()

    assert done.returncode == 0
    assert len(lines) <= 5
    assert lines[0].startswith(HELD) != (LOWERED in lines[0])
    assert LOWERED in lines[0] or all(len(line) <= 80 for line in lines)
    if len(absent_hardware()) == 5:
        assert len(lines) == 1 + (LOWERED in lines[0])


@pytest.mark.parametrize("variables", SAYS)
def test_variables_say_how_much_a_job_under_hydra_says(little, variables):
    """A line, the whole table or nothing; where both variables are set, the table."""
    done = little("+repro=seed-only", env=dict(variables))
    says = SAYS[variables]
    lines = done.stderr.splitlines()

    assert len(done.tasks) == 1
    assert ("seed.streams" in done.stderr) == (says == "table")
    assert len([line for line in lines if line.startswith(HEAD)]) == (says != "nothing")
    assert says == "table" or len(lines) <= 5
    assert says == "table" or all(len(line) <= 80 for line in lines)


def test_quiet_says_a_lowered_guarantee(little):
    """What lowers a guarantee is said however quiet the run is to be."""
    words = ("+repro=debug-strict", "repro.backends.torch.fill_uninitialized_memory=false")
    done = little(*words, env={"TORCHREPRO_QUIET": "1"})
    lines = done.stderr.splitlines()

    assert len(done.tasks) == 1
    assert len(lines) == 2
    assert (
        "debug-strict is active: repeatable, except the contents of uninitialized memory"
        in lines[0]
    )
    assert lines[1].endswith("fill_uninitialized_memory is false")


def test_a_sweep_says_once_what_its_jobs_share(little):
    """Jobs of a sweep that have the same profile are announced together, others by themselves."""
    done = little("-m", "+repro=seed-only", "repro.seed=1,2", "+n=1,2,3")
    said = [line for line in done.stderr.splitlines() if "is active" in line]

    assert len(done.tasks) == 6
    assert len(said) == 2


@pytest.mark.parametrize("options", GIVEN)
def test_an_option_wins_over_the_variables(options, command, monkeypatch):
    """What `run` is told reaches all that it starts; without an option the variables do."""
    seen = []
    for name in NAMES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(launch, "start", lambda *_: seen.append(tuple(map(os.getenv, NAMES))))
    status, _, err = command("run", *options, "seed-only", "--", "python", "x.py")

    assert (status, err) == (0, "")
    assert seen == [GIVEN[options]]
    assert tuple(map(os.getenv, NAMES)) == ("1", "1")


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [("2.6.0", 0), ("2.15.1+cu132", 0), ("2.16.0.dev20261128", 1), ("3.0.0", 1), ("a", 0)],
)
def test_a_torch_that_is_newer_than_those_tested_is_said_in_one_line(
    version, is_newer, monkeypatch
):
    """The report and `doctor` say so, and nothing stops."""
    monkeypatch.setattr(torch, "__version__", version)
    with torchrepro.apply("seed-only") as applied:
        said = str(applied.report)
    words = f"torch {version} is newer than 2.15, the newest that was tested"
    found = [each for each in examine(resolve("seed-only")) if each.what == words]

    assert said.count(words) == len(found) == is_newer
    assert not any(each.serious for each in found)
