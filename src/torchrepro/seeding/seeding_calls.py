"""Records the lines of the program that seed a global generator; their seeds take effect."""

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

from torchrepro.ground.callers import package, program_line
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
"""Every function that can restore an earlier seed of the program: module, name."""

_HOST = {"random": "python", "numpy.random": "numpy"}  # generators whose seeds samples depend on
_DEVICES = ("torch.cuda", "torch.npu", "torch.xpu", "torch.mps")
OWN = ("torchrepro", "torch")  # packages whose calls are not calls of the program
_DYNAMO_WRAPPERS = ("torch._dynamo.eval_frame", "torch._compile")
_MANY = 1000


@dataclass(slots=True)
class SeedingCall:
    """A line of the program that seeds a global generator."""

    function: str
    value: str  # the seed of the latest call
    where: str  # ``file:line`` of the program, or of a library's own thread
    times: int = 0

    def __str__(self) -> str:
        count = f" ({self.times} times)" if self.times > 1 else ""
        return f"{self.function}({self.value}) at {self.where}{count}"


_calls: dict[tuple[str, str], SeedingCall] = {}
# (module, digest of a state that the program has read) -> (digest of the program's seed at that
# time, whether the generator was in `unknown_states`)
_given_at: dict[tuple[str, int], tuple[bytes, bool]] = {}

_SLOTS = 1 << 16


class _PrintedNotes:
    """Shared bytes that mark the printed notes, so that several processes print each note once.

    The hash of a note is the index of its byte. Forked processes share the bytes with this
    process. Spawned workers share another array, which they set with `write` when they start.
    """

    def __init__(self) -> None:
        self.slots: Any = mmap.mmap(-1, _SLOTS)

    def write(self, slots: Any) -> None:
        self.slots = slots


printed_notes = _PrintedNotes()


@cache
def notes_of_spawned() -> Any:
    """Return the bytes for spawned workers; they can only be passed to a process at its start."""
    from multiprocessing.sharedctypes import RawArray

    return RawArray("B", _SLOTS)


def note_in_first_worker(key: str, text: str) -> None:
    """Print `text` in the first worker of a loader, once for each `key`.

    Workers cannot report to the main process, and most loaders start new workers in every epoch.
    """
    slot = zlib.crc32(key.encode()) % _SLOTS
    if streams.present_worker() == 0 and not printed_notes.slots[slot]:
        printed_notes.slots[slot] = 1
        note(text)


class SeedingCalls:
    """The knob that records the seeding calls of the program until the profile is undone."""

    __slots__ = ()

    def read(self) -> Any:
        return None

    def holds(self, value: Any) -> bool:
        return is_listening(_note)

    def write(self, value: Any) -> None:
        _calls.clear()
        _given_at.clear()
        generators.unknown_states.clear()
        generators.set_given_seeds(Given())
        note_calls_of_new_modules()

    def save(self) -> Any:
        copies = dict(_calls), dict(_given_at), set(generators.unknown_states)
        return is_listening(_note), copies, generators.given_seeds()

    def restore(self, saved: Any) -> None:
        was_listening, copies, given = saved
        records: tuple[Any, ...] = _calls, _given_at, generators.unknown_states
        for record, before in zip(records, copies, strict=True):
            record.clear()
            record.update(before)
        generators.set_given_seeds(given)
        if not was_listening:
            stop_listening(_note)
            stop_listening(_note_state)


def seeding_calls() -> tuple[SeedingCall, ...]:
    """Return the lines of the program that seeded a generator after the profile seeded it."""
    return tuple(_calls.values())


def note_calls() -> Callable[[], None]:
    """Record seeding calls of the program from now on; return a function that undoes this."""
    access = SeedingCalls()
    saved = access.save()
    access.write(None)
    return partial(access.restore, saved)


def note_calls_of_new_modules() -> None:
    """Also record seeding calls to libraries that were imported since `note_calls`."""
    for module, name in FUNCTIONS:
        listen(module, name, _note)
    for module, name in _STATES:
        listen(module, name, _note_state)


def given_by_program() -> frozenset[str]:
    """Return the functions that the program has called with an explicit seed."""
    without_seed = ("", shown(None))
    return frozenset(call.function for call in _calls.values() if call.value not in without_seed)


def _note(
    function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
) -> None:
    if function in streams.SEEDED_AT_RANDOM:
        streams.note_not_given(sys.modules["torch"].initial_seed())
    # When dynamo is imported, it wraps the current `torch.manual_seed`, which may be our wrapper.
    # So the direct caller may be dynamo, and not the code that seeds.
    while frame.f_back is not None and frame.f_globals.get("__name__") in _DYNAMO_WRAPPERS:
        frame = frame.f_back
    if package(frame) in OWN:
        return
    line = program_line(frame)  # skips our wrappers of a framework's functions
    seeds = ", ".join(shown(value) for value in (*args, *kwargs.values()))
    policy = sys.modules.get("torchrepro.policies.host_rng")  # None if it was never applied
    if function.startswith(_DEVICES) and policy is not None and policy.policy.is_on:
        count("device.rng", f"{function}({seeds})", "without effect: the host draws", line)
    if len(_calls) < _MANY or (function, line) in _calls:
        call = _calls.setdefault((function, line), SeedingCall(function, "", line))
        call.value, call.times = seeds, call.times + 1
        if call.times == 1:
            text = f"seeded by the program itself, in workers: {call}"
            note_in_first_worker(f"{function} at {line}", text)
    generator = _HOST.get(function.rpartition(".")[0])
    if generator is not None and not in_loader():  # a seed within a sample ends with the sample
        is_explicit = any(value is not None for value in (*args, *kwargs.values()))
        state = generators.host_slots()[generator].read()
        _set_given(generator, _digest_of_seed(generator, state) if is_explicit else b"")


def _note_state(
    function: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
) -> None:
    """Note that the program has read or set the state of a generator.

    A call that sets a state also sets a seed. The seed is known if this process read the same state
    earlier, or if a generator has this state before its first draw.
    """
    if package(frame) in OWN or in_loader():
        return
    module, _, name = function.rpartition(".")
    generator = _HOST[module]
    state = generators.host_slots()[generator].read()  # listeners run after the call
    key = module, hash(repr(generators.plain_state(state)))
    if "get" in name:
        while len(_given_at) >= _MANY:
            del _given_at[next(iter(_given_at))]
        seed = getattr(generators.given_seeds(), generator)
        _given_at[key] = seed, generator in generators.unknown_states
    elif key in _given_at:
        seed, is_unknown = _given_at[key]
        _set_given(generator, seed, is_unknown=is_unknown)
    elif _is_fresh(generator, state):
        _set_given(generator, _digest_of_seed(generator, state))
    else:
        generators.unknown_states.add(generator)


def generators_set_by_program() -> set[str]:
    """Return the generators that the program seeded or restored after the profile seeded them.

    Their names are `python`, `numpy`, `torch`, and the type of a device in use, such as `cuda`.
    """
    given = generators.given_seeds()._asdict() | {"torch": streams.given_seed() is not None}
    for device, module in generators.devices_in_use().items():
        seeds = generators.device_seeds(module)
        if seeds:
            given[device] = any(map(streams.is_given, seeds))
        else:  # this device's generators keep no seeds, but the calls are recorded
            functions = ("torch.manual_seed", "torch.random.manual_seed", f"torch.{device}.")
            given[device] = any(called.startswith(functions) for called in given_by_program())
    return generators.unknown_states | {name for name, seeded in given.items() if seeded}


def _set_given(generator: str, seed: bytes, *, is_unknown: bool = False) -> None:
    (generators.unknown_states.add if is_unknown else generators.unknown_states.discard)(generator)
    generators.set_given_seeds(generators.given_seeds()._replace(**{generator: seed}))


def _digest_of_seed(generator: str, state: Any) -> bytes:
    """Return a digest of `state`, the state of a freshly seeded generator, to identify the seed.

    The digest is equal in every process, and empty for the profile's seed.
    """
    plan, text = streams.current_plan(), repr(generators.plain_state(state))
    if plan.seed is not None:
        seeded = generators.fresh_state(generator, plan.started_from(plan.seed))
        if text == repr(generators.plain_state(seeded)):
            return b""
    return blake2b(text.encode(), digest_size=16).digest()


def _is_fresh(generator: str, state: Any) -> bool:
    """Return whether `state` is the state of a seeded generator before its first draw.

    Python seeds a Mersenne Twister from an array: the first word then has only its top bit set.
    numpy seeds it from a number: each word is then computed from the word before
    (http://www.math.sci.hiroshima-u.ac.jp/m-mat/MT/MT2002/CODES/mt19937ar.c).
    """
    if generator == "python":
        first, second, position = state[1][0], state[1][1], state[1][streams.WORDS]
    else:
        words = state["state"]["key"]
        first, second, position = int(words[0]), int(words[1]), state["state"]["pos"]
    following = (1812433253 * (first ^ (first >> 30)) + 1) % 2**32
    return bool(position == streams.WORDS and (first == 1 << 31 or second == following))
