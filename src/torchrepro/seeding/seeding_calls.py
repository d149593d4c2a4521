"""Calls of the program that seed a global generator: honoured, and recorded with their line."""

from __future__ import annotations

import mmap
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from hashlib import blake2b
from types import FrameType
from typing import Any

from torchrepro.ground.callers import package, program_place
from torchrepro.ground.console import note
from torchrepro.ground.messages import shown
from torchrepro.policies.policy import count
from torchrepro.seeding import generators, streams
from torchrepro.seeding.generators import Given
from torchrepro.seeding.loader import in_loader
from torchrepro.seeding.observed_calls import is_listening, listen, stop_listening

FUNCTIONS = (
    *(("random", "seed"), ("numpy.random", "seed")),
    *((module, name) for module in ("torch", "torch.random") for name in ("manual_seed", "seed")),
    *(
        (f"torch.{device}", name)
        for device in ("cuda", "npu", "xpu")
        for name in ("manual_seed", "manual_seed_all")
    ),
    ("torch.mps", "manual_seed"),
)
"""Every function that seeds a global generator: module, name."""

_STATES = (
    ("random", "getstate"),
    ("random", "setstate"),
    ("numpy.random", "get_state"),
    ("numpy.random", "set_state"),
)
"""Every function by which a seed that was given can be taken back."""

_HOST = {"random": "python", "numpy.random": "numpy"}  # generators whose seeds samples depend on
_DEVICES = ("torch.cuda", "torch.npu", "torch.xpu", "torch.mps")  # they seed those of a device
OWN = ("torchrepro", "torch")  # packages whose calls are not calls of the program
_DYNAMO_WRAPPERS = ("torch._dynamo.eval_frame", "torch._compile")
_MANY = 1000


@dataclass(slots=True)
class SeedingCall:
    """A place from which the program seeded a global generator itself."""

    function: str
    value: str  # the seed as it was given the last time
    where: str  # ``file:line`` of the program, or of a library that no program called
    times: int = 0

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.function}({self.value}) at {self.where}{often}"


_calls: dict[tuple[str, str], SeedingCall] = {}
# What the program had seeded a generator with when it read this state of it, and whether it was
# among `put_by_program`.
_given_at: dict[tuple[str, int], tuple[bytes, bool]] = {}

_SLOTS = 1 << 16


class _Said:
    """A byte for each note that was said: two in 65,536 may share one, and the later is not said.

    Processes that are forked share it with this one. Workers that are spawned share another, which
    they `write` as they start.
    """

    def __init__(self) -> None:
        self.slots: Any = mmap.mmap(-1, _SLOTS)

    def write(self, slots: Any) -> None:
        self.slots = slots


said = _Said()


@cache
def said_by_spawned() -> Any:
    """Return the slots of workers that are spawned: only a process that starts can be sent them."""
    from multiprocessing.sharedctypes import RawArray

    return RawArray("B", _SLOTS)


def say_in_first_worker(key: str, text: str) -> None:
    """Say `text` in the first worker of a loader, unless a worker has said `key` before.

    Workers begin anew every epoch, and what a worker records stays in the worker.
    """
    slot = zlib.crc32(key.encode()) % _SLOTS
    if streams.present_worker() == 0 and not said.slots[slot]:
        said.slots[slot] = 1
        note(text)


class SeedingCalls:
    """The knob under which seeding calls of the program are recorded, until its undo."""

    __slots__ = ()

    def read(self) -> Any:
        return None

    def holds(self, value: Any) -> bool:
        return is_listening(_note)

    def write(self, value: Any) -> None:
        _calls.clear()
        _given_at.clear()
        generators.put_by_program.clear()
        generators.put_given_seeds(Given())
        note_calls_of_new_modules()

    def save(self) -> Any:
        kept = dict(_calls), dict(_given_at), set(generators.put_by_program)
        return is_listening(_note), kept, generators.given_seeds()

    def restore(self, saved: Any) -> None:
        listened, kept, given = saved
        presents: tuple[Any, ...] = _calls, _given_at, generators.put_by_program
        for present, before in zip(presents, kept, strict=True):
            present.clear()
            present.update(before)
        generators.put_given_seeds(given)
        if not listened:
            stop_listening(_note)
            stop_listening(_note_state)


def seeding_calls() -> tuple[SeedingCall, ...]:
    """Return the places from which the program has seeded a generator under the present seed."""
    return tuple(_calls.values())


def note_calls() -> Callable[[], None]:
    """Record seeding calls of the program from now on; return the undo."""
    access = SeedingCalls()
    saved = access.save()
    access.write(None)
    return partial(access.restore, saved)


def note_calls_of_new_modules() -> None:
    """Record seeding calls to libraries that were loaded since as well."""
    for module, name in FUNCTIONS:
        listen(module, name, _note)
    for module, name in _STATES:
        listen(module, name, _note_state)


def given_by_program() -> frozenset[str]:
    """Return the functions to which the program has given a seed; one left to chance is no seed."""
    of_chance = ("", shown(None))
    return frozenset(call.function for call in _calls.values() if call.value not in of_chance)


def _note(
    function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
) -> None:
    if function in streams.LEFT_TO_CHANCE:
        streams.note_not_given(sys.modules["torch"].initial_seed())
    # When dynamo is imported it wraps `torch.manual_seed`, whatever stands there: what stands in
    # for it is called by torch, on behalf of the code that seeds.
    while frame.f_back is not None and frame.f_globals.get("__name__") in _DYNAMO_WRAPPERS:
        frame = frame.f_back
    if package(frame) in OWN:
        return
    where = program_place(frame)  # a framework's function may be within a wrapper of ours
    seeds = ", ".join(shown(value) for value in (*args, *kwargs.values()))
    policy = sys.modules.get("torchrepro.policies.host_rng")  # not loaded: not in force
    if function.startswith(_DEVICES) and policy is not None and policy.policy.is_on:
        count("device.rng", f"{function}({seeds})", "without effect: the host draws", where)
    if len(_calls) < _MANY or (function, where) in _calls:
        call = _calls.setdefault((function, where), SeedingCall(function, "", where))
        call.value, call.times = seeds, call.times + 1
        if call.times == 1:
            text = f"seeded by the program itself, in workers: {call}"
            say_in_first_worker(f"{function} at {where}", text)
    generator = _HOST.get(function.rpartition(".")[0])
    if generator is not None and not in_loader():  # what a sample seeds is gone with it
        of_chance = all(value is None for value in (*args, *kwargs.values()))
        state = generators.host_slots()[generator].read()
        _put(generator, b"" if of_chance else _name_of(generator, state))


def _note_state(
    function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
) -> None:
    # The program puts back a state, and with it the seed that it had given: it is known for a state
    # that this process has read, and for one from which nothing was drawn since it was seeded.
    if package(frame) in OWN or in_loader():
        return
    module, _, name = function.rpartition(".")
    generator = _HOST[module]
    state = generators.host_slots()[generator].read()  # what was put is what is there now
    key = module, hash(repr(generators.plain_state(state)))
    if "get" in name:
        while len(_given_at) >= _MANY:
            del _given_at[next(iter(_given_at))]
        seed = getattr(generators.given_seeds(), generator)
        _given_at[key] = seed, generator in generators.put_by_program
    elif key in _given_at:
        seed, is_unknown = _given_at[key]
        _put(generator, seed, is_unknown=is_unknown)
    elif _is_fresh(generator, state):
        _put(generator, _name_of(generator, state))
    else:
        generators.put_by_program.add(generator)


def moved_by_program() -> set[str]:
    """Return the generators that the program has seeded or put somewhere under the present seed.

    They are called `python`, `numpy` and `torch`, and those of a device in use `cuda`, for example.
    """
    given = generators.given_seeds()._asdict() | {"torch": streams.given_seed() is not None}
    for device, module in generators.devices_in_use().items():
        seeds = generators.device_seeds(module)
        # One that does not remember its seed is seeded where a call says so.
        called = ("torch.manual_seed", "torch.random.manual_seed", f"torch.{device}.")
        given[device] = (
            any(map(streams.is_given, seeds))
            if seeds
            else any(function.startswith(called) for function in given_by_program())
        )
    return generators.put_by_program | {name for name, seeded in given.items() if seeded}


def _put(generator: str, seed: bytes, *, is_unknown: bool = False) -> None:
    (generators.put_by_program.add if is_unknown else generators.put_by_program.discard)(generator)
    generators.put_given_seeds(generators.given_seeds()._replace(**{generator: seed}))


def _name_of(generator: str, state: Any) -> bytes:
    # Of the seed that has just given it this state: the same in every process, and empty for that
    # of the profile.
    plan, text = streams.current_plan(), repr(generators.plain_state(state))
    if plan.seed is not None:
        seeded = generators.fresh_state(generator, plan.started_from(plan.seed))
        if text == repr(generators.plain_state(seeded)):
            return b""
    return blake2b(text.encode(), digest_size=16).digest()


def _is_fresh(generator: str, state: Any) -> bool:
    # Seeded from an array, as Python does, the first word of a Mersenne Twister has the top bit
    # alone; seeded from a number, as numpy does, each word follows from the one before
    # (http://www.math.sci.hiroshima-u.ac.jp/m-mat/MT/MT2002/CODES/mt19937ar.c).
    if generator == "python":
        first, second, position = state[1][0], state[1][1], state[1][streams.WORDS]
    else:
        words = state["state"]["key"]
        first, second, position = int(words[0]), int(words[1]), state["state"]["pos"]
    following = (1812433253 * (first ^ (first >> 30)) + 1) % 2**32
    return bool(position == streams.WORDS and (first == 1 << 31 or second == following))
