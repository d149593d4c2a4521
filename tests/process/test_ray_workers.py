"""Workers of Ray are under the profile of their driver, whoever started Ray, or it is said."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
PATIENCE = 300

PROGRAM = """
import json, os, sys
import ray

def facts():
    import os, sys
    early = "torch" in sys.modules
    import random, numpy, torch, torchrepro
    return {
        "early": early,
        "order of sets": hash("a"),
        "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "flag": torch.are_deterministic_algorithms_enabled(),
        "drawn": [random.random(), float(numpy.random.rand()), torch.rand(()).item()],
        "stream": torchrepro.stream("sample-0").seed,
        "kept": [os.environ.get(name) for name in ("OF_THE_PROGRAM", "OWN", "OF_THE_HOOK")],
    }

@ray.remote
class Actor:
    def facts(self):
        return facts()

def main(init=ray.init):
    def set_up():
        import os
        os.environ["OF_THE_PROGRAM"] = "set up"

    given = {"worker_process_setup_hook": set_up, "env_vars": {"OWN": "given"}}
    init(os.environ["CLUSTER"], runtime_env=given, log_to_driver=False)
    in_actor = ray.get(Actor.remote().facts.remote())
    own = {"env_vars": {"OWN": "of the task", "PYTHONPATH": "/nowhere"}}
    in_task = ray.get(ray.remote(facts).options(runtime_env=own).remote())
    print(json.dumps({"actor": in_actor, "task": in_task, "hash here": hash("a")}))
    ray.shutdown()
"""
HOOK = """
def add(runtime_env):
    env_vars = {**(runtime_env or {}).get("env_vars", {}), "OF_THE_HOOK": "added"}
    return {**(runtime_env or {}), "env_vars": env_vars}
"""
APP = """
import os
import hydra, ray
from program import main
from ray import init

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def job(config):
    main(init)  # as it was imported before the profile

if __name__ == "__main__":
    job()
    print("after", os.environ["RAY_RUNTIME_ENV_HOOK"], ray.init is init, len(os.environ))
"""
LACKING = """
import os, sys, threading
import ray

told = threading.Event()

class Listening:  # Ray prints what workers say when it has read their logs, a task's end or not
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)
        if "cannot import" in text:
            told.set()
    def __getattr__(self, name):
        return getattr(self.stream, name)

sys.stdout, sys.stderr = Listening(sys.stdout), Listening(sys.stderr)
ray.init(os.environ["CLUSTER"], runtime_env={"env_vars": {"PYTHONPATH": os.environ["LACKING"]}})
try:
    print("task:", ray.get(ray.remote(max_retries=0)(lambda: "ran").remote()))
finally:
    told.wait(PATIENCE)
"""
NOT_RAY = """
def init():
    return "its own"
"""
STARTING = """
import subprocess, sys
import ray, torchrepro

torchrepro.apply("seed-only")
child = "import sys; sys.path += %r.split(); import ray; ray.init(sys.argv[1]); print('there')"
site = next(path for path in sys.path if ray.__file__.startswith(path + "/ray/"))
print(subprocess.check_output([sys.executable, "-S", "-c", child % site, sys.argv[1]], text=True))
"""
DEAF = {
    "a variable of its own": (
        "ray.init(os.environ['CLUSTER'],"
        " runtime_env={'env_vars': {'CUBLAS_WORKSPACE_CONFIG': ':0:0'}})",
        "CUBLAS_WORKSPACE_CONFIG is :0:0 in it",
    ),
    "a client": ("ray.init('ray://127.0.0.1:1')", "no set-up hook for a client"),
    "a hook named later": (
        "os.environ['RAY_RUNTIME_ENV_HOOK'] = 'hook.add'; taken(os.environ['CLUSTER']);"
        " ray.init(ignore_reinit_error=True)",
        "Ray was started before the profile, or dropped its runtime environment",
    ),
}
"""Programs whose workers cannot get a profile, and what is said of each."""


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray that was started before any driver, under no profile."""
    ray = Path(sys.executable).with_name("ray")
    # Ports that nobody has: another Ray may start at the same time.
    start = ("start", "--head", "--block", "--port=0", "--node-ip-address=127.0.0.1")
    own = ("--min-worker-port=0", "--max-worker-port=0")
    small = ("--num-cpus=3", "--include-dashboard=false", "--disable-usage-stats")
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:  # sockets: short paths
        head = subprocess.Popen(
            [str(ray), *start, *own, *small, f"--temp-dir={folder}"],
            env={**os.environ, **QUIET},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _address_of(head, Path(folder))
        finally:
            head.terminate()  # it ends what it has started
            head.wait(timeout=PATIENCE)
            with suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)


def _address_of(head, folder):
    """Return the address of a Ray, which it writes down once it has started."""
    until = time.monotonic() + PATIENCE
    written = folder / "ray_current_cluster"
    while not (address := written.read_text().strip() if written.exists() else ""):
        assert head.poll() is None, "Ray has not started"
        assert time.monotonic() < until
        time.sleep(0.1)
    return address


def facts_of(done):
    """Return what the program printed, which ended well."""
    assert done.returncode == 0, done.stderr
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def test_tasks_and_actors_of_a_running_cluster_are_under_the_profile_from_before_torch(
    under, write, cluster
):
    """Variables, flags and seeds hold in workers that did not inherit them from the driver.

    Two runs draw the same numbers in the same actor; what the program gives to Ray itself stays.
    """
    write({"hook.py": HOOK, "program.py": PROGRAM})
    write({"driver.py": "import program\nprogram.main()\n"})
    env = {**QUIET, "CLUSTER": cluster, "RAY_RUNTIME_ENV_HOOK": "hook.add"}
    first, second = (facts_of(under("debug-strict", "driver.py", env=env)) for _ in range(2))

    for worker in (first["actor"], first["task"]):
        assert not worker["early"]
        assert worker["order of sets"] == first["hash here"]
        assert worker["cublas"] == ":4096:8"
        assert worker["flag"]
    assert first["actor"]["kept"] == ["set up", "given", "added"]
    assert first["task"]["kept"] == ["set up", "of the task", "added"]
    assert second == first


def test_a_job_of_hydra_hands_its_profile_to_ray_and_takes_it_back(
    run_python, hydra_app, write, cluster
):
    """`+repro=` reaches workers as `run` does; afterwards Ray and its variables are as before."""
    write({"hook.py": HOOK, "program.py": PROGRAM})
    hydra_app(APP, None)
    env = {**QUIET, "CLUSTER": cluster, "RAY_RUNTIME_ENV_HOOK": "hook.add"}
    job = ("+repro=debug-strict", "repro.on_late=warn")
    with_profile, without = (run_python("app.py", *words, env=env) for words in (job, ()))

    workers = facts_of(with_profile)
    others = facts_of(without)
    for worker in (workers["actor"], workers["task"]):
        assert worker["flag"]
        assert not worker["early"]
        assert worker["drawn"] == workers["task"]["drawn"]
        assert worker["stream"] == workers["task"]["stream"]
        assert worker["order of sets"] == workers["task"]["order of sets"]
    assert others["task"]["drawn"] != workers["task"]["drawn"]
    assert others["task"]["flag"] is False
    assert others["task"]["kept"] == workers["task"]["kept"] == ["set up", "of the task", "added"]
    assert with_profile.stdout.splitlines()[-1] == without.stdout.splitlines()[-1]


@pytest.mark.parametrize("deaf", DEAF)
def test_workers_that_get_no_profile_are_said_and_stop_a_strict_run(deaf, under, write, cluster):
    """A line names the reason and what to do, and a profile that promises more than seeds ends."""
    call, reason = DEAF[deaf]
    write({"hook.py": HOOK})
    write({"driver.py": f"import os, ray\ntaken = ray.init.__wrapped__\n{call}\nprint('went on')"})

    done = under("debug-strict", "driver.py", env={**QUIET, "CLUSTER": cluster})

    assert re.search("workers of Ray are not (fully )?under debug-strict: ", done.stderr)
    assert reason in done.stderr
    assert "\n  to do: " in done.stderr
    assert (done.returncode, done.stdout) == (3, "")


@pytest.mark.parametrize("profile", ["seed-only", "debug-strict"])
def test_a_worker_without_torchrepro_says_so_and_fails_under_a_strict_profile(
    profile, under, write, cluster, tmp_path
):
    """Its Python is named; under `seed-only` the task runs, and Ray ends a strict program."""
    write({"lacking/torchrepro/__init__.py": "raise ImportError('none here')\n"})
    write({"driver.py": LACKING.replace("PATIENCE", str(PATIENCE))})
    env = {**QUIET, "CLUSTER": cluster, "LACKING": str(tmp_path / "lacking")}

    done = under(profile, "driver.py", env=env)

    said = next(line for line in (done.stderr + done.stdout).splitlines() if "cannot" in line)
    assert f"torchrepro: this worker of Ray is not under {profile}: {sys.prefix}" in said
    assert said.endswith("cannot import torchrepro: none here")
    assert ("task: ran" in done.stdout) == (profile == "seed-only")
    assert (done.returncode == 0) == (profile == "seed-only")


def test_a_python_without_torchrepro_below_a_program_uses_ray_as_ever(run_python, write, cluster):
    """Nothing that a program under a profile leaves in its environment needs torchrepro there."""
    done = run_python(write({"starting.py": STARTING}), cluster, env=QUIET)

    assert done.stdout.split() == ["there"], done.stderr


def test_a_module_of_that_name_which_is_not_ray_is_left_alone(fork_python, write):
    """What is called `ray` and is another package works under a profile as without."""
    write({"ray.py": NOT_RAY})
    program = "import torchrepro\ntorchrepro.apply('seed-only')\nimport ray\nprint(ray.init())\n"
    done = fork_python(write({"program.py": program}))

    assert done.stdout == "its own\n", done.stderr
