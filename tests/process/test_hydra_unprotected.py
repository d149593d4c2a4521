"""A profile that Hydra composed and that was never applied is always reported."""

from __future__ import annotations

from functools import partial

import pytest
from hydra.experimental import callbacks

BY_PICKLE = hasattr(callbacks, "PickleJobInfoCallback")  # Hydra 1.3; 1.4 reads the job's folder
PICKLED = """
hydra:
  callbacks:
    pickled: {_target_: hydra.experimental.callbacks.PickleJobInfoCallback}
"""
WITHOUT_CALLBACK = ("~hydra.callbacks.torchrepro",)
COMPOSED = """
import sys
from hydra import compose, initialize

with initialize(version_base=None, config_path=None):
    config = compose(overrides=ASKED or sys.argv[1:])
if APPLIED:
    import torch, torchrepro
    torchrepro.apply(config)
    print(torch.initial_seed())
sys.exit(5 if FAILS else 0)
"""

READING = """
import pickle, torch
from hydra.core.hydra_config import HydraConfig

before = HydraConfig.set_config
config = pickle.load(open("out/.hydra/config.pickle", "rb"))
print(
    config.repro.name,
    torch.are_deterministic_algorithms_enabled(),
    HydraConfig.set_config is before,
)
"""


@pytest.fixture
def composed(write, fork_python):
    """Run a program that composes a config, requested in code or on its command line."""

    def composed(*words, asked=(), applied=False, fails=False, run=fork_python):
        head = f"ASKED, APPLIED, FAILS = {list(asked)}, {applied}, {fails}\n"
        return run(write({"composed.py": head + COMPOSED}), *words)

    return composed


CONFIG = PICKLED if BY_PICKLE else "size: 3\n"
AGAIN = ("--experimental-rerun", "out/.hydra/config.pickle" if BY_PICKLE else "out")


def test_hydra_never_reruns_a_job_without_its_profile(little):
    """Hydra 1.3 would, and is stopped; Hydra 1.4 composes the profile again."""
    words = ("+repro=debug-strict", "repro.seed=7", "hydra.run.dir=out")
    first = little(*words, config=CONFIG)
    second = little(*AGAIN, config=CONFIG)
    short = little(AGAIN[0][:6], AGAIN[1], config=CONFIG)

    assert first.tasks == ["task True 7"]
    for rerun in (second, short):
        assert (rerun.returncode, rerun.tasks) == ((3, []) if BY_PICKLE else (0, first.tasks))
        assert not BY_PICKLE or "to do: torchrepro rerun out\n" in rerun.stderr


@pytest.mark.skipif(not BY_PICKLE, reason="Hydra 1.4 reads no pickle")
def test_a_program_with_an_option_like_hydras_is_left_alone(little, write, fork_python):
    """A program that loads the pickled config of a job gets it, and no profile is applied."""
    little("+repro=debug-strict", "hydra.run.dir=out", config=PICKLED)
    read = fork_python(write({"read.py": READING}), "--exp", "out")

    assert read.stdout == "debug-strict False True\n", read.stderr


def test_hydra_reruns_a_job_of_run_under_its_profile_or_is_stopped(little, fork_under):
    """The profile of `torchrepro run` is part of such a job."""
    run = partial(fork_under, ["seed-only", "seed=8"])
    first = little("hydra.run.dir=out", config=CONFIG, run=run)
    second = little(*AGAIN, config=CONFIG)

    assert first.tasks == ["task False 8"], first.stderr
    assert (second.returncode, second.tasks) in ((0, first.tasks), (3, []))
    assert second.returncode == 0 or "torchrepro rerun" in second.stderr


OFF = {"TORCHREPRO_HYDRA": "0"}


def test_the_plugin_can_be_disabled(little, write):
    """With TORCHREPRO_HYDRA=0 the help of an app and its own group `repro` are unchanged."""
    write({"conf/repro/paper1.yaml": "author: me\n"})
    config = "defaults: [{repro: paper1}, _self_]\n"
    with_group, without = (little("--help", env=env, config=config) for env in ({}, OFF))
    run = little("repro=paper1", env=OFF, config=config)
    added = little("+repro=paper1", env=OFF, config="size: 3\n")

    assert "debug-strict" in with_group.stdout
    assert "repro: paper1\n" in without.stdout
    assert (run.stderr, added.stderr, len(run.tasks + added.tasks)) == ("", "", 2)


@pytest.mark.parametrize(
    "words",
    [
        ("+repro=debug-strict",),
        ("-m", "+repro=seed-only,debug-strict"),
        ("+repro/with=[host-rng]",),
    ],
    ids=" ".join,
)
def test_a_request_is_refused_if_the_plugin_is_disabled(little, words):
    """With TORCHREPRO_HYDRA=0 an app never runs without the requested profile."""
    result = little(*words, env=OFF)

    assert (result.returncode, result.tasks) == (3, [])
    assert "unset TORCHREPRO_HYDRA" in result.stderr
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize("env", ["mine", "null"])
def test_every_job_of_a_sweep_has_its_profile(little, write, env):
    """This is so even if the app replaces a group of Hydra."""
    write({"conf/hydra/env/mine.yaml": "# @package _global_\nhydra: {job: {name: zz}}\n"})
    config = f"defaults: [{{override hydra/env: {env}}}, _self_]\n"
    result = little("-m", "+repro=debug-strict,seed-only", config=config)

    assert result.tasks == ["task True 1234", "task False 1234"], result.stderr


def test_a_job_of_a_sweep_may_call_compose(write, fork_python):
    """A config that a job composes does not stop the next jobs."""
    app = """
import hydra, torch

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    inner = hydra.compose("config", overrides=["size=9"])
    print("task", torch.initial_seed(), config.size, inner.size)

main()
"""
    write({"conf/config.yaml": "defaults: [{repro: seed-only}, _self_]\nsize: 0\n"})
    result = fork_python(write({"app.py": app}), "-m", "size=1,2")
    tasks = [line for line in result.stdout.splitlines() if line.startswith("task")]

    assert (result.returncode, tasks) == (0, ["task 1234 1 9", "task 1234 2 9"]), result.stderr


def test_a_job_without_the_callback_is_reported_at_its_end(little):
    """If the profile was requested and not applied, the run ends with status 3 and names it."""
    asked = little("+repro=seed-only", *WITHOUT_CALLBACK)
    shown = little("+repro=seed-only", *WITHOUT_CALLBACK, "--cfg", "job")
    wrong = little("+repro=seed-only", *WITHOUT_CALLBACK, "nonsense=1")

    assert (asked.returncode, len(asked.tasks)) == (3, 1)
    assert "repro=seed-only" in asked.stderr
    assert (shown.returncode, "torchrepro:" in shown.stderr) == (0, False)
    assert wrong.returncode == 1
    assert "torchrepro:" not in wrong.stderr


def test_a_composed_profile_that_is_never_applied_is_reported_at_exit(composed, fork_under):
    """Requested on the command line it is status 3, else a line, and nothing under `run`."""
    message, asked = "was composed by Hydra but never applied", "+repro=seed-only"
    typed = composed(asked)
    failed = composed(asked, fails=True)
    in_code = composed(asked=[asked])
    applied = composed(asked, "repro.seed=8", applied=True)
    below = composed(asked, run=partial(fork_under, "seed-only"))
    unasked = composed()

    assert (typed.returncode, in_code.returncode) == (3, 0)
    assert failed.returncode != 0
    assert (message in typed.stderr, message in in_code.stderr) == (True, True)
    assert (applied.returncode, applied.stdout, message in applied.stderr) == (0, "8\n", False)
    assert (below.returncode, message in below.stderr) == (0, False)
    assert (unasked.returncode, "torchrepro:" in unasked.stderr) == (0, False)


TWO = """
import torchrepro
from hydra import compose, initialize

with initialize(version_base=None, config_path=None):
    names = "seed-only", "debug-strict"
    composed = [compose(overrides=[f"+repro={name}"]) for name in names]
for config in composed[:APPLIED]:
    with torchrepro.apply(config):
        pass
"""


@pytest.mark.parametrize("applied", [1, 2])
def test_only_the_unapplied_one_of_two_composed_profiles_is_reported(write, fork_python, applied):
    """A program composes two profiles and applies one or both."""
    result = fork_python(write({"two.py": f"APPLIED = {applied}\n{TWO}"}))

    assert result.returncode == 0, result.stderr
    assert ("repro=debug-strict was composed" in result.stderr) == (applied == 1)
    assert "repro=seed-only was composed" not in result.stderr
