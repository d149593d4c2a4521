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

from torchrepro.guard.writers import (
    UNSEEN,
    present_writer,
    switch_that_calls,
    switch_that_sets,
    watch_writers,
)
from torchrepro.knobs.knob import Scope
from torchrepro.knobs.linked_state import Fp32Precision, InductorVariable
from torchrepro.messages import shown
from torchrepro.outcomes import Change, Writer, why_equivalent
from torchrepro.process_state import closed_doors
from torchrepro.seeding.streams import present_worker

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torchrepro.errors import TorchreproError
    from torchrepro.knobs.knob import Knob


PER_THREAD = frozenset({"backends.cpu.num_threads"})
"""Knobs of which other threads may read another value although nobody changed it: a thread keeps
the number of threads with which it first used torch."""


class LastWrite(NamedTuple):
    """What a knob read after the last write that was seen, and which writes led there.

    Of a write: what the knob read after it, and who made it.
    """

    value: Any
    first_change: tuple[Any, Writer] = (None, UNSEEN)
    """The first write since the knob read the profile's value."""

    first_break: tuple[Any, Writer] = (None, UNSEEN)
    """The first write since it read that, or an equivalent value."""


@dataclass(eq=False, slots=True)
class BaselineEntry:
    """One knob, and what it read when a profile had set it."""

    knob: Knob
    value: Any
    thread: int
    """The only thread in which the knob can be read, or 0 for any."""

    last: LastWrite
    judged: tuple[Any, str] = (None, "")
    """Another value that the knob has read, and why it is equivalent, if it is."""

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
        return cls(knob, now, threading.get_ident() if per_thread else 0, LastWrite(now))

    @property
    def readable_here(self) -> bool:
        """Whether what the present thread reads is what is held."""
        return self.thread in (0, threading.get_ident())

    def why_equivalent(self, now: Any) -> str:
        """Return in words why `now`, another value than what is held, is equivalent, if it is."""
        if now != self.judged[0]:
            self.judged = now, why_equivalent(self.knob, now)
        return self.judged[1]

    def note_write(self, now: Any, writer: Writer) -> None:
        """Take note that `writer` has made the knob read `now`."""
        was, this = self.last, (now, writer)
        if now == self.value:
            self.last = LastWrite(now)
            return
        # Whoever writes once it has been moved changes nothing about who moved it first.
        was_held = was.value == self.value
        change = this if was_held else was.first_change
        if self.why_equivalent(now):
            self.last = LastWrite(now, change)
        else:
            unbroken = was_held or self.why_equivalent(was.value)
            self.last = LastWrite(now, change, this if unbroken else was.first_break)

    def change(self, now: Any, when: str) -> Change:
        """Return the knob's change to `now`, which has a reason if `now` is equivalent."""
        name, was, why = self.knob.name, self.value, self.why_equivalent(now)
        value, writer = self.last.first_change if why else self.last.first_break
        if self.last.value != now or (why and value != now):
            writer = UNSEEN
        if not why:
            moved_on = bool(writer.where) and value != now
            return Change(name, was, now, when, *writer, moved_on=moved_on)
        by = writer.by or switch_that_sets(self.knob.variable, now)
        if closed := closed_doors().get(self.knob.door):
            why = f"{why}; {closed}, and what has read it by then goes on with {shown(was)}"
        return Change(name, was, now, when, writer.where, writer.called, by, why=why)


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
    drift: dict[tuple[str, str], Change] = field(default_factory=dict)
    as_good: dict[str, Change] = field(default_factory=dict)
    """The knobs that now read another, equivalent value, by name."""

    switches: dict[str, Writer] = field(default_factory=dict)
    """The determinism switches of frameworks that were seen to write, by name."""

    said: set[tuple[str, str]] = field(default_factory=set)

    @property
    def agreeing(self) -> tuple[Writer, ...]:
        """The switches that were seen to write, and that no drift comes from."""
        blamed = {drift.by for drift in self.drift.values()}
        return tuple(switch for switch in self.switches.values() if switch.by not in blamed)

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
    except Exception as error:  # noqa: BLE001 - a state that cannot be read any more has drifted
        return f"unreadable: {error}"
    # An unset float32 precision comes to ieee: torch asks only whether it is tf32 or bf16
    # (https://github.com/pytorch/pytorch, aten/src/ATen/Context.cpp). Leaving
    # ``torch.backends.cudnn.flags`` unsets those of cuDNN.
    return "ieee" if now == "none" and isinstance(knob.access, Fp32Precision) else now


def guards_at_steps() -> tuple[Guard, ...]:
    """Return those that are read again before optimizer steps, whatever other threads do."""
    return tuple(guard for guard in tuple(guards) if guard.at_steps)


def settle() -> None:
    """Find out anew which entries count. Whatever moved up to now was a profile's doing."""
    before = {each.knob.name: each.last for each, _ in _watched}
    deciding: dict[str, tuple[BaselineEntry, Guard]] = {}
    for guard in tuple(guards):  # outermost first: the last one that names a knob decides
        deciding |= {name: (each, guard) for name, each in guard.baseline.items()}
    for name, (each, _) in deciding.items():
        if each.readable_here:
            now, last = reading(each.knob), before.get(name)
            each.last = last if last is not None and last.value == now else LastWrite(now)
    _watched[:] = deciding.values()  # in one step: other threads read and write meanwhile


def moved_from_now() -> Callable[[], tuple[Knob, ...]]:
    """Return a function that says which of the knobs that are held have moved since this call.

    Putting a profile in force may move more than it names: torch ties some of its flags together.
    It may also put right what has drifted until now, which is therefore read before.
    """
    check(guards)
    before = [(each.knob, reading(each.knob)) for each, _ in _watched]
    return lambda: tuple(knob for knob, value in before if reading(knob) != value)


def check(
    concerned: Collection[Guard], moment: Callable[[Guard], str] = lambda guard: guard.since
) -> list[tuple[Guard, Change]]:
    """Read the knobs of the guards `concerned` again, and return what has drifted.

    `moment` says when it was seen.
    """
    if present_worker() is not None:
        return []
    found = []
    for each, guard in tuple(_watched):
        if guard not in concerned or not each.readable_here:
            continue
        now, name = reading(each.knob), each.knob.name
        if now == each.value:
            guard.as_good.pop(name, None)
            continue
        known = guard.as_good.get(name)
        if known is not None and known.now == now:
            continue  # it keeps the moment at which it was seen
        guard.as_good.pop(name, None)
        change = each.change(now, moment(guard))
        if change.why:
            guard.as_good[name] = change
        else:
            found.append((guard, guard.drift.setdefault(key(change), change)))
    return found


def key(drift: Change) -> tuple[str, str]:
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
                each.last = LastWrite(each.last.value)


def _note_writer() -> None:
    writer = switch_that_calls()
    for each, _ in tuple(_watched):
        now = reading(each.knob) if each.readable_here else each.last.value
        if now != each.last.value:
            writer = writer if writer.where else present_writer()
            each.note_write(now, writer)
    if writer.by:
        for guard in guards_at_steps():
            guard.switches.setdefault(writer.by, writer)
