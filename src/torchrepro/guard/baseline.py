"""What the profiles in force hold knobs to, and what has drifted from it.

There is one guard in a process, and what it does about drift is the knob `guard`. Every profile
that is put in force adds what it has set; a knob that several of them name is held to the
innermost. Those that are put in force while the guard is on are read at optimizer steps, too.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torchrepro.guard.writers import watch_writers, writing_place
from torchrepro.knobs.knob import Scope
from torchrepro.knobs.linked_state import Fp32Precision, InductorVariable
from torchrepro.messages import shown
from torchrepro.report import Drift
from torchrepro.seeding.streams import present_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchrepro.errors import TorchreproError
    from torchrepro.knobs.knob import Knob


PER_THREAD = frozenset({"backends.cpu.num_threads"})
"""Knobs of which other threads may read another value although nobody changed it: a thread keeps
the number of threads with which it first used torch."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a knob read after the last write to anything that was seen, and the line that set it."""

    now: Any
    place: str = ""


@dataclass(eq=False, slots=True)
class BaselineEntry:
    """One knob, and what it read when a profile had set it."""

    knob: Knob
    value: Any
    thread: int
    """The only thread in which the knob can be read, or 0 for any."""

    written: Written

    @property
    def readable_here(self) -> bool:
        """Whether what the present thread reads is what is held."""
        return self.thread in (0, threading.get_ident())

    def drifted_to(self) -> Any:
        """Return what the knob reads now, or `HOLDS` if that is as expected."""
        now = reading(self.knob) if self.readable_here else self.value
        return HOLDS if now == self.value else now


_FULL = "ieee"
"""What an unset float32 precision comes to: torch asks only whether it is tf32 or bf16
(https://github.com/pytorch/pytorch, aten/src/ATen/Context.cpp). Leaving
``torch.backends.cudnn.flags`` unsets those of cuDNN."""


class _Holds:
    """The answer of a knob that is as expected."""

    __slots__ = ()


HOLDS = _Holds()


def expected(knob: Knob) -> BaselineEntry:
    """Return what is to be expected of `knob` from now on: what it reads in this thread."""
    # Inductor's options are context variables (torch/utils/_config_module.py of pytorch).
    per_thread = (
        knob.scope is Scope.THREAD
        or knob.name in PER_THREAD
        or isinstance(knob.access, InductorVariable)
    )
    now = reading(knob)
    return BaselineEntry(knob, now, threading.get_ident() if per_thread else 0, Written(now))


def reading(knob: Knob) -> Any:
    """Return what `knob` reads, or in words why it can no longer be read."""
    try:
        now = knob.access.read()
        return _FULL if now == "none" and isinstance(knob.access, Fp32Precision) else now
    except Exception as error:  # noqa: BLE001 - a state that cannot be read any more has drifted
        return f"unreadable: {error}"


class InForce(Protocol):
    """A profile in force: what to do when it turns out not to hold."""

    @property
    def refuse(self) -> Callable[[TorchreproError], None]: ...


@dataclass(eq=False, slots=True)
class Guard:
    """What one profile in force has set, and the drift from it that was seen so far."""

    applied: InForce
    at_steps: bool = False
    """Whether knobs are read again before optimizer steps."""

    steps: int = 0
    """Optimizer steps since the profile was put in force, of all optimizers."""

    expected: dict[str, BaselineEntry] = field(default_factory=dict)
    drift: dict[tuple[str, str], Drift] = field(default_factory=dict)
    said: set[tuple[str, str]] = field(default_factory=set)

    @property
    def since(self) -> str:
        """The present moment, in words."""
        if not self.at_steps:
            return "at the end"
        return f"after step {self.steps - 1}" if self.steps else "before any step"


guards: list[Guard] = []
"""One for every profile in force, outermost first."""

_watched: list[tuple[BaselineEntry, Guard]] = []  # what counts of it all


def guards_of(concerned: Iterable[InForce]) -> list[Guard]:
    """Return the guards of those profiles that are `concerned`."""
    profiles = list(concerned)
    return [guard for guard in guards if guard.applied in profiles]


def guards_at_steps() -> tuple[Guard, ...]:
    """Return those that are read again before optimizer steps, whatever other threads do."""
    return tuple(guard for guard in tuple(guards) if guard.at_steps)


def drift_of(applied: InForce) -> tuple[Drift, ...]:
    """Return the drift from what `applied` has set that was seen up to now, at this moment too."""
    own = guards_of([applied])
    look(own)
    return tuple(drift for guard in own for drift in guard.drift.values())


def settle() -> None:
    """Find out anew what counts; whatever moved up to now was a profile's doing."""
    before = {each.knob.name: each.written for each, _ in _watched}
    deciding: dict[str, tuple[BaselineEntry, Guard]] = {}
    for guard in tuple(guards):  # outermost first: the last one that names a knob decides
        deciding |= {name: (each, guard) for name, each in guard.expected.items()}
    for name, (each, _) in deciding.items():
        if each.readable_here:
            now, last = reading(each.knob), before.get(name)
            each.written = last if last is not None and last.now == now else Written(now)
    _watched[:] = deciding.values()  # in one step: other threads look and write meanwhile


@contextmanager
def by_a_profile() -> Iterator[Callable[[], tuple[Knob, ...]]]:
    """Yield a function that tells which knobs that are held were moved within the block so far.

    Putting a profile in force may move more than it names: torch ties some of its flags together.
    It may also put right what has drifted until now, which is therefore read before.
    """
    look(guards)
    before = [(each.knob, reading(each.knob)) for each, _ in _watched]
    yield lambda: tuple(knob for knob, value in before if reading(knob) != value)


def look(
    asked: Iterable[Guard], moment: Callable[[Guard], str] = lambda guard: guard.since
) -> list[tuple[Guard, Drift]]:
    """Read again what counts, and return the drift from what the guards `asked` have set.

    `moment` says when it was seen.
    """
    concerned = list(asked)
    if present_worker() is not None:
        return []
    found = []
    for each, guard in tuple(_watched):
        now = each.drifted_to() if guard in concerned else HOLDS
        if now is not HOLDS:
            drift = Drift(each.knob.name, each.value, now, moment(guard), _line_of(each, now))
            # What was seen before keeps the moment at which that was.
            found.append((guard, guard.drift.setdefault(key(drift), drift)))
    return found


def key(drift: Drift) -> tuple[str, str]:
    """Return what makes two sightings the same drift."""
    return drift.knob, shown(drift.now)


@contextmanager
def noting_writers() -> Iterator[None]:
    """Remember within the block which line wrote last to the knobs that count."""
    with watch_writers(_note_writer):
        try:
            yield
        finally:
            for each, _ in tuple(_watched):  # the next write may go unseen
                each.written = Written(each.written.now)


def _note_writer() -> None:
    place = ""
    for each, _ in tuple(_watched):
        now = reading(each.knob) if each.readable_here else each.written.now
        if now != each.written.now:
            place = place or writing_place()
            each.written = Written(now, place)


def _line_of(each: BaselineEntry, now: Any) -> str:
    """Return the line that wrote the value `now`, if it was seen."""
    return each.written.place if each.written.now == now else ""
