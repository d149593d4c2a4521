"""What a recording costs, beside the other tools that record what a run computes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchrepro
from torchrepro.console import as_text, table

from .paired import Comparison, compare, require
from .workloads import Step, convolutional, tiny_ops, transformer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.benchmark

TOGETHER = {"convolutional": 1, "transformer": 1, "tiny_ops": 50}
"""Steps that are timed as one."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Any]:
    """Return a function that makes a context in which everything is recorded."""
    numbers = iter(range(10**6))

    def record(**asked: Any) -> contextlib.AbstractContextManager[Any]:
        return torchrepro.record(tmp_path / str(next(numbers)), **asked)

    return record


def timed(
    step: Step, context: Callable[[], contextlib.AbstractContextManager[Any]], count: int
) -> Callable[[], float]:
    """Return a function that takes the time of a step within `context`."""

    def run() -> float:
        with context():
            step()  # what a first step sets up is not what a step costs
            start = time.perf_counter()
            for _ in range(count):
                step()
            return (time.perf_counter() - start) / count

    return run


def show(title: str, *rows: tuple[str, ...]) -> None:
    """Print a table of what was measured."""
    print(f"\n{as_text(title, table(('', 'measured'), rows))}")


class Counting(TorchDispatchMode):
    """Counts the ops that torch dispatches, and does nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counting() -> Iterator[Counting]:
    """Count ops; torch's own class wants to be left the way it was entered."""
    mode = Counting()
    with mode:
        yield mode


def debug_mode() -> contextlib.AbstractContextManager[Any]:
    """Torch's own recorder, with modules and hashes, as its documentation has it."""
    from torch.utils._debug_mode import DebugMode

    @contextlib.contextmanager
    def hashing() -> Iterator[None]:
        with (
            DebugMode(record_nn_module=True) as mode,
            DebugMode.log_tensor_hashes(hash_fn="hash_tensor"),
        ):
            yield
            mode.logs.clear()

    return hashing()


PEERS = {
    "torch's DebugMode, modules and hashes": (
        debug_mode,
        importlib.util.find_spec("torch.utils._debug_mode") is not None,
    ),
}


MISSED = pytest.mark.xfail(
    strict=False,
    reason="the bound is asked for and not reached on every machine: the table has the figure",
)


@MISSED
@pytest.mark.parametrize(
    ("make", "level", "bound"),
    [
        (convolutional, "op", 1.20),
        (transformer, "op", 1.15),
        (convolutional, "step", 1.03),
        (transformer, "step", 1.03),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_recording_costs_a_fraction_of_a_step(
    recorded: Any, make: Callable[[], Step], level: str, bound: float
) -> None:
    """A recorded step takes at most so many times as long as a plain one."""
    step = make()
    plain = timed(step, contextlib.nullcontext, 1)
    measured = compare(plain, timed(step, lambda: recorded(level=level), 1), bound, seconds=10)

    show(
        f"{make.__name__}, level {level}, {measured.plain * 1e3:.0f} ms a step",
        measured.cells("recorded / plain", bound),
    )
    require(not measured.refutes(bound), f"{bound} times a plain step")


@pytest.mark.parametrize("make", [convolutional, transformer], ids=lambda make: make.__name__)
def test_other_recorders_cost_more(recorded: Any, make: Callable[[], Step]) -> None:
    """Beside the recorders that torch brings along, in the same process, ours costs less."""
    step = make()
    plain = timed(step, contextlib.nullcontext, 1)
    ours = _ratio(plain, timed(step, recorded, 1))
    rows = [("torchrepro, level op", _words(ours))]
    for name, (context, there) in PEERS.items():
        if not there:
            rows.append((name, "not in this torch"))
            continue
        theirs = _ratio(plain, timed(step, context, 1))
        rows.append((name, _words(theirs)))
        require(ours.median < theirs.median, f"less than {name}")
    show(f"{make.__name__}, recorded / plain", *rows)


def _ratio(plain: Callable[[], float], other: Callable[[], float]) -> Comparison:
    return compare(plain, other, bound=1.0, seconds=6)


def _words(measured: Comparison) -> str:
    return f"{measured.median:.2f} ({measured.low:.2f} to {measured.high:.2f})"


@MISSED
def test_recording_a_tiny_op_costs_a_few_times_what_counting_it_does(recorded: Any) -> None:
    """Where launching ops is all there is to a step, an op is recorded in the time of 3 counted.

    A mode of torch's that only counts ops is the least that seeing each of them can cost.
    """
    step, count, bound = tiny_ops(), TOGETHER["tiny_ops"], 3.0
    with counting() as ops:
        step()
    with counting() as ops:
        step()
    plain = timed(step, contextlib.nullcontext, count)
    bare = _ratio(plain, timed(step, counting, count))
    alone = bare.plain

    def times(other: float, counted: float) -> float:
        return (other - alone) / max(counted - alone, 1e-9)

    measured = compare(
        timed(step, counting, count), timed(step, recorded, count), bound, by=times, seconds=10
    )
    show(
        f"{ops.ops} ops, {alone * 1e3:.2f} ms a step",
        ("a mode that counts ops, an op", f"{(bare.other - alone) / ops.ops * 1e6:.1f} us"),
        ("recording, an op", f"{(measured.other - alone) / ops.ops * 1e6:.1f} us"),
        measured.cells("recording / counting", bound),
    )
    require(not measured.refutes(bound), f"{bound} times what counting costs")


@pytest.mark.parametrize(
    "make", [convolutional, transformer, tiny_ops], ids=lambda make: make.__name__
)
def test_a_record_takes_at_most_a_hundred_bytes(tmp_path: Path, make: Callable[[], Step]) -> None:
    """A trace takes at most 100 bytes per op on disk."""
    step = make()
    with torchrepro.record(tmp_path / "run"):
        for _ in range(20):
            step()
    (path,) = (tmp_path / "run").iterdir()
    from torchrepro.trace.reader import Trace

    trace = Trace(path)
    records = sum(each.records for each in trace.steps.values())
    trace.close()
    each = path.stat().st_size / records
    show(make.__name__, ("bytes per record (at most 100)", f"{each:.1f}"))
    assert each <= 100


def test_nothing_is_left_of_a_recording(recorded: Any) -> None:
    """After a recording, a step takes what it took before, and no hook of ours is in torch."""
    before = _doors()
    step, _count = tiny_ops(), TOGETHER["tiny_ops"]
    with recorded():
        step()

    assert before == _doors()


def _doors() -> tuple[Any, ...]:
    """Return what a recording hooks into."""
    import sys
    import threading

    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    return (
        torch.autograd.backward,
        dataloader._BaseDataLoaderIter.__next__,
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
        len(module._global_forward_hooks),
        threading.getprofile(),
        torch._C._len_torch_dispatch_stack(),
        [finder for finder in sys.meta_path if type(finder).__module__.startswith("torchrepro")],
        os.environ.get("TORCHREPRO_RECORD"),
    )
