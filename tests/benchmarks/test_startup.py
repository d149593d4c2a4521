"""What torchrepro costs at start-up, against python, torch and the closest peer, in one run.

Every figure is the median of whole processes, the two sides of a ratio taken in turn, so that a
busy moment of the machine meets both.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrepro.tables import as_text, table

pytestmark = pytest.mark.benchmark

ROUNDS = 9
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


def _run(command: list[str]) -> tuple[float, str]:
    """Return the wall time of a whole process in seconds, and what it printed."""
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=_environment()
    )
    return time.perf_counter() - start, done.stdout


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _paired_wall(one: list[str], two: list[str]) -> tuple[float, float]:
    """Return the median wall times of two commands run in turn, in seconds."""
    _run(one), _run(two)
    pairs = [(_run(one)[0], _run(two)[0]) for _ in range(ROUNDS)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def _report(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"\n{as_text(title, table(('', 'median'), rows))}")


def test_import_adds_at_most_20_ms() -> None:
    """`import torchrepro` adds at most 20 ms to `python -c pass`."""
    bare, ours = _paired_wall(_python("pass"), _python("import torchrepro"))
    added = ours - bare
    rows = [
        ("python -c pass", f"{bare * 1e3:.1f} ms"),
        ("import torchrepro", f"{ours * 1e3:.1f} ms"),
    ]
    _report("import", [*rows, ("added (at most 20 ms)", f"{added * 1e3:.1f} ms")])

    assert added <= 0.020


@pytest.mark.parametrize("words", [["list"], ["show", "debug-strict"]], ids=" ".join)
def test_reading_commands_take_at_most_600_ms(words: list[str]) -> None:
    """`torchrepro list` and `show` finish within 0.6 s of wall time."""
    command = [str(SCRIPT), *words]
    _run(command)
    wall = statistics.median(_run(command)[0] for _ in range(ROUNDS))
    _report("torchrepro " + " ".join(words), [("wall (at most 600 ms)", f"{wall * 1e3:.0f} ms")])

    assert wall <= 0.6


def test_apply_costs_at_most_a_tenth_of_the_peer() -> None:
    """`apply("debug-strict")` takes at most 0.1x of transformers' helper, both cold."""
    pytest.importorskip("transformers", reason="the peer is not installed")
    _run(_python(APPLY)), _run(_python(PEER))
    pairs = [(float(_run(_python(APPLY))[1]), float(_run(_python(PEER))[1])) for _ in range(ROUNDS)]
    ours = statistics.median(p[0] for p in pairs)
    peer = statistics.median(p[1] for p in pairs)
    rows = [
        ('torchrepro.apply("debug-strict")', f"{ours * 1e3:.1f} ms"),
        ("transformers.enable_full_determinism(1)", f"{peer * 1e3:.1f} ms"),
        ("ratio (at most 0.1)", f"{ours / peer:.3f}"),
    ]
    _report("first call after import torch", rows)

    assert ours / peer <= 0.1


def test_apply_reaches_the_end_state_of_the_peer() -> None:
    """The flags are those that transformers' helper sets, inductor's included once it is loaded."""
    pytest.importorskip("transformers", reason="the peer is not installed")
    # What the profile sets is in force when inductor is imported later, as it is here earlier.
    later = "import torchrepro\ntorchrepro.apply('debug-strict')\n" + END_STATE.format("")
    peer = "from transformers import enable_full_determinism\nenable_full_determinism(1)"

    assert _run(_python(later))[1] == _run(_python(END_STATE.format(peer)))[1]


def test_a_whole_process_costs_at_most_1_3_times_importing_torch() -> None:
    """`import torch, torchrepro; torchrepro.apply(...)` takes at most 1.3x of `import torch`."""
    bare, ours = _paired_wall(
        _python("import torch"),
        _python("import torch, torchrepro; torchrepro.apply('debug-strict')"),
    )
    rows = [
        ("import torch", f"{bare * 1e3:.0f} ms"),
        ("import torch, torchrepro; apply", f"{ours * 1e3:.0f} ms"),
        ("ratio (at most 1.3)", f"{ours / bare:.3f}"),
    ]
    _report("whole process", rows)

    assert ours / bare <= 1.3
