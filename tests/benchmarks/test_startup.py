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

from torchrepro.console import as_text, table

from .paired import compare, require

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


def _wall(code: str, environment: dict[str, str] | None = None) -> float:
    return _run(_python(code), environment)[0]


def _said(code: str) -> float:
    at_once = "import os, sys; sys.stdout.flush(); os._exit(0)"  # how it ends is not measured
    return float(_run(_python(f"{code}\n{at_once}"))[1])


def _report(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"\n{as_text(title, table(('', 'median'), rows))}")


@pytest.mark.gate
def test_importing_the_package_takes_at_most_2_8_times_starting_python() -> None:
    """`import torchrepro` is little beside what a Python takes to start and to end."""
    bare, ours = partial(_wall, "pass"), partial(_wall, "import torchrepro")
    seen = compare(bare, ours, 2.8)
    rows = [
        ("python -c pass", f"{seen.plain * 1e3:.1f} ms"),
        ("import torchrepro", f"{seen.other * 1e3:.1f} ms"),
    ]
    _report("import", [*rows, seen.cells("ratio", 2.8)])

    require(not seen.refutes(2.8), "2.8 times python -c pass")


@pytest.mark.gate
def test_a_program_without_torch_starts_as_fast_below_run() -> None:
    """Below `torchrepro run` a Python that imports no torch takes at most three times as long."""
    asked = "import json, os; print(json.dumps(dict(os.environ)))"
    below = json.loads(_run([str(SCRIPT), "run", "debug-strict", "--", *_python(asked)])[1])
    bare = partial(_wall, "import random")
    ours = partial(_wall, "import random", below)
    seen = compare(bare, ours, 3)
    rows = [
        ("python", f"{seen.plain * 1e3:.1f} ms"),
        ("the same below run", f"{seen.other * 1e3:.1f} ms"),
    ]
    _report("import random", [*rows, seen.cells("ratio", 3)])

    require(not seen.refutes(3), "three times the same without run")


@pytest.mark.parametrize(
    "words",
    [["list"], pytest.param(["show", "debug-strict"], marks=pytest.mark.gate)],
    ids=" ".join,
)
def test_reading_commands_take_a_part_of_importing_torch(words: list[str]) -> None:
    """`torchrepro list` and `show` finish in 0.38 of the time that `import torch` takes."""
    seen = compare(
        partial(_wall, "import torch"),
        lambda: _run([str(SCRIPT), *words])[0],
        0.38,
        seconds=6,
    )
    rows = [
        ("import torch", f"{seen.plain * 1e3:.0f} ms"),
        ("torchrepro " + " ".join(words), f"{seen.other * 1e3:.0f} ms"),
    ]
    _report("torchrepro " + " ".join(words), [*rows, seen.cells("ratio", 0.38)])

    require(not seen.refutes(0.38), "0.38 of importing torch")


@pytest.mark.gate
def test_apply_costs_at_most_a_tenth_of_the_peer() -> None:
    """`apply("debug-strict")` takes at most 0.1x of transformers' helper, both cold."""
    pytest.importorskip("transformers", reason="the peer is not installed")
    seen = compare(partial(_said, PEER), partial(_said, APPLY), 0.1)
    rows = [
        ('torchrepro.apply("debug-strict")', f"{seen.other * 1e3:.1f} ms"),
        ("transformers.enable_full_determinism(1)", f"{seen.plain * 1e3:.1f} ms"),
    ]
    _report("first call after import torch", [*rows, seen.cells("ratio", 0.1)])

    require(not seen.refutes(0.1), "a tenth of the peer")


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
    bare = partial(_said, FRAMEWORK.format("", framework))
    ours = partial(_said, FRAMEWORK.format(UNDER, framework))
    seen = compare(bare, ours, 1.05)
    rows = [
        (f"from {framework} import Trainer", f"{seen.plain * 1e3:.0f} ms"),
        ("the same under debug-strict", f"{seen.other * 1e3:.0f} ms"),
    ]
    _report(f"importing {framework}", [*rows, seen.cells("ratio", 1.05)])

    require(not seen.refutes(1.05), "1.05 times importing the framework")


def test_apply_reaches_the_end_state_of_the_peer() -> None:
    """The flags are those that transformers' helper sets, inductor's included once it is loaded."""
    pytest.importorskip("transformers", reason="the peer is not installed")
    # What the profile sets is in force when inductor is imported later, as it is here earlier.
    later = "import torchrepro\ntorchrepro.apply('debug-strict')\n" + END_STATE.format("")
    peer = "from transformers import enable_full_determinism\nenable_full_determinism(1)"

    assert _run(_python(later))[1] == _run(_python(END_STATE.format(peer)))[1]


def test_a_whole_process_costs_at_most_1_3_times_importing_torch() -> None:
    """`import torch, torchrepro; torchrepro.apply(...)` takes at most 1.3x of `import torch`."""
    bare = partial(_wall, "import torch")
    ours = partial(_wall, "import torch, torchrepro; torchrepro.apply('debug-strict')")
    seen = compare(bare, ours, 1.3)
    rows = [
        ("import torch", f"{seen.plain * 1e3:.0f} ms"),
        ("import torch, torchrepro; apply", f"{seen.other * 1e3:.0f} ms"),
    ]
    _report("whole process", [*rows, seen.cells("ratio", 1.3)])

    require(not seen.refutes(1.3), "1.3 times importing torch")


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
    late = _environment()
    in_time = partial(_seconds, command, {**late, "PYTHONHASHSEED": "0"})
    seen = compare(in_time, partial(_seconds, command, late), 2)
    rows = [
        ("a Hydra run in time", f"{seen.plain:.2f} s"),
        ("the same, relaunched", f"{seen.other:.2f} s"),
        ("added", f"{seen.other - seen.plain:.2f} s"),
    ]
    _report("relaunch", [*rows, seen.cells("ratio", 2)])

    require(not seen.refutes(2), "twice a run in time")


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    return _run(command, environment)[0]
