"""`device.modules` under DDP: a part runs elsewhere and the ranks train as without it."""

PROGRAM = """
import os, sys
import torch, torchrepro
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrepro.policies import policy
from torchrepro.policies import placement

placement.is_there = lambda *_: False  # the CPU as if it were elsewhere

def train(find_unused):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)),
        nn.Linear(8, 2),
    )
    ranks = DistributedDataParallel(model, find_unused_parameters=find_unused)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        with ranks.no_sync():
            ranks(torch.randn(6, 8, generator=numbers)).sum().backward()
        ranks(torch.randn(6, 8, generator=numbers)).sum().backward()
        optimizer.step()
    return [*model.state_dict().values()]

dist.init_process_group("gloo")
for find_unused in (False, True):
    plain = train(find_unused)
    with torchrepro.apply({"device": {"modules": {PATTERN: "cpu"}}}):
        placed = train(find_unused)
    assert all(map(torch.equal, plain, placed))
ran = [(e.subject, e.what, e.calls) for e in policy.effects() if e.policy == "device.modules"]
assert ran == [("1", "ran on cpu", 6)], ran
print("went on", flush=True)
dist.destroy_process_group()
"""


def test_under_ddp_the_weights_are_those_without_it(on_two_ranks):
    """Names are those of the bare model, and gradients are averaged over ranks as ever."""
    ended = on_two_ranks(PROGRAM.replace("PATTERN", "'1'"))

    assert (ended.returncode, ended.stdout.count("went on")) == (0, 2), ended.stderr


def test_under_ddp_a_pattern_that_matches_nothing_stops_every_rank(on_two_ranks):
    """Every rank stops at its first step, with the pattern and the names that there are."""
    ended = on_two_ranks(PROGRAM.replace("PATTERN", "'nothing'"))

    assert ended.returncode != 0
    assert ended.stdout.count("went on") == 0
    assert "device.modules = nothing: matches no module" in ended.stderr
    assert "called so far: DistributedDataParallel" in ended.stderr
