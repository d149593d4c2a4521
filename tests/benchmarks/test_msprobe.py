"""What a recording costs beside msprobe, Ascend's recorder, in an environment of its own."""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from .paired import Estimate, require, show

pytestmark = pytest.mark.benchmark

PACKAGE = "mindstudio-probe"
HELD = ("torch", "numpy")
"""What msprobe has to run with as it is here: it may not bring another version along."""

TESTS = Path(__file__).parents[1]
INSTALLING, MEASURING = 300, 600
"""Seconds."""

Python = Callable[..., str]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


@pytest.fixture(scope="module")
def with_msprobe(tmp_path_factory: pytest.TempPathFactory) -> Python:
    """Return a function that runs Python where msprobe is installed, and returns what it prints.

    The environment is new, sees the packages of this one behind its own, and goes with the test.
    """
    folder = tmp_path_factory.mktemp("msprobe")
    python = folder / "bin" / "python"

    def run(*arguments: str, seconds: int = MEASURING) -> str:
        done = subprocess.run(
            [str(python), *arguments],
            env=os.environ | {"PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(_last_line(done.stderr))
        return done.stdout

    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        _see_packages_of_this_environment(folder)
        held = [f"{name}=={importlib.metadata.version(name)}" for name in HELD]
        run("-m", "pip", "install", "-q", PACKAGE, *held, seconds=INSTALLING)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        pytest.skip(f"{PACKAGE} cannot be installed here: {error}")
    try:
        run("-c", "import msprobe.pytorch", seconds=INSTALLING)
    except (subprocess.SubprocessError, RuntimeError) as error:
        pytest.skip(f"{PACKAGE} is installed and cannot be imported beside this torch: {error}")
    return run


def _see_packages_of_this_environment(folder: Path) -> None:
    variables = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", variables))
    here = sysconfig.get_path("purelib")
    line = f"import site; site.addsitedir({here!r})\n"
    (packages / "first_environment.pth").write_text(line)


@pytest.mark.parametrize("level", ["L1", "mix"])
@pytest.mark.parametrize("workload", ["convolutional", "transformer", "tiny_ops"])
def test_msprobe_costs_more(
    with_msprobe: Python, tmp_path: Path, workload: str, level: str
) -> None:
    """A recorded step takes less time than one of which msprobe dumps checksums, in turn.

    msprobe sees calls of Python's functions and what comes back to them, no kernels of the backward
    pass; it reads the inputs of each call again.
    """
    arguments = ("-m", "benchmarks.beside_msprobe", workload, level, str(tmp_path))
    measured: dict[str, Any] = json.loads(_last_line(with_msprobe(*arguments)))
    ratios = {name: Estimate(**seen) for name, seen in measured["ratios"].items()}
    rows: Sequence[tuple[str, str]] = [
        *((name, f"{took * 1e3:.2f} ms a step") for name, took in measured["seconds"].items()),
        *((name, str(seen)) for name, seen in ratios.items()),
    ]
    show(f"{workload}, msprobe at level {level}", rows)

    require(ratios["torchrepro / msprobe"].median < 1, "less than msprobe")
