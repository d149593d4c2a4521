"""Named random streams: each derived by a hash from the root seed and from what it is for.

The key of a stream is BLAKE2b (RFC 7693) over root seed, rank, worker, epoch, step and name; each
library draws from SHAKE-256 (FIPS 202) of it, so no two generators of one stream share numbers.
What a stream gives is fixed: it depends on no version of Python, numpy or torch, nor on the
machine.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import blake2b, shake_256
from random import Random
from typing import TYPE_CHECKING, Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem, shown
from torchrepro.seeding import cpu_generator, seed_plan
from torchrepro.seeding.whole import whole

if TYPE_CHECKING:
    import numpy as np
    import torch

_ENTROPY_BYTES = 32  # 256 bits per generator; a collision needs 2**128 streams


@dataclass(frozen=True, slots=True)
class Stream:
    """One independent source of random numbers; every call starts it from its beginning."""

    name: str
    key: bytes
    """64 bytes, as good as independent between any two streams."""

    @property
    def seed(self) -> int:
        """A seed of 32 bits, from 0 to 2**32-1, as scikit-learn's `random_state` takes it."""
        return int.from_bytes(self.key[:4], "little")

    @property
    def seed64(self) -> int:
        """A seed of 64 bits, whose low 32 are `seed`: enough for a device's generator."""
        return int.from_bytes(self.key[:8], "little")

    def python(self) -> Random:
        """Return a `random.Random` seeded with 256 bits."""
        return Random(self.entropy("python"))  # noqa: S311 - reproducible, not secret

    def numpy(self) -> np.random.Generator:
        """Return a numpy `Generator` on PCG64, seeded with 256 bits through `SeedSequence`."""
        import numpy as np

        sequence = np.random.SeedSequence(self.entropy("numpy"))
        return np.random.Generator(np.random.PCG64(sequence))

    def numpy_legacy(self) -> np.random.RandomState:
        """Return a `RandomState` on MT19937, seeded with 256 bits through `SeedSequence`."""
        import numpy as np

        sequence = np.random.SeedSequence(self.entropy("numpy_legacy"))
        return np.random.RandomState(np.random.MT19937(sequence))

    def torch(self, device: Any = "cpu") -> torch.Generator:
        """Return a generator for `device`; on the CPU its whole state is derived.

        A device's generator takes a seed of 64 bits. Raises `SeedingError` for a device that this
        torch does not have.
        """
        import torch

        try:
            generator = torch.Generator(device)
        except (RuntimeError, TypeError) as error:
            reason = str(error).partition(". ")[0]
            raise SeedingError(
                Problem(f"no generator for this device: {reason}", found=shown(str(device)))
            ) from None
        if generator.device.type == "cpu":
            material = self.bytes("torch", cpu_generator.STATE_BYTES)
            return cpu_generator.start(generator, self.seed64, material)
        return generator.manual_seed(int.from_bytes(self.bytes("torch", 8), "little"))

    def part(self, label: bytes) -> Stream:
        """Return the stream of one part of what this one is for."""
        return Stream(self.name, expanded(self.key, b"part/" + label, len(self.key)))

    def entropy(self, purpose: str) -> int:
        """Return 256 bits for `purpose`, independent of those for any other."""
        return int.from_bytes(self.bytes(purpose, _ENTROPY_BYTES), "little")

    def bytes(self, purpose: str, count: int) -> bytes:
        """Return `count` bytes for `purpose`, independent of those for any other."""
        return expanded(self.key, purpose.encode(), count)

    def __repr__(self) -> str:
        return f"<torchrepro stream {self.name} seed={self.seed}>"


def stream(
    name: str,
    rank: int | None = None,
    worker: int | None = None,
    epoch: int | None = None,
    step: int | None = None,
) -> Stream:
    """Return the stream `name` of the profile in force, for this rank and worker.

    Rank and data-loading worker are found out unless they are given; the main process is no
    worker, and under `ranks: same` every rank is as rank 0. Equal arguments and seed give equal
    numbers on every machine and in every version. Raises `SeedingError` where no profile with a
    seed is in force, and for an argument that is not a whole number of 0 or more.
    """
    plan = seed_plan.current()
    derived = derive(
        name,
        plan.root(judged_name(name)),
        plan.coordinate() if rank is None else whole("rank", rank),
        present_worker() if worker is None else whole("worker", worker),
        None if epoch is None else whole("epoch", epoch),
        None if step is None else whole("step", step),
    )
    seed_plan.note(name)
    return derived


def derive(  # noqa: PLR0913, PLR0917 - the coordinates of a stream
    name: str,
    root: int,
    rank: int = 0,
    worker: int | None = None,
    epoch: int | None = None,
    step: int | None = None,
    kind: str = "stream",
) -> Stream:
    """Return the stream of these coordinates; those of another `kind` share nothing with it."""
    # The name comes last: it alone may hold any character, so no two inputs have one spelling.
    text = f"torchrepro/1/{kind}/{root}/{rank}/{worker}/{epoch}/{step}/{name}"
    return Stream(name, blake2b(text.encode("utf-8", "surrogatepass")).digest())


def seed_of_rank(seed: int, rank: int) -> int:
    """Return what the global generators of `rank` start from where ranks draw differently.

    Rank 0 starts from `seed` itself, as a run without ranks does.
    """
    return derive("global", seed, rank, kind="rank").seed if rank else seed


def expanded(key: bytes, purpose: bytes, count: int) -> bytes:
    """Return `count` bytes that depend on every bit of `key` and of `purpose`.

    SHAKE-256 (FIPS 202), which gives as many bytes as are asked for.
    """
    return shake_256(key + purpose).digest(count)


def judged_name(name: Any) -> str:
    """Return `name` if it can name a stream; raises `SeedingError` otherwise."""
    if not isinstance(name, str) or not name:
        raise SeedingError(
            Problem("not the name of a stream", key="name", found=shown(name), legal="any text")
        )
    return name


def present_worker() -> int | None:
    """Return the number of the data-loading worker that this process is, None if it is none."""
    data: Any = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return info.id if info else None
