"""Programs that others start: each job has its own seed, starts clean, and knows its rank."""

import json
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.slow

APP = """
import json, sys
import hydra

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def main(config):
    import random, numpy, torch, torchrepro
    drawn = [random.random(), float(numpy.random.rand()), torch.rand(()).item()]
    stream = torchrepro.stream("split").seed if config.get("repro") else None
    zeroed = not bool((torch.nn.functional.dropout(torch.ones(64)) == 0).any())
    said = {"seed": torch.initial_seed(), "drawn": drawn, "stream": stream, "zeroed": zeroed}
    with open(f"job{config.job}-{torch.initial_seed()}.json", "w") as file:
        json.dump(said, file)

if __name__ == "__main__":
    main()
"""
LAUNCHERS = {
    "basic": (),
    "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"),
    "submitit": ("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"),
}
PLUGINS = {
    "joblib": "hydra_plugins.hydra_joblib_launcher",
    "submitit": "hydra_plugins.hydra_submitit_launcher",
}


@pytest.fixture
def sweep(hydra_app, run_python, fork_python, tmp_path):
    """Run a sweep under a launcher and return what each job wrote, by its name and seed."""

    def sweep(launcher, *overrides):
        hydra_app(APP, "job: 0\nhydra: {job: {chdir: false}}\n")
        run = fork_python if launcher == "basic" else run_python
        done = run("app.py", "-m", *LAUNCHERS[launcher], *overrides)
        assert done.returncode == 0, done.stderr
        return {
            path.stem: json.loads(path.read_text(encoding="utf-8"))
            for path in tmp_path.glob("job*.json")
        }

    return sweep


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_job_of_a_sweep_has_its_own_seed_and_starts_clean(sweep, launcher):
    """A job draws what its own profile says, whatever jobs ran before or beside it.

    It is as Hydra's own launcher would have it.
    """
    if launcher in PLUGINS and find_spec(PLUGINS[launcher]) is None:
        pytest.skip(f"{PLUGINS[launcher]} is not installed")
    swept = sweep(launcher, "+repro=seed-only", "repro.seed=1,2", "repro.dropout=zero", "job=1,2")
    again = sweep("basic", "+repro=seed-only", "repro.seed=2", "job=3")["job3-2"]

    assert set(swept) == {"job1-1", "job1-2", "job2-1", "job2-2"}
    assert swept["job1-1"]["drawn"] == swept["job2-1"]["drawn"]
    for job in (swept["job1-2"], swept["job2-2"]):
        assert again["drawn"] == job["drawn"] != swept["job1-1"]["drawn"]
        assert again["stream"] == job["stream"] != swept["job1-1"]["stream"]
    assert all(job["zeroed"] for job in swept.values())
    assert not again["zeroed"]


def test_one_stream_is_swept_alone(sweep):
    """`repro.streams.split=1,2` changes that stream from job to job and nothing else."""
    swept = {
        value: sweep("basic", "+repro=seed-only", f"repro.streams.split={value}", "job=1")[
            "job1-1234"
        ]
        for value in (1, 2)
    }

    assert swept[1]["drawn"] == swept[2]["drawn"]
    assert swept[1]["stream"] != swept[2]["stream"]


RAY = """
import json, tempfile
import ray

@ray.remote(max_calls=1)
def train(rank):
    import os
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    import random, numpy, torch, torchrepro
    deterministic = torch.are_deterministic_algorithms_enabled()
    drawn = [random.random(), float(numpy.random.rand()), torch.rand(()).item()]
    return [deterministic, drawn, torchrepro.stream("augment").seed]

with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # its sockets: short paths
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
             _node_ip_address="127.0.0.1")
    print(json.dumps([ray.get(train.remote(rank)) for rank in (0, 1)]))
    ray.shutdown()
"""


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_tasks_of_ray_are_under_the_profile(under, write):
    """Every worker that Ray starts below `torchrepro run` is under the profile, like its driver."""
    write({"driver.py": RAY})

    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    first, second = (under("debug-strict", "driver.py", env=quiet) for _ in range(2))

    assert first.returncode == 0, first.stderr
    tasks = json.loads(first.stdout.splitlines()[-1])
    assert all(deterministic for deterministic, _, _ in tasks)
    assert tasks[0][1] == tasks[1][1]
    assert tasks[0][2] != tasks[1][2]
    assert second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]
