"""Every promise that a machine can be tried on: its name, its devices, and what tries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.process_state import HARDWARE
from torchrepro.selftest.trials import ACCELERATORS, CPU, DEVICES, Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise, tried once for each of its devices."""

    name: str
    sentence: str
    """What holds, in words."""

    attempt: str
    """The function that tries it, as ``module:name`` within the package."""

    devices: tuple[str, ...] = DEVICES
    of_each_knob: bool = False
    """Whether it is tried for every knob, on the device that the knob belongs to."""

    many: str = ""
    """The sentence for several knobs at once, with a place for how many."""

    limit: float = 60.0
    """Seconds after which an attempt counts as failed."""

    def trials(self) -> Iterable[Trial]:
        """Yield what is to be tried, whatever this machine has."""
        if not self.of_each_knob:
            yield from (Trial(self.name, device) for device in self.devices)
            return
        for knob in CATALOGUE:
            yield Trial(self.name, HARDWARE.get(knob.hardware, CPU), knob.name)


PROMISES = (
    Promise(
        "knob",
        "a setting is written, reads back, and is put back as it was",
        "selftest.attempts:knob_holds",
        of_each_knob=True,
        many="written, read back, and put back as it was: {}",
    ),
    Promise(
        "dropout",
        "`dropout: zero` lets every element through",
        "selftest.attempts:dropout_is_zeroed",
    ),
    Promise(
        "host random numbers",
        "`device.rng: host` draws what the CPU draws",
        "selftest.attempts:host_draws",
        devices=ACCELERATORS,  # the CPU draws what the CPU draws
    ),
    Promise(
        "fallback",
        "`device.fallback: cpu` goes on where torch refuses",
        "selftest.attempts:fallback_goes_on",
    ),
    Promise(
        "one bit",
        "two recordings tell one bit, and the op it is in",
        "selftest.attempts:one_bit_is_told",
    ),
    Promise(
        "the same twice",
        "two runs under debug-strict are the same",
        "selftest.attempts:two_runs_are_the_same",
        limit=180.0,
    ),
)


def promises_by_name() -> Mapping[str, Promise]:
    """Return every promise under its name."""
    return {promise.name: promise for promise in PROMISES}
