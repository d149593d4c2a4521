"""Named random streams, each seeded by a hash of the root seed and of the stream's coordinates.

The coordinates are rank, worker, epoch, step and name. Within a run, processes that draw
different numbers have different ranks. The key of a stream is the BLAKE2b hash (RFC 7693) of root
seed and coordinates. Each library's generator is seeded with SHAKE-256 (FIPS 202) of the key and
the library's name, so no two generators of one stream share numbers. A stream is the same on every
machine and with every version of Python, numpy and torch.
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

from torchrepro.ground.errors import SeedingError, near, shown

if TYPE_CHECKING:
    import numpy as np
    import torch

LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Stream:
    """One independent source of random numbers.

    Each method starts at the beginning of the stream, so two equal calls return generators that
    draw equal numbers.
    """

    name: str
    key: bytes
    """64 bytes, independent between any two streams for all practical purposes."""

    @property
    def seed(self) -> int:
        """A seed of 32 bits, from 0 to 2**32-1, for example for scikit-learn's `random_state`."""
        return int.from_bytes(self.key[:4], "little")

    @property
    def seed64(self) -> int:
        """A seed of 64 bits, the size of torch's seeds; its low 32 bits are equal to `seed`."""
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
        """Return a torch generator for `device`.

        On the CPU, the generator's whole state comes from the stream; on another device, only a
        seed of 64 bits. Raises `SeedingError` for a device that this torch does not have.
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
        """Return the substream `label`, which shares no numbers with this stream."""
        return Stream(self.name, shake_256(self.key + b"part/" + label).digest(len(self.key)))

    def entropy(self, purpose: str) -> int:
        """Return an integer of 256 bits for `purpose`; other purposes get independent integers."""
        return int.from_bytes(self.bytes(purpose, 32), "little")  # a collision takes 2**128 streams

    def bytes(self, purpose: str, count: int) -> bytes:
        """Return `count` bytes for `purpose`; other purposes get independent bytes."""
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
    """Return the stream `name` of the active profile.

    If no profile with a seed is active, the stream derives from the program's seed, the argument of
    `torch.manual_seed`. If the program has not called it, or has not imported torch, the stream
    differs in every run.

    By default, `rank` and `worker` identify this process. The main process has no worker number,
    and under `ranks: same` the rank is always 0. Equal arguments and seed give equal numbers on
    every machine and in every version. Raises `SeedingError` for an argument that is not a whole
    number of 0 or more.
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
    """Return the stream of these coordinates; streams of different `kind` are independent."""
    # The name may contain a slash, so it comes last: different inputs have different texts.
    text = f"torchrepro/1/{kind}/{root}/{rank}/{worker}/{epoch}/{step}/{name}"
    return Stream(name, blake2b(text.encode("utf-8", "surrogatepass")).digest())


def seed_of_rank(seed: int, rank: int) -> int:
    """Return the seed of the global generators of `rank`, if each rank draws its own numbers.

    Rank 0 has `seed` itself, as a run with a single process does.
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

    Integers of numpy and torch are accepted. Bools and floats, even 1.0, are rejected.
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
"""Environment variables with the rank and the number of processes, of torchrun and of Slurm."""

_LONGEST = 18  # digits of a rank: no run has so many processes

AGREEING = frozenset({"tp", "sp", "cp", "tensor", "tensor_parallel", "sequence", "context"})
"""Mesh dimensions whose ranks work on one sample, and so have to draw equal numbers."""


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
    """Return the rank of this process and the number of ranks.

    Both come from torch.distributed, or else from the variables of a launcher. If neither is
    present, this is rank 0 of 1. Raises `SeedingError` for a variable whose value is not a number.
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
    choices = policy.values() if isinstance(policy, Mapping) else [policy]
    for choice in choices:
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
    if not isinstance(policy, Mapping):
        return
    for name in policy:
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
    """How this process derives seeds: from the active profiles, its rank and the device mesh."""

    seed: int | None = None  # the root; None if no profile with a seed is active
    streams: Mapping[str, int] = field(default_factory=dict)  # name of a stream -> its own root
    # `distinct`, `same`, or one of the two per mesh dimension. None is the default: named streams
    # differ between ranks, and the global generators start from one seed.
    ranks: RankPolicy = None
    mesh: Mesh | None = None
    rank: int | None = None  # of the main process; set in workers of a loader
    program_seed: int | None = None  # of torch, if torchrepro has seeded torch since
    agreed_seed: int | None = None  # set by all ranks before the process group was made
    started_as: int = 0  # this process's rank when it seeded the global generators

    @property
    def ranks_differ(self) -> bool:
        """Return whether the global generators of ranks start from different seeds."""
        if isinstance(self.ranks, Mapping):
            return self.mesh is not None  # which ranks differ is only known with the mesh
        return self.ranks == "distinct"

    def started_from(self, seed: int) -> int:
        """Return the seed that the global generators of this process derive from the root `seed`.

        If ranks draw different numbers, the result depends on `started_as`, the rank of this
        process when it seeded the generators. Otherwise the result is `seed` itself.
        """
        return seed_of_rank(seed, self.started_as) if self.ranks_differ else seed

    def root(self, name: str) -> int:
        """Return the seed that the stream `name` derives from; without a profile, `own_seed()`."""
        seed = self.streams.get(name, self.seed)
        return self.own_seed() if seed is None else seed

    def own_seed(self) -> int:
        """Return the seed that the program has set in torch.

        If the program set no seed, return the profile's seed, or a seed that differs in every run.
        """
        if self.program_seed is not None:
            return self.program_seed
        seed = getattr(sys.modules.get("torch"), "initial_seed", _seed_of_no_other_run)()
        return int(seed) % 2**64

    def coordinate(self, policy: RankPolicy = None) -> int:
        """Return the number of this process among the processes that draw different numbers.

        The number is 0 under the policy `same`. With a mesh, the policy applies to each dimension
        that it names. Along the other dimensions, ranks draw different numbers, except along the
        dimensions in `AGREEING`. Raises `SeedingError` if the policy names a dimension that the
        mesh does not have, or if it names dimensions before `use_mesh` was called.
        """
        policy = self.ranks if policy is None else policy
        if policy == "same":
            return 0
        if self.rank is not None:
            return self.rank
        if self.mesh is None:
            group = world()
            if isinstance(policy, Mapping) and group.size > 1:
                raise SeedingError.about(
                    "names dimensions of a device mesh, and this process knows none",
                    key="ranks",
                    found=shown(dict(policy)),
                    todo="call torchrepro.use_mesh(mesh) once the mesh is made",
                )
            return group.rank
        check_dimensions(policy, self.mesh.names)
        number, named = 0, policy if isinstance(policy, Mapping) else {}
        for name, size, position in zip(*self.mesh, strict=True):
            default = "same" if name in AGREEING else "distinct"
            if named.get(name, default) == "distinct":
                number = number * size + position
        return number

    def to_json(self) -> dict[str, Any]:
        ranks = dict(self.ranks) if isinstance(self.ranks, Mapping) else self.ranks
        return {"seed": self.seed, "streams": dict(self.streams), "ranks": ranks}


@cache
def _seed_of_no_other_run() -> int:
    return int.from_bytes(os.urandom(8), "little")


_plan = SeedPlan()
drawn: set[str] = set()  # the streams that this process has used


def current_plan() -> SeedPlan:
    return _plan


def set_plan(plan: SeedPlan) -> None:
    global _plan  # noqa: PLW0603 - the plan is one piece of process state, and this its only writer
    _plan = plan


def remember_program_seed() -> None:
    """Remember the program's seed of torch; called just before torchrepro seeds torch."""
    set_program_seed(_plan.own_seed())


def set_program_seed(seed: int | None) -> None:
    """Remember the program's seed of torch; None means that torch's generator still has it."""
    if _plan.program_seed != seed:
        set_plan(replace(_plan, program_seed=seed))


SEEDED_AT_RANDOM = ("torch.seed", "torch.random.seed")
"""Functions that seed torch with a number that differs in every run."""

_not_given: deque[int] = deque(maxlen=1000)


def note_not_given(seed: int) -> None:
    """Remember that torch has been seeded with `seed`, which the program did not choose."""
    _not_given.append(seed % 2**64)  # torch reads a negative seed as an unsigned number


def given_seed() -> int | None:
    """Return the seed that the program has set in torch under a profile, or None."""
    seed = _plan.own_seed()
    return seed if is_given(seed) else None


def is_given(seed: int) -> bool:
    """Return whether the program has set `seed`, the seed of a generator, under a profile."""
    if _plan.seed is None:
        return False  # streams derive from the program's seed anyway
    of_profile = (_plan.seed % 2**64, _plan.started_from(_plan.seed) % 2**64)
    return seed not in of_profile and seed not in _not_given


def unused_streams() -> tuple[str, ...]:
    return tuple(sorted(set(_plan.streams) - drawn))


def drawn_streams() -> tuple[str, ...]:
    return tuple(sorted(drawn))


# torch documents how to get and set the state of its CPU generator as bytes, but not their layout:
# `at::CPUGeneratorImpl` (ATen/CPUGeneratorImpl.cpp) has the seed, then the position in a Mersenne
# Twister, then its 624 words, then normal numbers that were computed in advance.

WORDS = 624
_WORDS = slice(24, 24 + 8 * WORDS)  # bytes: seed, words left, a flag and position come before
_PROBE_SEED = 20260101
_TOP_BIT = 0x80000000


def start_cpu_generator(generator: torch.Generator, source: Stream) -> torch.Generator:
    """Set the state of the CPU `generator` from 2496 bytes of `source`, and return the generator.

    Afterwards, `generator.initial_seed()` is `source.seed64`.
    """
    import numpy as np
    import torch

    state = _fresh_state().copy()
    state[:8] = np.frombuffer(source.seed64.to_bytes(8, "little"), "u1")
    words = state[_WORDS].view(np.uint64)
    words[:] = np.frombuffer(source.bytes("torch", 4 * WORDS), "<u4")
    words[0] = _TOP_BIT  # a twister with only zeros would draw only zeros
    generator.set_state(torch.from_numpy(state))
    return generator


@cache
def _fresh_state() -> Any:
    """Return the state of a newly seeded generator.

    Raises `SeedingError` for an unexpected layout, because every stream would then be different.
    """
    import numpy as np
    import torch

    state = torch.Generator().manual_seed(_PROBE_SEED).get_state().numpy()
    words = state[_WORDS].view(np.uint64)
    # numpy seeds its twister as torch does, and documents the layout of its state.
    expected: Any = np.random.RandomState(_PROBE_SEED).get_state()
    if len(words) != WORDS or not np.array_equal(words, np.asarray(expected[1], np.uint64)):
        raise SeedingError.about(
            "torchrepro does not know how this torch lays out the state of its CPU generator",
            found=f"torch {torch.__version__}, {len(state)} bytes",
            todo="upgrade torchrepro, or draw from .numpy() instead",
        )
    return state
