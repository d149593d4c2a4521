"""Nothing that a program does before its imports, and no config of its own, loses the profile."""

import json
from functools import partial

import pytest

from torchrepro import plan

PROBING = """
import importlib.util, json
for name in ("torch", "numpy", "numpy.random", "random"):
    importlib.util.find_spec(name)
import random, numpy, torch
print(json.dumps([torch.are_deterministic_algorithms_enabled(), torch.initial_seed(),
                  random.random(), numpy.random.rand()]))
"""
NUMBERS_OF_1234 = [True, 1234, 0.9664535356921388, 0.1915194503788923]


def test_a_library_that_is_only_looked_for_is_waited_for_on(under):
    """Probing for a module, as many libraries do, does not take its knobs away."""
    done = under("debug-strict", "-c", PROBING)

    assert json.loads(done.stdout) == NUMBERS_OF_1234


def test_a_damaged_profile_stops_the_process(run_python):
    """A process whose inherited profile cannot be read ends with 3 and without a traceback."""
    code = "import torchrepro.bootstrap as b; b.put_in_force_on_import(); import torch; print('on')"
    done = run_python("-c", code, env={"TORCHREPRO_PROFILE": "{bad"})

    assert (done.returncode, done.stdout) == (3, "")
    assert "TORCHREPRO_PROFILE" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_app_with_an_environment_group_of_its_own_is_protected(little, write):
    """Replacing Hydra's group `hydra/env` does not switch the callback off, in a sweep neither."""
    write({"conf/hydra/env/prod.yaml": '# @package _global_\nhydra: {job: {env_set: {X: "1"}}}\n'})
    config = "defaults: [_self_, {override hydra/env: prod}]\nx: 1\n"

    single = little("+repro=debug-strict", config=config)
    swept = little("-m", "+repro=debug-strict,seed-only", config=config)

    assert single.tasks == ["task True 1234"]
    assert swept.tasks == ["task True 1234", "task False 1234"]


def test_a_job_under_run_is_wholly_under_the_profile(little, under, tmp_path):
    """The manifest of a job under `run` has a row for every knob of the profile."""
    result = little("+repro=debug-strict", "hydra.run.dir=out", run=partial(under, "debug-strict"))
    manifest = json.loads((tmp_path / "out/.hydra/repro.json").read_text(encoding="utf-8"))

    assert result.tasks == ["task True 1234"], result.stderr
    assert len(manifest["report"]["knobs"]) == len(plan("debug-strict").steps)


@pytest.mark.parametrize("words", [["timeout", "300", "echo"], ["nice", "echo"], ["env", "echo"]])
def test_a_wrapped_command_that_is_no_python_is_started(torchrepro, words):
    """Words that only look like an isolated Python stop no command."""
    done = torchrepro("run", "seed-only", "--", *words, "python", "-E")

    assert (done.returncode, done.stdout) == (0, "python -E\n")


@pytest.mark.parametrize("words", [["show", "seed-only", "--", "seed=tru"], ["list", "--", "junk"]])
def test_nothing_after_two_dashes_is_dropped(torchrepro, words):
    """Only `run` takes what follows `--` for a command; elsewhere it is judged like the rest."""
    assert torchrepro(*words).returncode == 2
