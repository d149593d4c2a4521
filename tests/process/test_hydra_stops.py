"""Errors that stop a Hydra app with status 3, before its task and with the state unchanged."""

from __future__ import annotations

import json
from functools import partial

import pytest

from torchrepro import plan


def test_an_exported_contradiction_stops_before_the_task(app):
    """The message names the variable, and a relaunch does not override it."""
    env = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "PYTHONHASHSEED": "0"}
    ended = app("+repro=debug-strict", "repro.on_late=relaunch", env=env)

    assert (ended.status, ended.tasks) == (3, [])
    assert ended.before == ended.after
    assert "CUBLAS_WORKSPACE_CONFIG" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_unwritable_manifest_stops_the_job_and_restores_the_state(app, tmp_path):
    """The message names the file."""
    (tmp_path / "out" / ".hydra" / "repro.json").mkdir(parents=True)
    ended = app("+repro=debug-strict", "hydra.run.dir=out")

    assert (ended.status, ended.tasks) == (3, [])
    assert ended.before == ended.after
    assert "repro.json" in ended.stderr


@pytest.mark.slow
def test_an_app_may_request_the_profile_of_run(app, fork_under, tmp_path):
    """The job then changes nothing; only the task draws random numbers."""
    words = ["hydra.run.dir=out", "+repro=debug-strict"]
    ended = app(*words, run=partial(fork_under, "debug-strict"))
    manifest = json.loads((tmp_path / "out/.hydra/repro.json").read_text(encoding="utf-8"))
    outcomes = {row["knob"]: row["outcome"] for row in manifest["report"]["knobs"]}

    assert ended.status == 0, ended.stderr
    assert ended.tasks == [ended.before]
    assert ended.before | {"rng": None} == ended.after | {"rng": None}
    assert outcomes["backends.torch.deterministic_algorithms"] == "applied"
    assert len(outcomes) == len(manifest["report"]["knobs"]) == len(plan("debug-strict").steps)


@pytest.mark.slow
def test_an_app_under_another_profile_of_run_is_stopped(little, fork_under):
    """The message names the keys that differ."""
    strict = partial(fork_under, "debug-strict")
    other = little("+repro=train-fast", run=strict)
    seed = little("+repro=debug-strict", "repro.seed=5", run=strict)
    other_seed = partial(fork_under, ["debug-strict", "seed=5"])
    agreed = little("+repro=debug-strict", "repro.seed=5", run=other_seed)

    assert [(result.returncode, result.tasks) for result in (other, seed, agreed)] == [
        (3, []),
        (3, []),
        (0, ["task True 5"]),
    ]
    assert "backends.cudnn.benchmark" in other.stderr
    assert "seed" in seed.stderr
    assert "backends" not in seed.stderr
