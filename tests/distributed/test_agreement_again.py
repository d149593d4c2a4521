"""Ranks compare again where a second profile, or a second process group, comes in force."""

import threading

import pytest
import torch.distributed as dist

from torchrepro.rank_agreement import _turn, exchange

HEAD = """
import os, sys, time, torch, torchrepro
import torch.distributed as dist
rank = int(os.environ["RANK"])
weight = torch.zeros(1, requires_grad=True)
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight])

def make(number):
    place = f"file://{os.getcwd()}/group-{number}"
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
    with torchrepro.apply("seed-only", INNER):
        optimizer.step()
        print("went on", flush=True)
    optimizer.step()
    end()
"""
AGAIN = """
for number, overrides in enumerate(([], SECOND)):
    with torchrepro.apply("seed-only", overrides):
        make(number)
        optimizer.step()
        print("went on", flush=True)
        end()
"""
KEPT = """
with torchrepro.apply("seed-only", SECOND) as applied:
    for number in range(3):
        make(number)
        optimizer.step()
        print("went on", flush=True)
        end()
"""
ALIKE = "['dropout=keep']"
DIFFERING = '[f\'dropout={["keep", "zero"][rank]}\']'


@pytest.mark.slow
def test_a_second_profile_that_differs_is_found_at_the_next_step(on_two_ranks):
    """A profile within another that differs between ranks stops them all at the next step."""
    ended = on_two_ranks(HEAD + NESTED.replace("INNER", DIFFERING))

    assert (ended.status != 0, ended.went_on) == (True, 0), ended.err
    named = [line for line in ended.err.splitlines() if " on rank 0, " in line]
    assert named
    assert all("dropout" in line for line in named)


@pytest.mark.slow
def test_a_second_profile_that_agrees_goes_on(on_two_ranks):
    """Ranks under one profile within another, alike on all of them, go on."""
    ended = on_two_ranks(HEAD + NESTED.replace("INNER", ALIKE))

    assert (ended.status, ended.went_on) == (0, 2), ended.err


@pytest.mark.slow
@pytest.mark.parametrize(("program", "times"), [(AGAIN, 2), (KEPT, 3)], ids=["anew", "kept"])
def test_a_group_made_again_under_equal_profiles_goes_on(on_two_ranks, program, times):
    """Ranks that agree go on with every further process group, under one profile or the next."""
    ended = on_two_ranks(HEAD + program.replace("SECOND", ALIKE))

    assert (ended.status, ended.went_on) == (0, 2 * times), ended.err


@pytest.mark.slow
def test_a_group_made_again_is_compared_again(on_two_ranks):
    """Profiles that differ only under a second process group stop all ranks there."""
    ended = on_two_ranks(HEAD + AGAIN.replace("SECOND", DIFFERING))

    assert (ended.status != 0, ended.went_on) == (True, 2), ended.err
    assert "dropout" in ended.err
    assert " on rank 0, " in ended.err


def _exchanged(store, *of_ranks):
    """Let two ranks exchange through `store`, and return what each found."""
    found = {}

    def rank(number):
        found[number] = exchange(store, 2, number, of_ranks[number])

    threads = [threading.Thread(target=rank, args=(number,)) for number in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found[0], found[1]


def test_what_an_earlier_turn_left_is_not_read():
    """Through one store, every turn finds what ranks have in force now, not what they had."""
    store = dist.HashStore()
    differs = {1: {"k": ["1", "2"]}}

    for mine, theirs, expected in [("1", "1", {}), ("1", "2", differs), ("2", "2", {})]:
        found = _exchanged(_turn(store), {"k": mine}, {"k": theirs})
        assert found == (expected, expected)
