"""`+repro=NAME` on Hydra apps that know nothing about torchrepro."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from torchrepro import load
from torchrepro.knobs.variables import RECORDED

from .conftest import DEPRECATED

TWICE = """
import contextlib, json, os, sys
import hydra, torch

seen = []

@hydra.main(version_base=None, config_path=None)
def main(config):
    seen.append([torch.are_deterministic_algorithms_enabled(), os.environ.get("NCCL_ALGO")])
    if "repro" in config:
        sys.exit(5)

sys.argv[1:] = ["+repro=debug-strict"]
with contextlib.suppress(SystemExit):
    main()
sys.argv[1:] = []
main()
print(json.dumps(seen))
"""
CLOSED = """
from dataclasses import dataclass
from typing import Any
import hydra
from hydra.core.config_store import ConfigStore

@dataclass
class Config:
    size: int = 3
    repro: Any = None

ConfigStore.instance().store("closed", Config)

@hydra.main(version_base=None, config_path=None, config_name="closed")
def main(config):
    import torch
    print("task", config.size, torch.are_deterministic_algorithms_enabled())

if __name__ == "__main__":
    main()
"""


def test_without_a_profile_nothing_changes(app, tmp_path, run_python):
    """Without a request nothing is printed, and the task sees an unchanged state."""
    ended = app("hydra.run.dir=out", run=run_python)  # a start that reads PYTHONWARNINGS

    assert (ended.status, ended.stderr) == (0, "")
    assert [ended.before] == ended.tasks
    assert ended.before["env"] == ended.after["env"]
    assert not (tmp_path / "out" / ".hydra" / "repro.json").exists()


def test_applied_before_the_task_and_undone_after_it(app, run_python):
    """The task runs under the profile and its overrides, and afterwards the state is restored."""
    ended = app(
        *("+repro=debug-strict", "repro.seed=7", "repro.backends.cpu.mkldnn_deterministic=null"),
        run=run_python,
    )
    (task,) = ended.tasks

    assert ended.status == 0
    assert (
        task["deterministic"],
        task["fill"],
        task["mkldnn"],
        task["seed"],
    ) == (True, True, False, 7)
    assert task["env"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert ended.before == ended.after
    assert "debug-strict is active: repeatable, except" in ended.stderr


def test_jobs_of_a_sweep_start_from_a_clean_state(app):
    """Each job has its swept profile and seed, and nothing leaks into the next job."""
    ended = app("-m", "+repro=debug-strict,train-fast", "repro.seed=1,2")
    seen = [(t["deterministic"], t["benchmark"], t["mkldnn"], t["seed"]) for t in ended.tasks]

    assert seen == [
        (True, False, True, 1),
        (True, False, True, 2),
        (False, True, False, 1),
        (False, True, False, 2),
    ]
    assert [bool(task["env"]) for task in ended.tasks] == [True, True, False, False]
    assert ended.before == ended.after


def test_a_failing_job_is_undone(app):
    """After a task that raises, the state is restored for the next job and for the program."""
    ended = app("-m", "+repro=debug-strict,train-fast", "+fail_if_deterministic=true")

    assert ended.status == 1
    assert "the task itself failed" in ended.stderr
    assert [(task["deterministic"], task["benchmark"]) for task in ended.tasks] == [
        (True, False),
        (False, True),
    ]
    assert ended.tasks[1]["env"] == {}
    assert ended.before == ended.after


def test_a_job_that_calls_sys_exit_is_undone(write, answer_of, fork_python):
    """Hydra does not catch SystemExit; the state is restored before the next job."""
    write({"twice.py": TWICE})

    assert answer_of("twice.py", run=fork_python, env={"PYTHONHASHSEED": "0"}) == [
        [True, "Ring"],
        [False, None],
    ]


@pytest.mark.slow
@pytest.mark.skipif(
    not find_spec("hydra_plugins.hydra_joblib_launcher"), reason="hydra-joblib-launcher is missing"
)
def test_jobs_in_other_processes(little, run_python):
    """Each job that joblib starts has its profile, and a refused profile is status 3."""
    launcher = ("-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    good = little(*launcher, "+repro=debug-strict,train-fast", "repro.seed=1,2", run=run_python)
    bad = little(*launcher, "+repro=debug-strict", "repro.seed=1,-1", run=run_python)

    assert good.returncode == 0, good.stderr
    assert sorted(good.tasks) == ["task False 1", "task False 2", "task True 1", "task True 2"]
    assert bad.returncode == 3
    assert "seed" in bad.stderr
    assert "task True -1" not in bad.stdout


@pytest.mark.slow
def test_a_closed_dataclass_with_the_field(write, fork_python, run_python):
    """An app with a closed dataclass accepts a profile in a field `repro: Any = None`."""
    write({"closed.py": CLOSED})
    without = run_python("closed.py", env=DEPRECATED)
    words = ("+repro=debug-strict", "repro.seed=5", "size=4")
    below = fork_python("closed.py", *words, env={"PYTHONHASHSEED": "0"})
    plain = fork_python("closed.py", "repro=debug-strict")

    assert (without.stdout, without.stderr) == ("task 3 False\n", "")
    assert below.stdout == "task 4 True\n", below.stderr
    assert (plain.returncode, plain.stdout) == (1, "")  # Hydra's message: use +repro=


@pytest.mark.parametrize(
    ("words", "seed"),
    [
        (["--config-dir", "{folder}", "+repro=far"], 6),
        (["hydra.searchpath=[file://{folder}]", "+repro=far"], 6),
        (["+repro={folder}/plain.yaml"], 8),
        (["+repro=pkg://acme.profiles/strict"], 9),
    ],
)
def test_profiles_outside_of_the_search_path(little, write, tmp_path, words, seed):
    """Profiles are found in --config-dir, hydra.searchpath, a package, and at a path."""
    write(
        {
            "elsewhere/repro/far.yaml": "defaults: [seed-only, _self_]\nseed: 6\n",
            "elsewhere/plain.yaml": "seed: 8\n",
            "acme/profiles/strict.yaml": "seed: 9\n",
        }
    )
    result = little(*(word.format(folder=tmp_path / "elsewhere") for word in words))

    assert result.tasks == [f"task False {seed}"], result.stderr


def test_the_manifest_describes_the_run_without_secrets(little, tmp_path):
    """It contains the profile, digest and report, and only variables on the allow-list."""
    secret = "hunter2-5f1c"
    result = little(
        "+repro=debug-strict", "repro.seed=7", "hydra.run.dir=out", env={"SECRET_TOKEN": secret}
    )
    text = (tmp_path / "out" / ".hydra" / "repro.json").read_text(encoding="utf-8")
    manifest = json.loads(text)
    profile = load("debug-strict", ["seed=7"])

    assert result.returncode == 0, result.stderr
    assert (profile.digest, 7) == (manifest["digest"], manifest["profile"]["seed"])
    assert {"env.CUBLAS_WORKSPACE_CONFIG", "seed.torch"} <= {
        row["knob"] for row in manifest["report"]["knobs"]
    }
    assert set() == set(manifest["environment"]) - set(RECORDED)
    assert secret not in text
    assert secret not in result.stderr


def test_the_last_of_several_equal_overrides_counts(little, tmp_path):
    """The origin is that override, which also allows the variable that it sets."""
    seeds = ("repro.seed=1", "repro.seed=2", "repro.seed=1")
    flags = [f"++repro.env_extra.ACME=x{number}" for number in (1, 2, 1)]
    result = little("+repro=seed-only", *seeds, *flags, "hydra.run.dir=out")
    assert result.tasks == ["task False 1"], result.stderr

    manifest = json.loads((tmp_path / "out" / ".hydra" / "repro.json").read_text(encoding="utf-8"))

    assert manifest["profile"]["env_extra"] == {"ACME": "x1"}
    assert manifest["origins"]["seed"]["set_by"] == "override repro.seed=1"
    assert manifest["started"]["asked"][1:4] == ["seed=1", "seed=2", "seed=1"]


def test_the_origin_of_a_value_in_the_apps_config_is_the_app(little, tmp_path):
    """It is not the profile's file, although the app has chosen that profile."""
    config = "defaults: [{repro: seed-only}, _self_]\nrepro: {seed: 3}\n"
    little("hydra.run.dir=out", config=config)
    manifest = json.loads((tmp_path / "out" / ".hydra" / "repro.json").read_text(encoding="utf-8"))

    assert manifest["origins"]["seed"]["set_by"] == "this app's config"


def test_variables_that_hydra_sets(app):
    """A variable of hydra.job.env_set counts as exported, and is removed after the job."""
    good = app("+repro=debug-strict", "+hydra.job.env_set.CUBLAS_WORKSPACE_CONFIG=':16:8'")
    bad = app("+repro=debug-strict", "+hydra.job.env_set.CUBLAS_WORKSPACE_CONFIG=':0:0'")

    assert good.tasks[0]["env"]["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert "drift" not in good.stderr  # the last check runs with the variable set
    assert good.after["env"] == {}
    assert (bad.status, bad.tasks) == (3, [])
    assert good.before == good.after
    assert bad.before == bad.after


def test_a_composed_profile_can_be_applied_by_hand(write, answer_of, fork_python):
    """`apply` accepts a composed config or its section, or refuses its profile."""
    bad = write({"bad.yaml": "seed: 1\n_target_: os.system\n"})
    source = """
import json, sys, torchrepro
from hydra import compose, initialize
with initialize(version_base=None, config_path=None):
    good = compose(overrides=["+repro=debug-strict", "repro.seed=7"])
    bad = compose(overrides=[f"+repro={sys.argv[1]}"])
with torchrepro.apply(good) as applied:
    import torch
    seen = [torch.initial_seed(), torch.are_deterministic_algorithms_enabled(), applied.digest]
try:
    torchrepro.apply(bad.repro)
except torchrepro.ProfileError as error:
    print(json.dumps([*seen, torch.are_deterministic_algorithms_enabled(), str(error)]))
"""
    *seen, message = answer_of("-c", source, bad, run=fork_python)

    assert [7, True, load("debug-strict", ["seed=7"]).digest, False] == seen
    assert "_target_" in message
    assert "bad.yaml:2" in message
