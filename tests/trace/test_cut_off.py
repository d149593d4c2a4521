"""Whatever cuts a recording off leaves whole steps behind, as if the process had been killed."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchrepro
from torchrepro import TraceError
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from types import FrameType

STEPS = 2
HERE = Path(torchrepro.__file__).parent / "trace"
MODULES = ("recording", "buffer", "store")
FILES = {str(HERE / f"{name}.py") for name in MODULES}


def program(folder: Path) -> None:
    """Train a layer under a recording that has all that a step may come with."""
    torch.manual_seed(0)
    with torchrepro.record(folder, statistics=True, max_size="300kB"):
        layer = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(STEPS):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()


def whole_steps(folder: Path) -> list[Any]:
    """Return what a trace says of each step that has ended; reads, and so checks, all of it."""
    try:
        (trace,) = read_run(folder)
    except TraceError as error:
        if error.problem.what not in ("no such folder", "holds no trace"):
            raise
        return []
    with closing(trace):
        return [
            (row.step, row.first, row.records, row.digest, row.parameters, row.gradients)
            for row in trace.steps.values()
            if row.finished
        ]


class Cutting:
    """Counts how often the recorder comes to each of its lines; raises KeyboardInterrupt at one."""

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


@pytest.mark.slow
def test_an_interrupt_at_any_line_leaves_whole_steps(tmp_path: Path) -> None:
    """^C wherever the recorder is: the trace is read, and its steps are those of a run without."""

    program(tmp_path / "first")  # what is done once in a process
    counted = Cutting()
    sys.settrace(counted)
    program(tmp_path / "whole")
    sys.settrace(None)
    whole = whole_steps(tmp_path / "whole")
    assert len(whole) == STEPS

    lengths = set()
    for line, often in counted.often.items():
        child = os.fork()  # what is cut off ends with its process
        if not child:
            with suppress(KeyboardInterrupt):
                sys.settrace(Cutting(line, (often + 1) // 2))
                program(tmp_path / "cut")
            os._exit(0)
        os.waitpid(child, 0)
        found = whole_steps(tmp_path / "cut")
        assert found == whole[: len(found)], line
        lengths.add(len(found))
        shutil.rmtree(tmp_path / "cut", ignore_errors=True)

    assert lengths == {*range(STEPS + 1)}


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_moment_is_said_in_one_line(tmp_path: Path) -> None:
    """However little room there is, a trace is whole, or the recording says that it cannot be."""
    answers = Counter()
    for room in range(0, 400, 20):
        child = os.fork()
        if not child:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room << 10, room << 10))
            try:
                program(tmp_path / str(room))
            except TraceError:
                os._exit(3)
            except BaseException:  # noqa: BLE001 - what the test is about
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        answers[os.waitstatus_to_exitcode(status)] += 1

    assert answers.keys() == {0, 3}
