"""What stops a Hydra app with status 3, before its task and with nothing changed."""

from __future__ import annotations

import json
from functools import partial

import pytest

from torchrepro import plan


def test_an_exported_contradiction_stops_before_the_task(app):
    """It is named with status 3, nothing was changed, and no relaunch overrules it."""
    env = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "PYTHONHASHSEED": "0"}
    ended = app("+repro=debug-strict", "repro.on_late=relaunch", env=env)

    assert (ended.status, ended.tasks) == (3, [])
    assert ended.before == ended.after
    assert "CUBLAS_WORKSPACE_CONFIG" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_manifest_that_cannot_be_written_leaves_nothing_behind(app, tmp_path):
    """A job whose manifest cannot be written is stopped, readably, and its profile is undone."""
    (tmp_path / "out" / ".hydra" / "repro.json").mkdir(parents=True)
    ended = app("+repro=debug-strict", "hydra.run.dir=out")

    assert (ended.status, ended.tasks) == (3, [])
    assert ended.before == ended.after
    assert "repro.json" in ended.stderr


@pytest.mark.slow
def test_an_app_under_run_agrees_with_its_profile(app, fork_under, tmp_path):
    """The same profile in run and in the job changes nothing; only the task draws numbers."""
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
def test_an_app_under_another_run_is_stopped(little, fork_under):
    """Another profile in the job than in run is status 3 and names the keys that differ."""
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
