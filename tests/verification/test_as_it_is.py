"""A command without a profile is recorded, and nothing is set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrepro.profile.load import resolve
from torchrepro.trace.reader import read_run
from torchrepro.verification import runner
from torchrepro.verification.result import verification_json
from torchrepro.verification.runner import RunRequest
from torchrepro.verification.verifier import verify

STATE = """
import json, os, random, sys
import numpy
print(json.dumps([
    random.random(), numpy.random.rand(), torch.rand(1).item(), torch.initial_seed(),
    torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), hash("word"),
    torch.backends.mkldnn.deterministic, torch.utils.deterministic.fill_uninitialized_memory,
    [each for each in sys.path if not each.startswith("/tmp/tmp")],  # torch 2.6 makes one
    sys.argv, sys.flags.hash_randomization,
    {k: v for k, v in os.environ.items() if k not in ("TORCHREPRO_RECORD", "PYTHONPATH")},
]))
"""
APP = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    exec(compile(open("train.py").read(), "train.py", "exec"), {})

main()
"""


SEEDED = "import random, numpy, torch\nrandom.seed(3); numpy.random.seed(3); torch.manual_seed(3)"


def program(training, end: str = "") -> list[str]:
    """Write a training program that seeds itself; return its command."""
    command = training(before=SEEDED)
    with Path("train.py").open("a", encoding="utf-8") as file:
        file.write(end)
    return command


@pytest.mark.slow
def test_recording_without_a_profile_changes_nothing_else(training, tmp_path, monkeypatch):
    """A recorded program draws the same random numbers, and has the same flags and variables."""
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    command = program(training, STATE)
    # Given as Python knows it: readline tells C libraries of COLUMNS, and Python nothing of it.
    plain = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ
    ).stdout
    verification = verify(None, command, folder=tmp_path / "out")
    answer = verification_json(verification)

    assert verification.same
    assert (answer["profile"], answer["own_profile"], answer["asked"]) == (None, None, "bits")
    assert answer["command"] == f"{sys.executable} train.py"
    for run in verification.runs:
        recorded = Path(run.log).read_text(encoding="utf-8")
        assert json.loads(recorded) == json.loads(plain)


@pytest.mark.usefixtures("forked")
def test_a_program_that_skips_its_exit_handlers_is_recorded_to_its_end(training, tmp_path):
    """`os._exit` completes the trace, but not in a forked child."""
    end = "torch.ones(2).sum()\nimport os; os.fork() and os.wait(); os._exit(0)\n"
    verification = verify(None, program(training, end), folder=tmp_path / "out")

    assert verification.same
    assert all(not read_run(run.folder)[0].is_truncated for run in verification.runs)


@pytest.mark.slow
def test_the_profile_of_a_hydra_app_is_verified_as_the_app_applies_it(training, tmp_path):
    """The answer names whether Hydra applies `+repro=` in the recorded process, or outside."""
    training()
    Path("app.py").write_text(APP, encoding="utf-8")
    words = ["app.py", "+repro=debug-strict", "hydra.output_subdir=null", "hydra.run.dir=."]
    command = [sys.executable, *words]
    line = " ".join([sys.executable, *words])
    for profile, starts, own in (
        (None, "", "debug-strict"),
        ("debug-strict", "torchrepro run debug-strict -- ", None),
    ):
        verification = verify(profile, command, folder=tmp_path / str(profile))
        answer = verification_json(verification)

        assert verification.same
        assert answer["command"] == starts + line
        assert (answer["profile"], answer["own_profile"]) == (profile, own)


def test_no_secret_of_the_command_line_is_in_the_answer(monkeypatch):
    """The answer hides the same secrets as a manifest, also those in overrides."""
    monkeypatch.setenv("MY_TOKEN", "zq8Xw71kPd90aa")
    words = ["python", "train.py", "--api-key", "hunter22", "--name=zq8Xw71kPd90aa", "--lr", "0.1"]
    overrides = ["seed=7", "env_extra.WANDB_API_KEY=abc123def456"]
    resolved = resolve("seed-only")  # with the overrides, it would refuse the dangerous variable
    monkeypatch.setattr(runner, "resolve", lambda *_: resolved)
    line = RunRequest(words, profile="seed-only", overrides=overrides).command_line

    assert line.startswith("torchrepro run seed-only seed=7 env_extra.WANDB_API_KEY=(hidden) -- ")
    assert line.endswith("--lr 0.1")
    assert not any(secret in line for secret in ("hunter22", "zq8Xw71kPd90aa", "abc123def456"))
    assert RunRequest(words).command_line.startswith("python train.py ")
