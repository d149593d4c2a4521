"""The switches of a framework that set what a profile sets too: which agree with it, said once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.as_good import why_as_good
from torchrepro.console import note, say
from torchrepro.frameworks.hooking import in_force
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.messages import shown
from torchrepro.profile.resolved import flatten

if TYPE_CHECKING:
    from collections.abc import Iterable


class Switch(NamedTuple):
    """A switch as a program has set it, and what it does to one knob."""

    spelling: str
    """As the program spells it, such as ``Trainer(benchmark=True)``."""

    knob: str
    value: Any
    """What the knob holds once the framework has done what the switch says."""


def say_switches(framework: str, switches: Iterable[Switch]) -> None:
    """Say which of the `switches` of a program agree with the profile in force, and which do not.

    A switch of whose knob the profile says nothing is the program's own affair. Those that agree
    are a note, which `--quiet` leaves out.
    """
    profile = in_force()
    if profile is None:
        return
    name, asked = profile.resolved.name, flatten(profile.resolved.values)
    concerned = [switch for switch in switches if switch.knob in asked]
    contrary = [s for s in concerned if not _agrees(s, asked[s.knob])]
    agreeing = dict.fromkeys(s.spelling for s in concerned)
    for switch in contrary:
        agreeing.pop(switch.spelling, None)
        say(
            f"{framework}: {switch.spelling} does not agree with {name}: {switch.knob} is "
            f"{shown(asked[switch.knob])} there, and the switch makes it {shown(switch.value)}"
        )
    if agreeing:
        verb = "agrees" if len(agreeing) == 1 else "agree"
        note(f"{framework}: {', '.join(agreeing)} {verb} with {name}")


def _agrees(switch: Switch, asked: Any) -> bool:
    knob = knobs_by_name().get(switch.knob)
    return bool(switch.value == asked or (knob and why_as_good(knob, switch.value)))
