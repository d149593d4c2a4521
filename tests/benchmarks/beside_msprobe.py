"""Times steps in turn: plain, recorded, and dumped by msprobe. Run where msprobe is installed.

`python -m benchmarks.beside_msprobe WORKLOAD LEVEL FOLDER` prints what it measured, as JSON, on its
last line. msprobe has one level in a process, and its patches stay in torch.
"""

import inspect
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch

import torchrepro

from .paired import Question, Round, take_turns
from .test_recording import WORKLOADS, slope
from .workloads import Step


def _dumped_by_msprobe(step: Step, level: str, folder: Path) -> Step:
    """Return a step of which msprobe writes statistics and checksums, as its manual has it."""
    from msprobe.pytorch import PrecisionDebugger

    folder.mkdir()
    config = folder / "config.json"
    what = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "md5"}
    task = {"task": "statistics", "rank": [], "step": [], "level": level, "statistics": what}
    config.write_text(json.dumps({**task, "dump_path": str(folder / "dump")}))
    debugger = PrecisionDebugger(config_path=str(config))
    net = inspect.getclosurevars(step).nonlocals["net"]

    def dumped() -> None:
        debugger.start(model=net)
        step()
        debugger.stop()
        debugger.step()

    return dumped


def _timed(step: Step) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run


def _over(one: str, other: str) -> Question:
    def ratio(took: Round) -> float:
        return took[one] / took[other]

    return Question(ratio)


def _measured(workload: str, level: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    make, steps = WORKLOADS[workload]
    step = make()
    folders = (str(folder / f"run{number}") for number in count())
    timers = {
        "plain": _timed(step),
        "torchrepro": slope(step, lambda: torchrepro.record(next(folders)), steps),
        "msprobe": _timed(_dumped_by_msprobe(step, level, folder / "msprobe")),
    }
    questions = {
        "torchrepro / plain": _over("torchrepro", "plain"),
        "msprobe / plain": _over("msprobe", "plain"),
        "torchrepro / msprobe": _over("torchrepro", "msprobe"),
    }
    took, answers = take_turns(timers, list(questions.values()), seconds=0)
    ratios = {name: asdict(seen) for name, seen in zip(questions, answers, strict=True)}
    return {"seconds": dict(took), "ratios": ratios}


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
