"""Scopes that leave every generator as they found it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchrepro.seeding import generators, seed_plan
from torchrepro.seeding.ranks import judged
from torchrepro.seeding.registered import registered_states
from torchrepro.seeding.streams import stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.seeding.streams import Stream


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Let the block draw what it likes: afterwards every generator is as it was before.

    Covers Python's, numpy's legacy and torch's CPU generator, every accelerator in use, and the
    registered ones; restores after an exception too. Also a decorator. `torch.random.fork_rng`
    covers torch alone.
    """
    before, registered = generators.global_state(), registered_states()
    try:
        yield
    finally:
        before.put_back()
        registered.put_back()


@contextmanager
def seeded(
    name: str,
    ranks: Any = None,
    epoch: int | None = None,
    step: int | None = None,
) -> Iterator[Stream]:
    """Draw from the stream `name` within the block, through the global generators.

    `ranks` (`distinct`, `same`, or one of them per mesh dimension) wins over the profile:
    ``seeded("init", ranks="same")`` initialises a model alike on every rank. Afterwards every
    generator is as it was before, after an exception too. Raises `SeedingError` where no profile
    with a seed is in force, and for an unknown policy.
    """
    where = seed_plan.current().coordinate(judged(ranks))
    source = stream(name, rank=where, epoch=epoch, step=step)
    with isolated_rng():
        generators.seed_host(source)
        generators.seed_devices(source)
        yield source
