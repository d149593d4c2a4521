"""Real programs in real processes, started from an environment that torchrepro has no word in."""

import json
import subprocess
import sys
import sysconfig
from functools import partial
from pathlib import Path

import pytest

from torchrepro.knobs.variables import RECORDED

TIMEOUT = 600
CONSOLE_SCRIPT = str(Path(sysconfig.get_path("scripts")) / "torchrepro")
DEPRECATED = {"PYTHONWARNINGS": "ignore:The version_base parameter"}
"""Hydra 1.4 warns of an argument of the apps below, without which 1.3 warns."""

APP = """
import hashlib, json, os, random, sys
import hydra, numpy, torch

NAMES = json.loads(sys.stdin.read() or "[]")

def state():
    rng = repr((random.getstate(), numpy.random.get_state()[1].tolist(),
                torch.get_rng_state().tolist()))
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.deterministic,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "seed": torch.initial_seed(),
        "rng": hashlib.sha256(rng.encode()).hexdigest(),
        "env": {name: os.environ[name] for name in NAMES if name in os.environ},
    }

def say(when):
    print(when, json.dumps(state()), flush=True)

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def main(config):
    say("task")
    torch.rand(1), random.random()
    if config.get("fail_if_deterministic") and state()["deterministic"]:
        raise ValueError("the task itself failed")

if __name__ == "__main__":
    torch.manual_seed(99)
    say("before")
    try:
        main()
    except SystemExit as left:
        say("after")
        raise
    say("after")
"""
SCRIPT = """
import json, os, random
open("started", "w").close()
print(json.dumps([random.random(), hash("abc"), os.environ.get("PYTHONHASHSEED")]))
"""
LITTLE = """
import warnings
import hydra

warnings.filterwarnings("ignore", "The version_base parameter")  # a fork reads no PYTHONWARNINGS

@hydra.main(version_base=None, config_path=CONFIG_PATH, config_name=CONFIG_NAME)
def main(config):
    import torch
    print("task", torch.are_deterministic_algorithms_enabled(), torch.initial_seed())

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def write(tmp_path):
    """Write files, given as relative path -> text, below `tmp_path`; returns the last one."""

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def script(tmp_path):
    """An executable file that starts with the given line."""

    def script(shebang, name="tool"):
        path = tmp_path / name
        path.write_text(f"{shebang}\n{SCRIPT}", encoding="utf-8")
        path.chmod(0o755)
        return path

    return script


@pytest.fixture(scope="session")
def bare(tmp_path_factory):
    """The Python of a virtual environment that has no torchrepro, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=TIMEOUT
    )
    return folder / "bin" / "python"


@pytest.fixture
def run_python(execute):
    """Run Python with these arguments, as in ``run_python("x.py", "a")``."""

    def run_python(*arguments, **options):
        return execute(sys.executable, *arguments, **options)

    return run_python


@pytest.fixture
def answer_of(run_python):
    """Run Python and return the JSON value in the last line that it prints; its status is 0."""

    def answer_of(*arguments, run=run_python, **options):
        result = run(*arguments, **options)

        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout.splitlines()[-1])

    return answer_of


@pytest.fixture
def torchrepro(execute):
    """Run the console command ``torchrepro`` with these arguments."""

    def torchrepro(*arguments, **options):
        return execute(CONSOLE_SCRIPT, *arguments, **options)

    return torchrepro


@pytest.fixture
def under(torchrepro):
    """Run Python under a profile: ``under("seed-only", "x.py")`` is run seed-only -- python x.py.

    Several words before the program are the profile and its overrides: ``["seed-only", "seed=5"]``.
    """

    def under(profile, *arguments, **options):
        words = [profile] if isinstance(profile, str) else profile
        return torchrepro("run", *words, "--", sys.executable, *arguments, **options)

    return under


@pytest.fixture
def fork_torchrepro(fork_python):
    """Run the command as `torchrepro` does, and the Python that it becomes, in forks."""
    return partial(fork_python, "-m", "torchrepro")


@pytest.fixture
def fork_under(fork_torchrepro):
    """Run Python under a profile as `under` does, in forks of one that has torch."""

    def fork_under(profile, *arguments, **options):
        words = [profile] if isinstance(profile, str) else profile
        return fork_torchrepro("run", *words, "--", sys.executable, *arguments, **options)

    return fork_under


@pytest.fixture
def hydra_app(write):
    """Write app.py, a Hydra app with this body and, if there is any, its own config."""

    def hydra_app(source, config):
        place = (None, None) if config is None else ("conf", "config")
        write({"app.py": f"CONFIG_PATH, CONFIG_NAME = {place!r}\n{source}"})
        if config is not None:
            write({"conf/config.yaml": config})

    return hydra_app


class Ended:
    """What an app printed and how it ended."""

    def __init__(self, result):
        self.status = result.returncode
        self.stdout = result.stdout
        self.stderr = result.stderr
        lines = [line.partition(" ") for line in result.stdout.splitlines()]
        self.tasks = [json.loads(text) for when, _, text in lines if when == "task"]
        self.before = next(json.loads(text) for when, _, text in lines if when == "before")
        self.after = next(json.loads(text) for when, _, text in lines if when == "after")


@pytest.fixture
def app(hydra_app, fork_python):
    """Run the app that prints its state before, in and after its task."""

    def app(*overrides, env=None, config=None, run=fork_python):
        hydra_app(APP, config)
        env = {**DEPRECATED, **(env or {})}
        return Ended(run("app.py", *overrides, env=env, stdin=json.dumps(RECORDED)))

    return app


@pytest.fixture
def little(hydra_app, fork_python):
    """Run a small app; the lines that its tasks print are in `tasks` of the result.

    Its PYTHONHASHSEED is exported, so that no strict profile has it begin again.
    """

    def little(*overrides, env=None, config=None, run=fork_python):
        hydra_app(LITTLE, config)
        result = run("app.py", *overrides, env={"PYTHONHASHSEED": "0", **(env or {})})
        result.tasks = [line for line in result.stdout.splitlines() if line.startswith("task")]
        return result

    return little
