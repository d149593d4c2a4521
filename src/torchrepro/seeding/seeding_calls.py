"""Records the lines of the program that seed a global generator; their seeds take effect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from torchrepro.ground.callers import package, program_line
from torchrepro.ground.errors import shown
from torchrepro.policies.policy import count
from torchrepro.seeding import generators, streams
from torchrepro.seeding.call_records import ObservedCall, printed_notes
from torchrepro.seeding.generators import Given
from torchrepro.seeding.loader import in_loader
from torchrepro.seeding.nondeterministic_calls import EXPLICIT_SEED, FUNCTIONS, OWN
from torchrepro.seeding.observed_calls import Call, is_listening, listen, stop_listening

_STATES = {"random": ("getstate", "setstate"), "numpy.random": ("get_state", "set_state")}
"""Module -> its functions that can restore an earlier seed of the program."""

_HOST = {"random": "python", "numpy.random": "numpy"}  # generators whose seeds samples depend on
_DEVICES = ("torch.cuda", "torch.npu", "torch.xpu", "torch.mps")
_DYNAMO_WRAPPERS = ("torch._dynamo.eval_frame", "torch._compile")
_MANY = 1000


class SeedingCalls:
    """The seeding calls of the program: a knob that records them until the profile is undone.

    `write` begins with empty records, and `restore` returns to the records of an outer profile.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], ObservedCall] = {}  # by function and line
        # (module, digest of a state that the program has read) -> (digest of the program's seed at
        # that time, whether the generator was in `unknown_states`)
        self._given_at: dict[tuple[str, int], tuple[bytes, bool]] = {}

    def read(self) -> Any:
        return None

    def holds(self, value: Any) -> bool:
        return is_listening(self._note)

    def write(self, value: Any) -> None:
        self._calls, self._given_at = {}, {}
        generators.unknown_states.clear()
        generators.set_given_seeds(Given())
        self.note_new_modules()

    def save(self) -> Any:
        copies = dict(self._calls), dict(self._given_at), set(generators.unknown_states)
        return is_listening(self._note), generators.given_seeds(), *copies

    def restore(self, saved: Any) -> None:
        was_listening, given, self._calls, self._given_at, unknown = saved
        generators.unknown_states.clear()
        generators.unknown_states.update(unknown)
        generators.set_given_seeds(given)
        if not was_listening:
            stop_listening(self._note)
            stop_listening(self._note_state)

    def begin(self) -> Callable[[], None]:
        """Record calls from now on; return a function that undoes this."""
        saved = self.save()
        self.write(None)
        return partial(self.restore, saved)

    def note_new_modules(self) -> None:
        """Also record seeding calls to libraries that were imported since the last `write`."""
        for module, name in FUNCTIONS:
            listen(module, name, self._note)
        for module, names in _STATES.items():
            for name in names:
                listen(module, name, self._note_state)

    def calls(self) -> tuple[ObservedCall, ...]:
        """Return the lines of the program that seeded a generator after the profile seeded it.

        Each has the seed of its latest call.
        """
        return tuple(self._calls.values())

    def functions(self) -> frozenset[str]:
        """Return the functions that the program has called with an explicit seed."""
        without_seed = ("", shown(None))
        return frozenset(
            call.name for call in self._calls.values() if call.value not in without_seed
        )

    def _note(self, call: Call) -> None:
        function, frame = call.function, call.frame
        if function in streams.SEEDED_AT_RANDOM:
            streams.note_not_given(sys.modules["torch"].initial_seed())
        # When dynamo is imported, it wraps the current `torch.manual_seed`, which may be our
        # wrapper. So the direct caller may be dynamo, and not the code that seeds.
        while frame.f_back is not None and frame.f_globals.get("__name__") in _DYNAMO_WRAPPERS:
            frame = frame.f_back
        if package(frame) in OWN:
            return
        line = program_line(frame)  # skips our wrappers of a framework's functions
        values = (*call.args, *call.kwargs.values())
        seeds = ", ".join(map(shown, values))
        policy = sys.modules.get("torchrepro.policies.host_rng")  # None if it was never applied
        if function.startswith(_DEVICES) and policy is not None and policy.policy.is_on:
            count("device.rng", f"{function}({seeds})", "without effect: the host draws", line)
        known = self._calls.get((function, line))
        if known is not None:
            self._calls[function, line] = replace(known, value=seeds, times=known.times + 1)
        elif len(self._calls) < _MANY:
            seeding = ObservedCall(function, EXPLICIT_SEED, line, value=seeds)
            self._calls[function, line] = seeding
            text = f"seeded by the program itself, in workers: {seeding}"
            printed_notes.print_in_first_worker(f"{function} at {line}", text)
        generator = _HOST.get(function.rpartition(".")[0])
        if generator is not None and not in_loader():  # a seed within a sample ends with the sample
            is_explicit = any(value is not None for value in values)
            state = generators.host_slot(generator).read()
            _set_given(generator, _digest_of_seed(generator, state) if is_explicit else b"")

    def _note_state(self, call: Call) -> None:
        """Note that the program has read or set the state of a generator.

        A call that sets a state also sets a seed. The seed is known if this process read the same
        state earlier, or if a generator has this state before its first draw.
        """
        if package(call.frame) in OWN or in_loader():
            return
        module, _, name = call.function.rpartition(".")
        generator = _HOST[module]
        state = generators.host_slot(generator).read()  # listeners run after the call
        key = module, hash(repr(generators.plain_state(state)))
        if "get" in name:
            while len(self._given_at) >= _MANY:
                del self._given_at[next(iter(self._given_at))]
            seed = getattr(generators.given_seeds(), generator)
            self._given_at[key] = seed, generator in generators.unknown_states
        elif key in self._given_at:
            seed, is_unknown = self._given_at[key]
            _set_given(generator, seed, is_unknown=is_unknown)
        elif _is_fresh(generator, state):
            _set_given(generator, _digest_of_seed(generator, state))
        else:
            generators.unknown_states.add(generator)


seeding_calls = SeedingCalls()


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
            given[device] = any(
                called.startswith(functions) for called in seeding_calls.functions()
            )
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
