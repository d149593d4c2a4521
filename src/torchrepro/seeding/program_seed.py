"""The seed that a program gives to torch itself: whether what named loaders draw depends on it.

Under a profile, loaders that have a name draw from the profile's seed. What the program itself last
seeded torch with, as in ``torch.manual_seed(args.seed)``, joins it: otherwise a sweep over
``--seed`` would load the same samples in the same order in every run. Nothing joins it where the
program gave no seed, gave the profile's own, or left its seed to chance (``torch.seed()``).

Ranks that share one order of samples must not draw it from different seeds, or some samples are
loaded twice and others never. With several ranks, a seed joins only if every rank had given the
same one when the process group was made.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from torchrepro.seeding import streams
from torchrepro.seeding.ranks import world
from torchrepro.seeding.streams import seed_of_rank

if TYPE_CHECKING:
    from torchrepro.seeding.streams import Stream

LEFT_TO_CHANCE = ("torch.seed", "torch.random.seed")
"""Functions that seed torch with a number which no other run has."""

_SEEDS = 2**64  # torch takes a negative seed for the one that has the same bits
_not_given: deque[int] = deque(maxlen=1000)


def note_not_given(seed: int) -> None:
    """Remember that torch has been seeded with `seed`, which the program did not choose."""
    _not_given.append(seed % _SEEDS)


def given_seed() -> int | None:
    """Return what the program has last seeded torch with; None where that is no seed of its own."""
    plan = streams.current_plan()
    if plan.seed is None:
        return None  # streams derive from the program's seed anyway
    rank = plan.started_as if plan.ranks_differ else 0
    of_profile = seed_of_rank(plan.seed, rank) % _SEEDS
    seed = plan.own_seed()
    is_own = seed not in (plan.seed % _SEEDS, of_profile) and seed not in _not_given
    return seed if is_own else None


def seed_of_loaders() -> int | None:
    """Return the program's own seed if what loaders draw depends on it, else None."""
    return given_seed() if world().size == 1 else streams.current_plan().agreed_seed


def seed_left_out() -> str:
    """Return why loaders do not depend on the seed that the program has given, or nothing."""
    seed, ranks = given_seed(), world().size
    if ranks == 1 or seed in (None, streams.current_plan().agreed_seed):
        return ""
    return (
        f"named loaders do not depend on the program's own seed {seed}: with {ranks} ranks only "
        "one that all of them give before init_process_group counts; vary the profile's seed "
        "instead"
    )


def agree_on(seed: int | None) -> None:
    """Let loaders depend on `seed`, which every rank had given when the ranks met."""
    streams.put_plan(replace(streams.current_plan(), agreed_seed=seed))


def with_given(stream: Stream, seed: int | None) -> Stream:
    """Return the stream of a loader whose program has given `seed`."""
    return stream if seed is None else stream.part(b"program/%d" % seed)
