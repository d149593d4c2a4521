"""Times steps in turn: plain, recorded, and dumped by msprobe. Run where msprobe is installed.

`python -m benchmarks.beside_msprobe WORKLOAD LEVEL FOLDER` prints what it measured, as JSON, on its
last line. msprobe has one level in a process, and its patches stay in torch.
"""

import inspect
import json
import sys
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

import torchrepro

from .paired import Question, seconds_of, take_turns
from .test_recording import WORKLOADS, over, slope
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


def _measured(workload: str, level: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    make, steps = WORKLOADS[workload]
    step = make()
    folders = (str(folder / f"run{number}") for number in count())
    timers = {
        "plain": partial(seconds_of, step),
        "torchrepro": slope(step, lambda: torchrepro.record(next(folders)), steps),
        "msprobe": partial(seconds_of, _dumped_by_msprobe(step, level, folder / "msprobe")),
    }
    pairs = (("torchrepro", "plain"), ("msprobe", "plain"), ("torchrepro", "msprobe"))
    figures = dict(over(*pair) for pair in pairs)
    took, answers = take_turns(timers, [Question(of) for of in figures.values()], seconds=0)
    ratios = {name: asdict(seen) for name, seen in zip(figures, answers, strict=True)}
    return {"seconds": dict(took), "ratios": ratios}


if __name__ == "__main__":
    print(json.dumps(_measured(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))
