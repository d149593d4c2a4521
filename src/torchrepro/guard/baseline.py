"""What the profiles in force hold knobs to, and what has drifted from it.

There is one guard in a process, and what it does about drift is the knob `guard`. Every profile
that is put in force adds what it has set. A knob that several of them name is held to the
innermost.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.as_good import why_as_good
from torchrepro.guard.switch_functions import switch_that_writes
from torchrepro.guard.writers import (
    UNSEEN,
    Writer,
    present_writer,
    switch_that_calls,
    watch_writers,
)
from torchrepro.knobs.knob import Scope
from torchrepro.knobs.linked_state import Fp32Precision, InductorVariable
from torchrepro.messages import shown
from torchrepro.process_state import closed_doors
from torchrepro.report import Agreement, Drift, Rewrite
from torchrepro.seeding.streams import present_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torchrepro.errors import TorchreproError
    from torchrepro.knobs.knob import Knob


PER_THREAD = frozenset({"backends.cpu.num_threads"})
"""Knobs of which other threads may read another value although nobody changed it: a thread keeps
the number of threads with which it first used torch."""

_FULL = "ieee"
"""What an unset float32 precision comes to: torch asks only whether it is tf32 or bf16
(https://github.com/pytorch/pytorch, aten/src/ATen/Context.cpp). Leaving
``torch.backends.cudnn.flags`` unsets those of cuDNN."""


class Departure(NamedTuple):
    """A write that moved a knob away from where it was to stay."""

    to: Any = None
    writer: Writer = UNSEEN


class Written(NamedTuple):
    """What a knob read after the last write to anything that was seen, and what led there."""

    now: Any
    moved: Departure = Departure()
    """The first write since the knob read what is held."""

    broke: Departure = Departure()
    """The first write since it read that, or something as good."""


@dataclass(eq=False, slots=True)
class BaselineEntry:
    """One knob, and what it read when a profile had set it."""

    knob: Knob
    value: Any
    thread: int
    """The only thread in which the knob can be read, or 0 for any."""

    written: Written
    judged: tuple[Any, str] = (None, "")
    """Another value that the knob has read, and why it is as good, if it is."""

    @classmethod
    def of(cls, knob: Knob) -> BaselineEntry:
        """Hold `knob` to what it reads now in this thread."""
        # Inductor's options are context variables (torch/utils/_config_module.py of pytorch).
        per_thread = (
            knob.scope is Scope.THREAD
            or knob.name in PER_THREAD
            or isinstance(knob.access, InductorVariable)
        )
        now = reading(knob)
        return cls(knob, now, threading.get_ident() if per_thread else 0, Written(now))

    @property
    def readable_here(self) -> bool:
        """Whether what the present thread reads is what is held."""
        return self.thread in (0, threading.get_ident())

    def why_as_good(self, now: Any) -> str:
        """Return in words why `now`, another value than what is held, is as good; else nothing."""
        if now != self.judged[0]:
            self.judged = now, why_as_good(self.knob, now)
        return self.judged[1]

    def write(self, now: Any, writer: Writer) -> None:
        """Take note that `writer` has made the knob read `now`.

        Whoever writes once it has been moved changes nothing about who moved it first.
        """
        was, this = self.written, Departure(now, writer)
        if now == self.value:
            self.written = Written(now)
            return
        was_held = was.now == self.value
        moved = this if was_held else was.moved
        if self.why_as_good(now):
            self.written = Written(now, moved)
        else:
            was_good = was_held or self.why_as_good(was.now)
            self.written = Written(now, moved, this if was_good else was.broke)


@dataclass(eq=False, slots=True)
class Guard:
    """What one profile in force has set, and the drift from it that was seen so far."""

    refuse: Callable[[TorchreproError], None]
    """What is done when the profile turns out not to hold."""

    at_steps: bool = False
    """Whether knobs are read again before optimizer steps."""

    steps: int = 0
    """Optimizer steps since the profile was put in force, of all optimizers."""

    baseline: dict[str, BaselineEntry] = field(default_factory=dict)
    drift: dict[tuple[str, str], Drift] = field(default_factory=dict)
    as_good: dict[str, Rewrite] = field(default_factory=dict)
    """The knobs that now read another value which is as good, by name."""

    switches: dict[str, Writer] = field(default_factory=dict)
    """The determinism switches of frameworks that were seen to write, by name."""

    said: set[tuple[str, str]] = field(default_factory=set)

    @property
    def agreeing(self) -> tuple[Agreement, ...]:
        """The switches that were seen to write, and that no drift comes from."""
        blamed = {drift.by for drift in self.drift.values()}
        seen = self.switches.items()
        agreeing = ((name, who) for name, who in seen if name not in blamed)
        return tuple(Agreement(name, who.place, who.called) for name, who in agreeing)

    @property
    def since(self) -> str:
        """The present moment, in words."""
        if not self.at_steps:
            return "at the end"
        return f"after step {self.steps - 1}" if self.steps else "before any step"


guards: list[Guard] = []
"""One for every profile in force, outermost first."""

_watched: list[tuple[BaselineEntry, Guard]] = []
"""For every knob the entry to which it is held: that of the innermost profile that names it."""

_noting: list[bool] = []  # non-empty while the writers of knobs are wrapped


def reading(knob: Knob) -> Any:
    """Return what `knob` reads, or in words why it can no longer be read."""
    try:
        now = knob.access.read()
        return _FULL if now == "none" and isinstance(knob.access, Fp32Precision) else now
    except Exception as error:  # noqa: BLE001 - a state that cannot be read any more has drifted
        return f"unreadable: {error}"


def guards_at_steps() -> tuple[Guard, ...]:
    """Return those that are read again before optimizer steps, whatever other threads do."""
    return tuple(guard for guard in tuple(guards) if guard.at_steps)


def settle() -> None:
    """Find out anew which entries count. Whatever moved up to now was a profile's doing."""
    before = {each.knob.name: each.written for each, _ in _watched}
    deciding: dict[str, tuple[BaselineEntry, Guard]] = {}
    for guard in tuple(guards):  # outermost first: the last one that names a knob decides
        deciding |= {name: (each, guard) for name, each in guard.baseline.items()}
    for name, (each, _) in deciding.items():
        if each.readable_here:
            now, last = reading(each.knob), before.get(name)
            each.written = last if last is not None and last.now == now else Written(now)
    _watched[:] = deciding.values()  # in one step: other threads look and write meanwhile


def moved_from_now() -> Callable[[], tuple[Knob, ...]]:
    """Return a function that says which of the knobs that are held have moved since this call.

    Putting a profile in force may move more than it names: torch ties some of its flags together.
    It may also put right what has drifted until now, which is therefore read before.
    """
    look(guards)
    before = [(each.knob, reading(each.knob)) for each, _ in _watched]
    return lambda: tuple(knob for knob, value in before if reading(knob) != value)


def look(
    concerned: Collection[Guard], moment: Callable[[Guard], str] = lambda guard: guard.since
) -> list[tuple[Guard, Drift]]:
    """Read the knobs of the guards `concerned` again, and return what has drifted.

    `moment` says when it was seen.
    """
    if present_worker() is not None:
        return []
    found = []
    for each, guard in tuple(_watched):
        if guard not in concerned or not each.readable_here:
            continue
        now = reading(each.knob)
        if now == each.value:
            guard.as_good.pop(each.knob.name, None)
            continue
        # What was seen before keeps the moment at which that was.
        if why := each.why_as_good(now):
            known = guard.as_good.get(each.knob.name)
            if known is None or known.now != now:
                guard.as_good[each.knob.name] = _rewrite(each, now, why, moment(guard))
            continue
        guard.as_good.pop(each.knob.name, None)
        drift = _drift(each, now, moment(guard))
        found.append((guard, guard.drift.setdefault(key(drift), drift)))
    return found


def _drift(each: BaselineEntry, now: Any, when: str) -> Drift:
    name, was, written = each.knob.name, each.value, each.written
    if written.now != now:
        return Drift(name, was, now, when)
    to, writer = written.broke
    moved_on = bool(writer.place) and to != now
    return Drift(name, was, now, when, writer.place, writer.called, writer.switch, moved_on)


def _rewrite(each: BaselineEntry, now: Any, why: str, when: str) -> Rewrite:
    written = each.written
    writer = written.moved.writer if written.now == now and written.moved.to == now else UNSEEN
    by = writer.switch or switch_that_writes(each.knob.variable, now)
    if closed := closed_doors().get(each.knob.door):
        why = f"{why}; {closed}, and what has read it by then goes on with {shown(each.value)}"
    return Rewrite(each.knob.name, each.value, now, why, when, writer.place, writer.called, by)


def key(drift: Drift) -> tuple[str, str]:
    """Return what makes two sightings the same drift."""
    return drift.knob, shown(drift.now)


@contextmanager
def noting_writers() -> Iterator[None]:
    """Remember within the block which line wrote last to the knobs that count.

    A block within another one does nothing.
    """
    if _noting:
        yield
        return
    with watch_writers(_note_writer):
        _noting.append(True)
        try:
            yield
        finally:
            _noting.clear()
            for each, _ in tuple(_watched):  # the next write may go unseen
                each.written = Written(each.written.now)


def _note_writer() -> None:
    writer = switch_that_calls()
    for each, _ in tuple(_watched):
        now = reading(each.knob) if each.readable_here else each.written.now
        if now != each.written.now:
            writer = writer if writer.place else present_writer()
            each.write(now, writer)
    if writer.switch:
        for guard in guards_at_steps():
            guard.switches.setdefault(writer.switch, writer)
