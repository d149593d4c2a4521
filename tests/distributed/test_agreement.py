"""Ranks compare what they have in force before the first step, and stop where it differs.

They compare again where a second profile, or a second process group, comes in force.
"""

import pytest

from torchrepro.application.rank_agreement import note_unpinned_sums

HEAD = """
import os, time, torch, torchrepro
import torch.distributed as dist
rank = int(os.environ["RANK"])
"""
TAIL = """
dist.all_reduce(torch.ones(1))
print("went on", flush=True)
dist.destroy_process_group()
time.sleep(1)
"""
STEP = """
dist.init_process_group("gloo")
applied = torchrepro.apply("seed-only", OVERRIDES)
weight = torch.zeros(1, requires_grad=True)
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight])
optimizer.step()
"""
START = """
from torch.distributed import init_process_group
applied = torchrepro.apply("seed-only", OVERRIDES)
init_process_group("gloo")
"""


def _program(start, overrides):
    return HEAD + start.replace("OVERRIDES", overrides) + TAIL


@pytest.mark.parametrize(
    ("start", "first", "other", "named"),
    [
        (
            START,
            ["backends.cudnn.benchmark=true"],
            ["backends.cudnn.benchmark=false"],
            ["backends.cudnn.benchmark: true on rank 0, false on rank 1"],
        ),
        (STEP, ["dropout=keep"], ["dropout=zero"], ["dropout: keep on rank 0, zero on rank 1"]),
        (
            START,
            ["seed=7", "streams.a=1", "ranks=same"],
            ["seed=8", "streams.a=2", "ranks=distinct"],
            [
                "ranks: same on rank 0, distinct on rank 1",
                "seed plan: ranks: same on rank 0, distinct on rank 1",
                "seed plan: seed: 7 on rank 0, 8 on rank 1",
                "seed plan: streams: {'a': 1} on rank 0, {'a': 2} on rank 1",
                "streams: {'a': 1} on rank 0, {'a': 2} on rank 1",
            ],
        ),
    ],
    ids=["a knob as the group is made", "a knob at a step", "the seed plan"],
)
def test_ranks_that_differ_stop_and_name_only_what_differs(
    on_two_ranks, start, first, other, named
):
    """Knobs, seeds and policies that differ between ranks stop all of them, and are named."""
    ended = on_two_ranks(_program(start, f"{[first, other]}[rank]"))

    assert ended.returncode != 0
    assert "went on" not in ended.stdout
    lines = {line.strip() for line in ended.stderr.splitlines() if " on rank 0, " in line}
    assert sorted(lines) == named


def test_a_rank_without_a_profile_is_named(on_two_ranks):
    """A rank that has no profile in force does not answer, and the others say which it is."""
    quick = "import torchrepro.application.rank_agreement as a; from datetime import timedelta\n"
    quick += "a.TIMEOUT = timedelta(seconds=3)\n"
    start = quick + "applied = rank == 0 and torchrepro.apply('seed-only')\n"
    start += 'dist.init_process_group("gloo")\n'

    ended = on_two_ranks(HEAD + start + "time.sleep(6 * rank)\n" + TAIL)

    assert ended.returncode != 0
    assert "rank 1 of 2 did not send its settings (waited at most 3 s)" in ended.stderr


def test_under_hydra_a_disagreement_ends_without_a_traceback(by_torchrun):
    """Under Hydra the ranks end with status 3 and name the key, without a traceback of theirs."""
    program = """
import os, sys
import hydra, torch
import torch.distributed as dist
sys.argv.append(f"repro.seed={os.environ['RANK']}")

@hydra.main(version_base=None, config_path=None)
def main(config):
    dist.init_process_group("gloo")
    print("went on", flush=True)

main()
"""
    ended = by_torchrun(program, "+repro=seed-only")

    assert "went on" not in ended.stdout
    assert "seed plan: seed: 0 on rank 0, 1 on rank 1" in ended.stderr
    assert "exitcode  : 3" in ended.stderr
    assert "torchrepro.ApplyError" not in ended.stderr


def test_a_first_step_after_the_group_was_made_ends_with_other_hooks_present(fork_python):
    """The hook that compares stays registered: torch refuses changes while it calls its hooks."""
    ended = fork_python(
        "-c",
        """
import torch, torchrepro
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with torchrepro.apply("seed-only"):
    register_optimizer_step_pre_hook(lambda *_: print("called last"))
    weight = torch.zeros(1, requires_grad=True)
    torch.optim.SGD([weight]).step()
""",
        env={"GLOO_SOCKET_IFNAME": "lo"},
    )

    assert (ended.returncode, ended.stdout) == (0, "called last\n"), ended.stderr


def test_undo_takes_the_comparison_back(on_two_ranks):
    """After the profile is taken back, ranks with different ones in force before go on."""
    start = "torchrepro.apply('seed-only', [f'seed={rank}']).restore()\n"
    check = "assert dist.init_process_group is dist.distributed_c10d.init_process_group\n"

    ended = on_two_ranks(HEAD + start + check + 'dist.init_process_group("gloo")\n' + TAIL)

    assert (ended.returncode, ended.stdout.count("went on")) == (0, 2), ended.stderr


def test_a_collective_library_with_an_order_of_its_own_is_named(capsys, monkeypatch):
    """Where the variables that fix a library's order of sums are not set, they are named."""
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    note_unpinned_sums("cuda:nccl,cpu:gloo")

    assert "nccl" in (said := capsys.readouterr().err)
    assert "NCCL_ALGO not set" in said
    note_unpinned_sums("gloo")
    assert capsys.readouterr().err == ""


AGAIN_HEAD = f"""{HEAD}
weight = torch.zeros(1, requires_grad=True)
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight])

def make(number):
    place = f"file://{{os.getcwd()}}/group-{{number}}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)

def end():
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)
"""
NESTED = """
with torchrepro.apply("seed-only"):
    make(0)
    optimizer.step()
    with torchrepro.apply("seed-only", OVERRIDES):
        optimizer.step()
        print("went on", flush=True)
    optimizer.step()
    end()
"""
AGAIN = """
for number, overrides in enumerate(([], OVERRIDES)):
    with torchrepro.apply("seed-only", overrides):
        make(number)
        optimizer.step()
        print("went on", flush=True)
        end()
"""
KEPT = """
with torchrepro.apply("seed-only", OVERRIDES):
    for number in range(3):
        make(number)
        optimizer.step()
        print("went on", flush=True)
        end()
"""
ALIKE = "['dropout=keep', 'ranks=distinct', 'streams.a=1']"
DIFFERING = '[f\'dropout={["keep", "zero"][rank]}\']'


@pytest.mark.parametrize(
    ("program", "overrides", "times"),
    [
        (NESTED, ALIKE, 2),
        (NESTED, DIFFERING, 0),
        (AGAIN, ALIKE, 4),
        (AGAIN, DIFFERING, 2),
        (KEPT, ALIKE, 6),
    ],
    ids=["within", "differing within", "group anew", "differing in a group anew", "group kept"],
)
def test_a_second_profile_or_group_is_compared_again(on_two_ranks, program, overrides, times):
    """Ranks that agree go on, whether or not they start from one seed; others stop right there.

    A profile within another is compared at the next step.
    """
    ended = on_two_ranks(AGAIN_HEAD + program.replace("OVERRIDES", overrides))

    agree = overrides == ALIKE
    assert (ended.returncode == 0, ended.stdout.count("went on")) == (agree, times), ended.stderr
    named = [line for line in ended.stderr.splitlines() if " on rank 0, " in line]
    assert bool(named) == (not agree)
    assert all("dropout" in line for line in named)
