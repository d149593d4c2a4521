"""Named random streams: a hash of the root seed and of a stream's coordinates seeds each one.

One of its coordinates is the rank: which process of a run this is, and with which others it agrees.

The key of a stream is BLAKE2b (RFC 7693) over root seed, rank, worker, epoch, step and name. Each
library draws from SHAKE-256 (FIPS 202) of that key, so no two generators of one stream share
numbers. The numbers of a stream are fixed: they depend on no version of Python, numpy or torch,
nor on the machine.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b, shake_256
from operator import index
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.errors import SeedingError
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.ground.messages import near, shown

if TYPE_CHECKING:
    import numpy as np
    import torch

LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Stream:
    """One independent source of random numbers; every call starts it from its beginning."""

    name: str
    key: bytes
    """64 bytes, independent between any two streams for all practical purposes."""

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
            raise SeedingError.about(
                f"no generator for this device: {reason}", found=shown(str(device))
            ) from None
        if generator.device.type == "cpu":
            return start_cpu_generator(generator, self)
        return generator.manual_seed(int.from_bytes(self.bytes("torch", 8), "little"))

    def part(self, label: bytes) -> Stream:
        """Return the stream of one part of what this one is for."""
        return Stream(self.name, shake_256(self.key + b"part/" + label).digest(len(self.key)))

    def entropy(self, purpose: str) -> int:
        """Return 256 bits for `purpose`, independent of those for any other."""
        return int.from_bytes(self.bytes(purpose, 32), "little")  # a collision takes 2**128 streams

    def bytes(self, purpose: str, count: int) -> bytes:
        """Return `count` bytes for `purpose`, independent of those for any other."""
        return shake_256(self.key + purpose.encode()).digest(count)

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

    Where no profile with a seed is in force, it derives from the seed of torch's CPU generator:
    the one that the program gave to `torch.manual_seed`, or one that no other run has if it gave
    none, or has not imported torch.

    Rank and data-loading worker are found out unless they are given. The main process is no
    worker, and under `ranks: same` every rank is as rank 0. Equal arguments and seed give equal
    numbers on every machine and in every version. Raises `SeedingError` for an argument that is
    not a whole number of 0 or more.
    """
    plan = current_plan()
    derived = derive(
        name,
        plan.root(checked_name(name)),
        plan.coordinate() if rank is None else nonnegative_int("rank", rank),
        present_worker() if worker is None else nonnegative_int("worker", worker),
        None if epoch is None else nonnegative_int("epoch", epoch),
        None if step is None else nonnegative_int("step", step),
    )
    drawn.add(name)
    return derived


def derive(
    name: str,
    root: int,
    rank: int = 0,
    worker: int | None = None,
    epoch: int | None = None,
    step: int | None = None,
    kind: str = "stream",
) -> Stream:
    """Return the stream of these coordinates; streams of another `kind` share nothing with it."""
    # The name comes last: it alone may hold any character, so no two inputs have one spelling.
    text = f"torchrepro/1/{kind}/{root}/{rank}/{worker}/{epoch}/{step}/{name}"
    return Stream(name, blake2b(text.encode("utf-8", "surrogatepass")).digest())


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of the global generators of `rank` where ranks draw differently.

    Rank 0 starts from `seed` itself, as a run without ranks does.
    """
    return derive("global", seed, rank, kind="rank").seed if rank else seed


def present_worker() -> int | None:
    data: Any = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return info.id if info else None


def checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise SeedingError.about(
            "not the name of a stream", key="name", found=shown(name), legal="any text"
        )
    return name


def nonnegative_int(argument: str, value: Any) -> int:
    """Return `value` as an int from 0 to `LARGEST`; raises `SeedingError` for anything else.

    Integers of numpy and torch are taken. A bool or a float is not, even a whole one.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        number = None if is_bool else index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last for other dtypes
        number = None
    if number is None or not 0 <= number <= LARGEST:
        raise SeedingError.about(
            "not a whole number" if number is None else "out of range",
            key=argument,
            found=shown(repr(value) if isinstance(value, str) else value),
            legal=f"a whole number, 0 to {LARGEST}",
        )
    return number


POLICIES = ("distinct", "same")
RankPolicy = str | Mapping[str, str] | None

VARIABLES = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Variables that name a process and count them: torchrun's, then Slurm's."""

_LONGEST = 18  # digits: no run has as many processes

AGREEING = frozenset({"tp", "sp", "cp", "tensor", "tensor_parallel", "sequence", "context"})
"""Mesh dimensions along which ranks work on one sample and so draw the same numbers."""


class Mesh(NamedTuple):
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    position: tuple[int, ...]


class World(NamedTuple):
    size: int = 1
    rank: int = 0


def process_group() -> World | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return World(distributed.get_world_size(), distributed.get_rank())


def world() -> World:
    """Return the place of this process, from torch.distributed or the variables of a launcher.

    A process that nobody numbered is rank 0 of 1. Raises `SeedingError` for a variable that holds
    no number.
    """
    group = process_group()
    if group is not None:
        return group
    for rank, size in VARIABLES:
        if rank in os.environ:
            mine = _number(rank)
            return World(max(_number(size), mine + 1), mine)
    return World()


def checked_policy(policy: Any) -> RankPolicy:
    for choice in policy.values() if isinstance(policy, Mapping) else [policy]:
        if choice is not None and choice not in POLICIES:
            raise SeedingError.about(
                "not a policy for ranks",
                key="ranks",
                found=shown(choice),
                legal=", ".join(POLICIES),
                near=near(str(choice), POLICIES),
            )
    return policy  # type: ignore[no-any-return]


def check_dimensions(policy: RankPolicy, names: Sequence[str]) -> None:
    for name in policy if isinstance(policy, Mapping) else ():
        if name not in names:
            raise SeedingError.about(
                "the mesh has no such dimension",
                key=f"ranks.{name}",
                legal=", ".join(names),
                near=near(name, names),
            )


def _number(variable: str) -> int:
    text = os.environ.get(variable, "1")
    if not (text.isascii() and text.isdigit() and len(text) < _LONGEST):
        raise SeedingError.about("not the number of a process", f"${variable}", found=shown(text))
    return int(text)


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """What the profiles in force say about random numbers, and what this process knows of ranks."""

    seed: int | None = None  # the root; None where no profile with a seed is in force
    streams: Mapping[str, int] = field(default_factory=dict)  # those that have their own root
    # `distinct`, `same`, or one of the two per mesh dimension. None is the default: named streams
    # differ between ranks, and the global generators start from one seed.
    ranks: RankPolicy = None
    mesh: Mesh | None = None
    rank: int | None = None  # by which this process differs, where another has set it
    program_seed: int | None = None  # the program's own, where torchrepro has seeded torch since
    agreed_seed: int | None = None  # which every rank had given before the process group was made
    started_as: int = 0  # the rank from whose seed the global generators started

    @property
    def ranks_differ(self) -> bool:
        """Whether the global generators of ranks start from different seeds, as far as known."""
        if isinstance(self.ranks, Mapping):
            return self.mesh is not None  # which ranks differ is only known with the mesh
        return self.ranks == "distinct"

    def started_from(self, seed: int) -> int:
        """Return what the global generators of this process started from where `seed` is the root.

        Every rank from a seed of its own, as far as that is known.
        """
        return seed_of_rank(seed, self.started_as) if self.ranks_differ else seed

    def root(self, name: str) -> int:
        """Return the seed that the stream `name` derives from, the program's own if need be."""
        seed = self.streams.get(name, self.seed)
        return self.own_seed() if seed is None else seed

    def own_seed(self) -> int:
        """Return what the program has seeded torch with, as far as it can be known.

        Where it has given no seed, that is the profile's, or one that no other run has.
        """
        if self.program_seed is not None:
            return self.program_seed
        seed = getattr(sys.modules.get("torch"), "initial_seed", _seed_of_no_other_run)()
        return int(seed) % 2**64

    def coordinate(self, policy: RankPolicy = None) -> int:
        """Return the number by which ranks that draw differently differ; 0 under `same`.

        Along a mesh, dimensions that the policy does not name differ, save those in `AGREEING`.
        Raises `SeedingError` if it names mesh dimensions and no mesh, or another, is known.
        """
        policy = self.ranks if policy is None else policy
        if policy == "same":
            return 0
        if self.rank is not None:
            return self.rank
        if self.mesh is None:
            here = world()
            if isinstance(policy, Mapping) and here.size > 1:
                raise SeedingError.about(
                    "names dimensions of a device mesh, and this process knows none",
                    key="ranks",
                    found=shown(dict(policy)),
                    todo="call torchrepro.use_mesh(mesh) once the mesh is made",
                )
            return here.rank
        check_dimensions(policy, self.mesh.names)
        number, named = 0, policy if isinstance(policy, Mapping) else {}
        for name, size, place in zip(*self.mesh, strict=True):
            if named.get(name, "same" if name in AGREEING else "distinct") == "distinct":
                number = number * size + place
        return number

    def to_json(self) -> dict[str, Any]:
        ranks = dict(self.ranks) if isinstance(self.ranks, Mapping) else self.ranks
        return {"seed": self.seed, "streams": dict(self.streams), "ranks": ranks}


@cache
def _seed_of_no_other_run() -> int:
    return int.from_bytes(os.urandom(8), "little")


_plan = SeedPlan()
drawn: set[str] = set()  # the streams that were asked for in this process


def current_plan() -> SeedPlan:
    return _plan


def put_plan(plan: SeedPlan) -> None:
    global _plan  # noqa: PLW0603 - the plan is one piece of process state, and this its only writer
    _plan = plan


def keep_program_seed() -> None:
    """Keep the program's own seed as it is now, although torchrepro seeds torch."""
    put_program_seed(_plan.own_seed())


def put_program_seed(seed: int | None) -> None:
    """Make `seed` the kept seed of the program; None where torch still knows it."""
    if _plan.program_seed != seed:
        put_plan(replace(_plan, program_seed=seed))


LEFT_TO_CHANCE = ("torch.seed", "torch.random.seed")
"""Functions that seed torch with a number which no other run has."""

_not_given: deque[int] = deque(maxlen=1000)


def note_not_given(seed: int) -> None:
    """Remember that torch has been seeded with `seed`, which the program did not choose."""
    _not_given.append(seed % 2**64)  # torch takes a negative seed for the one with the same bits


def given_seed() -> int | None:
    """Return what the program has last seeded torch with; None where that is no seed of its own."""
    seed = _plan.own_seed()
    return seed if is_given(seed) else None


def is_given(seed: int) -> bool:
    """Whether a generator that has this seed was given it by the program, as one of its own."""
    if _plan.seed is None:
        return False  # streams derive from the program's seed anyway
    of_profile = (_plan.seed, _plan.started_from(_plan.seed))
    return seed not in [each % 2**64 for each in of_profile] and seed not in _not_given


def never_drawn() -> tuple[str, ...]:
    return tuple(sorted(set(_plan.streams) - drawn))


def drawn_streams() -> tuple[str, ...]:
    return tuple(sorted(drawn))


# torch publishes how to get and set the state of its CPU generator as bytes, but not what they
# mean: `at::CPUGeneratorImpl` (ATen/CPUGeneratorImpl.cpp) holds the seed, then the position in and
# the 624 words of a Mersenne Twister, then what is left over from normal numbers.

WORDS = 624
_FIRST_WORD = 24  # after the seed, the words left and seeded, and the position
_PROBE_SEED = 20260101
_TOP_BIT = 0x80000000
_lock = fork_safe_lock()  # one buffer serves every caller


def start_cpu_generator(generator: torch.Generator, source: Stream) -> torch.Generator:
    """Start the CPU `generator` from 2496 bytes of `source`, and return it.

    Its `initial_seed()` is then `source.seed64`.
    """
    import numpy as np
    import torch

    material = source.bytes("torch", 4 * WORDS)
    with _lock:
        template, words = _layout()
        template[:8] = np.frombuffer(source.seed64.to_bytes(8, "little"), "u1")
        words[:] = np.frombuffer(material, "<u4")
        words[0] = _TOP_BIT  # a twister of nothing but zeros would give nothing but zeros
        generator.set_state(torch.from_numpy(template))
    return generator


@cache
def _layout() -> tuple[Any, Any]:
    # The state of a freshly seeded generator, and a view of its words, to be overwritten. A torch
    # that lays it out in another way is refused, rather than given other numbers.
    import numpy as np
    import torch

    state = torch.Generator().manual_seed(_PROBE_SEED).get_state().numpy().copy()
    words = state[_FIRST_WORD : _FIRST_WORD + 8 * WORDS].view(np.uint64)
    # The same seeding of the same twister in numpy, whose documentation fixes it.
    expected: Any = np.random.RandomState(_PROBE_SEED).get_state()
    if len(words) != WORDS or not np.array_equal(words, np.asarray(expected[1], np.uint64)):
        raise SeedingError.about(
            "torchrepro does not know how this torch lays out the state of its CPU generator",
            found=f"torch {torch.__version__}, {len(state)} bytes",
            todo="upgrade torchrepro, or draw from .numpy() instead",
        )
    return state, words
