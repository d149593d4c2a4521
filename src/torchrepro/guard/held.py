"""What the profiles in force hold knobs to, and what has drifted from it.

There is one guard in a process, and what it does about drift is the knob `guard`. Every profile
that is put in force while it is on adds what it has set; a knob that several of them name is held
to the innermost.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torchrepro.errors import shown
from torchrepro.guard.expected import HOLDS, Expected, in_loader_worker, innermost, reading
from torchrepro.guard.writers import writing_place
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.report import Drift

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchrepro.errors import TorchreproError
    from torchrepro.knobs.knob import Knob


class InForce(Protocol):
    """A profile in force: what to do when it turns out not to hold."""

    @property
    def refuse(self) -> Callable[[TorchreproError], None]: ...


@dataclass(eq=False, slots=True)
class Guard:
    """What one profile in force has set, and the drift from it that was seen so far."""

    applied: InForce
    steps: int = 0
    """Optimizer steps since the profile was put in force, of all optimizers."""

    expected: dict[str, Expected] = field(default_factory=dict)
    drift: dict[tuple[str, str], Drift] = field(default_factory=dict)
    told: set[tuple[str, str]] = field(default_factory=set)

    @property
    def since(self) -> str:
        """The present moment, in words."""
        return f"after step {self.steps - 1}" if self.steps else "before any step"

    def seen_so_far(self) -> tuple[Drift, ...]:
        """Return the drift that was seen up to now, at this moment too."""
        look([self])
        return tuple(self.drift.values())


guards: list[Guard] = []
"""One for every profile that was put in force while the guard was on, outermost first."""

_watched: list[tuple[Expected, Guard]] = []  # what counts of it all
_last: dict[str, Any] = {}  # knob -> what it read after the last write that was seen
_places: dict[str, tuple[Any, str]] = {}  # knob -> the value and the line of that write


def mode() -> str:
    """Return what is done about drift: `none`, `warn` or `error`."""
    return str(knobs_by_name()["guard"].access.read())


def settle() -> None:
    """Find out anew what counts; whatever moved up to now was a profile's doing."""
    owners = {id(each): guard for guard in guards for each in guard.expected.values()}
    counts = innermost(guard.expected for guard in guards)
    _watched[:] = [(each, owners[id(each)]) for each in counts]
    _last.clear()
    _last.update({each.knob.name: reading(each.knob) for each in counts})


@contextmanager
def by_a_profile() -> Iterator[Callable[[], tuple[Knob, ...]]]:
    """Yield a function that tells which knobs that are held were moved within the block so far.

    Putting a profile in force may move more than it names: torch ties some of its flags together.
    """
    before = [(each.knob, reading(each.knob)) for each, _ in _watched]
    yield lambda: tuple(knob for knob, value in before if reading(knob) != value)


def look(
    asked: Iterable[Guard], moment: Callable[[Guard], str] = lambda guard: guard.since
) -> list[tuple[Guard, Drift]]:
    """Read again what counts, and return the drift from what the guards `asked` have set.

    `moment` says when it was seen.
    """
    concerned = list(asked)
    if mode() == "none" or in_loader_worker():
        return []
    found = []
    for each, guard in tuple(_watched):
        now = each.drifted_to() if guard in concerned else HOLDS
        if now is not HOLDS:
            drift = Drift(each.knob.name, each.value, now, moment(guard), _place(each.knob, now))
            # What was seen before keeps the moment at which that was.
            found.append((guard, guard.drift.setdefault(key(drift), drift)))
    return found


def key(drift: Drift) -> tuple[str, str]:
    """Return what makes two sightings the same drift."""
    return drift.knob, shown(drift.now)


def note_writer() -> None:
    """Remember which line wrote last to the knobs that count; to be called after a write."""
    place = ""
    for each, _ in tuple(_watched):
        name, now = each.knob.name, reading(each.knob)
        if now != _last.get(name):
            place = place or writing_place()
            _last[name] = now
            _places[name] = (now, place)


def _place(knob: Knob, now: Any) -> str:
    """Return the line that wrote the value `now`, if it was seen."""
    value, place = _places.get(knob.name, (None, ""))
    return place if value == now else ""
