"""Faults that lie around the ops: workers, threads, memory that nobody wrote, other ranks."""

import ctypes
import os
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchrepro
from torchrepro import Verdict
from torchrepro.verdict.diagnosis import advice
from torchrepro.verdict.value import Divergence, Kind

from .programs import line_of

TRIES = 40
STEPS = 4
TORCHREPRO = str(Path(sysconfig.get_path("scripts")) / "torchrepro")


def _unequal(folder: Path, program: Callable[[int], Any]) -> tuple[Verdict, Divergence]:
    """Record a program until two runs of it give another result; return where they diverge."""
    results = []
    for run in range(TRIES):
        with torchrepro.record(folder / str(run)):
            results.append(program(run))
        if results[-1] != results[0]:
            verdict = torchrepro.compare(folder / "0", folder / str(run))
            print(f"run {run}:", verdict.first)
            assert verdict.first is not None
            return verdict, verdict.first
    pytest.fail(f"{TRIES} runs gave the same result")


class Noisy(Dataset[torch.Tensor]):
    """Samples to which a generator of the worker's own adds noise, from the third batch on."""

    def __init__(self) -> None:
        self.generator: Any = None

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.generator is None:
            self.generator = np.random.default_rng()
        noise = self.generator.standard_normal() if index >= 8 else 0.0
        return torch.full((3,), index + noise)


def test_a_worker_that_nobody_seeded_is_found_at_its_first_batch(tmp_path: Path) -> None:
    """A worker whose generator the system seeds shows in the first batch that it had a part in."""

    def program(_run: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
        for batch in DataLoader(Noisy(), batch_size=4, num_workers=2):  # noisy loader
            model(batch).sum().backward()
            optimizer.step()
        return model.weight.tolist()[0]

    # The first optimizer of a process imports parts of torch, which in older torch run ops.
    torch.optim.SGD([torch.ones(1, requires_grad=True)])
    _, first = _unequal(tmp_path, program)

    assert (first.step, first.phase, first.op) == (2, "data", "DataLoader")
    assert first.kind is Kind.DATA
    assert first.source == line_of("noisy loader", __file__)


class Reading(nn.Module):
    """Adds what happens to be in memory, at its fourth call."""

    def __init__(self, found: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5000))
        self.found = found
        self.calls = 0

    def forward(self, items: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(5000)
        _put_behind_the_back_of_torch(self.found, buffer)
        self.calls += 1
        if self.calls < 4:
            buffer.zero_()
        return self.weight * items + buffer  # buffer


def _put_behind_the_back_of_torch(value: float, buffer: torch.Tensor) -> None:
    """Have memory hold a value that no op has written.

    What an allocator hands out depends on all that the process did before: here it is chosen.
    """
    (ctypes.c_float * buffer.numel()).from_address(buffer.data_ptr())[:] = [value] * buffer.numel()


def test_memory_that_nothing_had_written_is_found_where_it_is_read(tmp_path: Path) -> None:
    """Memory that an op allocated and nothing wrote shows in the op that reads it."""

    def program(run: int) -> float:
        model = nn.Sequential(nn.Identity(), Reading(float(run + 1)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            loss = model(torch.ones(5000)).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    _, first = _unequal(tmp_path, program)

    assert (first.step, first.phase) == (3, "forward")
    assert (first.module, first.op) == ("1", "aten::add.Tensor")
    assert first.kind is Kind.OUTPUTS
    assert "memory that nothing had written" in first.what
    assert first.source == line_of("buffer", __file__)


def test_a_race_of_two_threads_is_found_at_the_op_they_race_with(tmp_path: Path) -> None:
    """Threads that add to one tensor without a lock diverge in that addition, on one of them."""

    def program(_run: int) -> float:
        seeded = torch.Generator().manual_seed(1)
        total, parts = torch.zeros(20_000), torch.randn(2, 20_000, generator=seeded)
        for _ in range(STEPS):
            gate = threading.Barrier(2)

            def add(part: torch.Tensor, gate: threading.Barrier) -> None:
                gate.wait()
                for number in range(40):
                    total.add_(part, alpha=1 / (number + 3))  # race

            threads = [threading.Thread(target=add, args=(part, gate)) for part in parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            torchrepro.end_step()
        return float(total.double().sum())

    verdict, first = _unequal(tmp_path, program)

    assert not verdict.same
    assert (first.phase, first.op) == ("forward", "aten::add_.Tensor")
    assert first.source == line_of("race", __file__)
    assert first.thread != "MainThread"


def test_another_order_of_reduction_is_found_at_the_reduction(tmp_path: Path) -> None:
    """A sum over more threads diverges at the first sum that is large enough to be shared out."""
    items = torch.randn(1 << 20, generator=torch.Generator().manual_seed(7))

    def program(run: int) -> list[float]:
        torch.set_num_threads(1 + run % 2)
        return [_summed(items[:size]) for size in (10, 100, 1 << 20, 100)]

    assert program(0)[2] != program(1)[2]
    verdict, first = _unequal(tmp_path, program)

    assert (first.step, first.phase, first.op) == (2, "forward", "aten::sum")
    assert first.kind is Kind.OUTPUTS
    assert first.source == line_of("reduction", __file__)
    assert any("threads" in setting.name for setting in verdict.settings)
    advised = advice(verdict)
    assert advised is not None
    assert "threads" in advised.cause


def _summed(items: torch.Tensor) -> float:
    result = items.sum()  # reduction
    torchrepro.end_step()
    return result.item()


RANKS = """
import sys
import numpy, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ill = sys.argv[1] == "ill"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
generator = numpy.random.default_rng(10 + rank)
for step in range(5):
    batch = generator.standard_normal((4, 6), numpy.float32)
    if rank == 1 and step == 3 and ill:
        batch[[0, 2]] = batch[[2, 0]]
    weights = torch.arange(4.0)[:, None]
    (model(torch.from_numpy(batch)) * weights).square().mean().backward()  # model of rank
    optimizer.step()
    optimizer.zero_grad()
print("went on", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_that_got_another_batch_is_named_and_not_the_collective(tmp_path: Path) -> None:
    """Where one rank's batch differs, the verdict names that rank and what read the batch."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS, encoding="utf-8")
    for run in ("well", "again", "ill"):
        _on_two_ranks(tmp_path, run, str(script))

    assert torchrepro.compare(tmp_path / "well", tmp_path / "again").same
    verdict = torchrepro.compare(tmp_path / "well", tmp_path / "ill")
    first = verdict.first

    print(first)
    assert first is not None
    assert (first.rank, first.step, first.phase) == (1, 3, "forward")
    assert (first.module, first.op) == ("", "new tensor")
    assert first.kind is Kind.DATA
    assert first.source == line_of("model of rank", str(script))
    assert verdict.compared.ranks == 2


def _on_two_ranks(folder: Path, run: str, script: str) -> None:
    foreign = ("TORCHREPRO_", "PYTEST_", "RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    address = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    done = subprocess.run(
        [
            *(TORCHREPRO, "run", "seed-only", "--record", run, "--"),
            *(*torchrun, *address, "--local-addr", "127.0.0.1", script, run),
        ],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.count("went on") == 2, done.stderr
