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


KINDS = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import torchrepro

dist.init_process_group("gloo")
rank = dist.get_rank()
alone = [dist.new_group([each]) for each in range(2)][rank]

def unreduced(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future

for kind in sys.argv[2:]:
    with torchrepro.record(os.path.join(sys.argv[1], kind)):
        dist.barrier()  # before either of them writes into the folder
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        whole = net
        if kind == "sharded":
            fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
        elif kind == "alone":
            whole = DistributedDataParallel(net, process_group=alone)
        elif kind not in ("independent", "warmup"):
            whole = DistributedDataParallel(net)
        if kind == "hook":
            whole.register_comm_hook(None, unreduced)
        others = [torch.nn.Parameter(torch.ones(8))] if kind == "own parameters" else []
        optimizer = torch.optim.SGD([*net.parameters(), *others], lr=0.1)
        numbers = torch.Generator().manual_seed(rank)
        for step in range(4):
            batch = torch.randn(4, 8, generator=numbers)
            if kind == "warmup":
                optimizer.param_groups[0]["lr"] = 0.1 * step
            bypassed = (kind, step) in [("later", 2), ("later", 3)] or kind == "bypassed"
            optimizer.zero_grad()
            loss = (net if bypassed else whole)(batch).square().sum()
            for other in others:
                loss = loss + (other * batch).sum()
            loss.backward()
            optimizer.step()
dist.destroy_process_group()
print("went on")
"""


def test_replicas_that_ddp_does_not_keep_equal_are_said(tmp_path, on_two_ranks):
    """The step is named from which on they differ, the first one included.

    Nothing is said of ranks that hold other parameters for a reason: shards, independent trainings
    of one seed, groups of ranks, a hook of the program's own, parameters that are in no model.
    """
    silent = ("sync", "sharded", "independent", "warmup", "alone", "hook", "own parameters")
    ended = on_two_ranks(KINDS, tmp_path, "bypassed", "later", *silent)
    assert ended.stdout.count("went on") == 2, ended.stderr[-2000:]

    said = {
        kind: torchrepro.compare(tmp_path / kind, tmp_path / kind).across_ranks
        for kind in ("bypassed", "later", *silent)
    }

    replicas = "the parameters of ranks 0 and 1"
    assert said["bypassed"][0] == f"A: {replicas} agree as training begins and no longer at step 0"
    assert said["later"][0] == f"A: {replicas} agree at step 1 and no longer at step 2"
    assert {kind: said[kind] for kind in silent} == dict.fromkeys(silent, ())
