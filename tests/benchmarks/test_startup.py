"""What torchrepro costs at start-up, against python, torch and the closest peer, in one run.

Every figure is the median of whole processes; what is compared is timed in pairs.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from .paired import hold

pytestmark = pytest.mark.benchmark

SCRIPT = Path(sys.executable).with_name("torchrepro")
APPLY = """
import time, torch, torchrepro
start = time.perf_counter()
torchrepro.apply("debug-strict")
print(time.perf_counter() - start)
"""
PEER = """
import time, torch
from transformers import enable_full_determinism
start = time.perf_counter()
enable_full_determinism(1)
print(time.perf_counter() - start)
"""
END_STATE = """
import torch, torch._inductor.config as inductor
{}
print(torch.get_deterministic_debug_mode(), torch.backends.cudnn.deterministic,
      torch.backends.cudnn.benchmark, inductor.deterministic)
"""


def _environment() -> dict[str, str]:
    # Compiled modules are kept, as on any machine that runs a program twice.
    dropped = ("PYTHONDONTWRITEBYTECODE", "CUBLAS_WORKSPACE_CONFIG", "PYTEST_VERSION")
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _run(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        stdin=subprocess.DEVNULL,
        env=environment or _environment(),
    )
    return time.perf_counter() - start, done.stdout


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _wall(command: list[str], environment: dict[str, str] | None = None) -> float:
    return _run(command, environment)[0]


def _said(code: str) -> float:
    at_once = "import os, sys; sys.stdout.flush(); os._exit(0)"  # how it ends is not measured
    return float(_run(_python(f"{code}\n{at_once}"))[1])


def _whole(code: str) -> tuple[str, partial[float]]:
    return f"python -c '{code}'", partial(_wall, _python(code))


@pytest.mark.gate
def test_importing_the_package_takes_at_most_2_8_times_starting_python() -> None:
    """`import torchrepro` is little beside what a Python takes to start and to end."""
    hold("import", 2.8, _whole("pass"), _whole("import torchrepro"))


@pytest.mark.gate
def test_a_program_without_torch_starts_as_fast_below_run() -> None:
    """Below `torchrepro run` a Python that imports no torch takes at most three times as long."""
    asked = "import json, os; print(json.dumps(dict(os.environ)))"
    below = json.loads(_run([str(SCRIPT), "run", "debug-strict", "--", *_python(asked)])[1])
    name, alone = _whole("import random")

    hold("import random", 3, (name, alone), ("the same below run", partial(alone, below)))


@pytest.mark.parametrize(
    "words",
    [["list"], pytest.param(["show", "debug-strict"], marks=pytest.mark.gate)],
    ids=" ".join,
)
def test_reading_commands_take_a_part_of_importing_torch(words: list[str]) -> None:
    """`torchrepro list` and `show` finish in 0.38 of the time that `import torch` takes."""
    name = " ".join(["torchrepro", *words])
    reading = partial(_wall, [str(SCRIPT), *words])

    hold(name, 0.38, _whole("import torch"), (name, reading), seconds=6)


@pytest.mark.gate
def test_apply_costs_at_most_a_tenth_of_the_peer() -> None:
    """`apply("debug-strict")` takes at most 0.1x of transformers' helper, both cold."""
    pytest.importorskip("transformers", reason="the peer is not installed")
    peer = ("transformers.enable_full_determinism(1)", partial(_said, PEER))
    ours = ('torchrepro.apply("debug-strict")', partial(_said, APPLY))

    hold("first call after import torch", 0.1, peer, ours)


LAYERS = Path(__file__).parent.parent / "policies"  # known_layers.py lets torchvision be imported
FRAMEWORK = f"""
import sys, time, torch
sys.path.insert(0, {str(LAYERS)!r})
from known_layers import let_torchvision_be_imported
let_torchvision_be_imported()
{{}}
start = time.perf_counter()
from {{}} import Trainer
print(time.perf_counter() - start)
"""
UNDER = "import torchrepro; torchrepro.apply('debug-strict')"


@pytest.mark.parametrize("framework", ["lightning.pytorch", "transformers"])
def test_a_framework_is_imported_as_fast_under_a_profile(framework: str) -> None:
    """Importing a Trainer takes at most 1.05x under a profile, hooks included."""
    if find_spec(framework.partition(".")[0]) is None:
        pytest.skip("the framework is not installed")
    plain, under = (partial(_said, FRAMEWORK.format(first, framework)) for first in ("", UNDER))

    hold(f"from {framework} import Trainer", 1.05, ("plain", plain), ("under debug-strict", under))


def test_apply_reaches_the_end_state_of_the_peer() -> None:
    """The flags are those that transformers' helper sets, inductor's included once it is loaded."""
    pytest.importorskip("transformers", reason="the peer is not installed")
    # What the profile sets is in force when inductor is imported later, as it is here earlier.
    later = "import torchrepro\ntorchrepro.apply('debug-strict')\n" + END_STATE.format("")
    peer = "from transformers import enable_full_determinism\nenable_full_determinism(1)"

    assert _run(_python(later))[1] == _run(_python(END_STATE.format(peer)))[1]


def test_a_whole_process_costs_at_most_1_3_times_importing_torch() -> None:
    """`import torch, torchrepro; torchrepro.apply(...)` takes at most 1.3x of `import torch`."""
    ours = _whole('import torch, torchrepro; torchrepro.apply("debug-strict")')

    hold("whole process", 1.3, _whole("import torch"), ours)


HYDRA = """
import torch
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    pass

main()
"""


def test_a_relaunch_costs_at_most_the_run_once_more(tmp_path: Path) -> None:
    """A Hydra run that begins again takes at most twice as long as one that is in time."""
    program = tmp_path / "app.py"
    program.write_text(HYDRA, encoding="utf-8")
    command = [sys.executable, str(program), "+repro=debug-strict", f"hydra.run.dir={tmp_path}"]
    in_time = partial(_wall, command, _environment() | {"PYTHONHASHSEED": "0"})

    hold("relaunch", 2, ("a Hydra run in time", in_time), ("relaunched", partial(_wall, command)))
