"""Policies that data-loading workers inherit, however they are started."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.knobs.on_demand import OnDemand
from torchrepro.seeding import loader_hook

if TYPE_CHECKING:
    from collections.abc import Iterable

_policies: list[Inherited] = []


@dataclass(frozen=True, slots=True)
class Inherited(OnDemand):
    """A policy whose value is put in force in workers that are started afresh as well.

    A worker that is forked has it in any case; one that is spawned starts from nothing.
    """

    def __post_init__(self) -> None:
        _policies.append(self)

    def write(self, value: Any) -> None:
        OnDemand.write(self, value)
        _hand_on()

    def restore(self, saved: Any) -> None:
        OnDemand.restore(self, saved)
        _hand_on()


def _hand_on() -> None:
    """Have workers that are started afresh put the present values in force."""
    present = [(policy, policy.read()) for policy in _policies]
    wanted = tuple((policy, value) for policy, value in present if value != policy.at_rest)
    loader_hook.prepare_workers(partial(_put_in_force, wanted) if wanted else None)


def _put_in_force(wanted: Iterable[tuple[OnDemand, Any]]) -> None:
    for policy, value in wanted:
        OnDemand.write(policy, value)  # there it is handed on to nobody
