"""Recordings of several ranks: one trace each, compared rank by rank."""

import sys

import pytest

import torchrepro
from torchrepro.trace.reader import read_run

PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

assert torch.initial_seed() == 1234
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
    if step == 1:
        model, state = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": state}, checkpoint_id="checkpoint")
        dcp.load({"model": model, "optimizer": state}, checkpoint_id="checkpoint")
        set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
dist.destroy_process_group()
print("went on")
"""


RECORDED = """
import runpy, sys
import torchrepro

torchrepro.apply("seed-only")
with torchrepro.record(sys.argv[1]):
    runpy.run_path("program.py", run_name="__main__")
"""
RUN = (sys.executable, "-m", "torchrepro", "run", "seed-only", "--record")


@pytest.fixture
def record(tmp_path, on_two_ranks):
    """Record the program on two ranks, in a folder of this name."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def record(name, *words):
        ended = on_two_ranks(RECORDED, tmp_path / name, *words)
        assert ended.stdout.count("went on") == 2, ended.stderr[-2000:]
        return tmp_path / name

    return record


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_runs_of_two_ranks_are_compared_rank_by_rank(tmp_path, record, by_torchrun, kind):
    """Under DDP and FSDP each rank leaves a trace, collectives included, and runs compare equal.

    The verdict names the rank with another batch, at its step. What `torch.distributed.checkpoint`
    has the ranks send each other is no difference, nor is it one that `torchrepro run` and torchrun
    started one of them, with the profile in force.
    """
    one = tmp_path / "one"
    if kind == "ddp":
        ended = by_torchrun(tmp_path / "program.py", kind, before=(*RUN, one, "--"))
        assert ended.stdout.count("went on") == 2, ended.stderr[-2000:]
    else:
        record("one", kind)
    two, other = record("two", kind), record("other", kind, "fault")

    verdict = torchrepro.compare(one, two)
    assert verdict.same, verdict.first
    assert verdict.compared.ranks == 2
    for trace in read_run(one):
        phases = {site.phase for site in trace.sites.values()}
        assert phases == {"forward", "backward", "optimizer", "collective"}
        assert {"0", "1", "2"} <= {site.module for site in trace.sites.values()}
        trace.close()
    first = torchrepro.compare(one, other).first
    assert (first.rank, first.step, first.phase) == (1, 2, "forward")
