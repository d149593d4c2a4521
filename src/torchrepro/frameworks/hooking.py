"""What every hook into a framework shares: the profile in force, and what is said and logged of it.

A framework is imported as fast with a profile as without: what only some programs use is loaded
when it is used.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.console import note, say
from torchrepro.errors import TorchreproError
from torchrepro.messages import shown
from torchrepro.patching import MissingHookError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.report import Report


class InForce(NamedTuple):
    """A profile in force, as a framework's checkpoint says it."""

    resolved: ResolvedProfile
    report: Callable[[], Report]


profiles: list[InForce] = []  # those in force, outermost first


def in_force() -> InForce | None:
    """Return the innermost profile in force, or None."""
    return profiles[-1] if profiles else None


@contextmanager
def going_on_without(framework: str, what: str) -> Iterator[None]:
    """Say that `what` failed within the block, and let the program of the framework go on.

    An error that torchrepro itself has to say is raised.
    """
    try:
        yield
    except (TorchreproError, MissingHookError):
        raise
    except Exception as error:  # noqa: BLE001 - a program is not ended by what it did not ask for
        why = str(error).strip().partition("\n")[0]
        say(f"{framework}: {what} failed, and is left out: {type(error).__name__}: {why}")


class Switch(NamedTuple):
    """A switch of a framework as a program has set it, and what it does to one knob."""

    spelling: str  # as the program spells it, such as ``Trainer(benchmark=True)``
    knob: str
    value: Any  # what the knob holds once the framework has done what the switch says


def say_switches(framework: str, switches: Iterable[Switch]) -> None:
    """Say which of the `switches` of a program agree with the profile in force, and which do not.

    A switch of whose knob the profile says nothing is the program's own affair. Those that agree
    are a note, which `--quiet` leaves out.
    """
    from torchrepro.knobs.catalogue import knobs_by_name
    from torchrepro.outcomes import why_equivalent
    from torchrepro.profile.resolved import flatten

    profile = in_force()
    if profile is None:
        return
    name, asked = profile.resolved.name, flatten(profile.resolved.values)
    concerned = [switch for switch in switches if switch.knob in asked]
    agreeing = dict.fromkeys(switch.spelling for switch in concerned)
    for spelling, key, value in concerned:
        knob = knobs_by_name().get(key)
        if value != asked[key] and not (knob and why_equivalent(knob, value)):
            agreeing.pop(spelling, None)
            say(
                f"{framework}: {spelling} does not agree with {name}: {key} is "
                f"{shown(asked[key])} there, and the switch makes it {shown(value)}"
            )
    if agreeing:
        verb = "agrees" if len(agreeing) == 1 else "agree"
        note(f"{framework}: {', '.join(agreeing)} {verb} with {name}")


def log_profile(framework: str, loggers: Iterable[Any], place_of: Callable[[Any], Any]) -> None:
    """Write digest, values and manifest of the profile in force to each of `loggers`.

    `place_of` gives what a logger writes to: a run of MLflow or wandb, a SummaryWriter, or a path
    to a folder; a logger with another place is left out. One that refuses is said on standard
    error, and the program goes on.
    """
    from torchrepro.manifest.contents import manifest
    from torchrepro.manifest.destinations import destination_of

    profile, its = in_force(), None
    for logger in loggers if profile is not None else ():
        with going_on_without(framework, f"writing the profile to {type(logger).__name__}"):
            place = place_of(logger)
            destination = destination_of(place)
            if destination is not None and profile is not None:
                its = its or manifest(profile.resolved, profile.report())
                destination.write(place, its)
