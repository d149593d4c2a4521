"""Recordings of several ranks: one trace each, compared rank by rank."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

import torchrepro
from torchrepro.trace.reader import read_run

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
if "fsdp" in sys.argv:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
else:
    net = DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
numbers = torch.Generator().manual_seed(rank)
for step in range(4):
    batch = torch.randn(4, 8, generator=numbers)
    if "fault" in sys.argv and rank == 1 and step == 2:
        batch.numpy()[[0, 1]] = batch.numpy()[[1, 0]]
    optimizer.zero_grad()
    net(batch).square().sum().backward()
    optimizer.step()
dist.destroy_process_group()
print("went on")
"""


def _record(by_torchrun, folder: Path, *words: str) -> Path:
    run = [sys.executable, "-m", "torchrepro", "run", "seed-only", "--record", str(folder), "--"]
    ended = by_torchrun(PROGRAM, *words, before=run)
    assert ended.went_on == 2, ended.err[-2000:]
    return folder


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_runs_of_two_ranks_are_the_same(tmp_path, by_torchrun, kind) -> None:
    """Under DDP and FSDP each rank leaves a trace, collectives included, and runs compare equal."""
    one, two = (_record(by_torchrun, tmp_path / run, kind) for run in ("one", "two"))

    verdict = torchrepro.compare(one, two)
    assert verdict.same, verdict.first
    assert verdict.compared.ranks == 2
    for trace in read_run(one):
        phases = {site.phase for site in trace.sites.values()}
        assert phases == {"forward", "backward", "optimizer", "collective"}
        assert {"0", "1", "2"} <= {site.module for site in trace.sites.values()}
        trace.close()


def test_the_rank_with_another_batch_is_named(tmp_path, by_torchrun) -> None:
    """Of two ranks that differ, the verdict names the one where it began, at its step."""
    one = _record(by_torchrun, tmp_path / "one", "ddp")
    two = _record(by_torchrun, tmp_path / "two", "ddp", "fault")

    first = torchrepro.compare(one, two).first
    assert first is not None
    assert (first.rank, first.step, first.phase) == (1, 2, "forward")
