"""Interrupts a recording at each line of the recorder, in forks, and reads the trace.

Run in an empty folder. Prints the lines after which the steps differ from a whole recording, and
the number of steps in each trace.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import torchrepro
from torchrepro import TraceError
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from types import FrameType

WHOLE = 2  # steps of a recording that nothing cuts off
HERE = Path(torchrepro.__file__).parent / "trace"
FILES = {str(HERE / f"{name}.py") for name in ("recording", "buffer", "store")}


def record(folder: Path) -> None:
    """Train a layer under a recording with all kinds of records and details."""
    torch.manual_seed(0)
    with torchrepro.record(folder, statistics=True, max_size="300kB"):
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(WHOLE):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def whole_steps(folder: Path) -> list[Any]:
    """Return the summary of each step that has ended; reads, and so validates, the whole trace."""
    try:
        (trace,) = read_run(folder)
    except TraceError as error:
        if error.problem.what not in ("no such folder", "contains no trace"):
            raise
        return []
    with closing(trace):
        return [
            (row.step, row.first, row.records, row.digest, row.parameters, row.gradients)
            for row in trace.steps.values()
            if row.finished
        ]


class Cutting:
    """Counts how often each line of the recorder runs; raises KeyboardInterrupt at one line."""

    def __init__(self, line: tuple[str, int] = ("", 0), often: int = 0) -> None:
        self.at, self.left = line, often
        self.often: Counter[tuple[str, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, _value: object) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.often[line] += 1
            if line == self.at:
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt
        return self


def main() -> None:
    """Interrupt at each line, after half of the times that it runs."""
    record(Path("first"))  # for initialization that runs once in a process
    counted = Cutting()
    sys.settrace(counted)
    record(Path("whole"))
    sys.settrace(None)
    whole = whole_steps(Path("whole"))
    assert len(whole) == WHOLE
    wrong, lengths = [], set()
    for line, often in counted.often.items():
        child = os.fork()  # each interrupt in a process
        if not child:
            with suppress(KeyboardInterrupt):
                sys.settrace(Cutting(line, (often + 1) // 2))
                record(Path("cut"))
            os._exit(0)
        os.waitpid(child, 0)
        found = whole_steps(Path("cut"))
        if found != whole[: len(found)]:
            wrong.append(line)
        lengths.add(len(found))
        shutil.rmtree("cut", ignore_errors=True)
    print(json.dumps([wrong, sorted(lengths)]))


if __name__ == "__main__":
    main()
