"""Policies that data-loading workers inherit, however they are started."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.seeding import loader_hook

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchrepro.knobs.knob import Access

_policies: dict[str, Inherited] = {}  # knob -> the policy behind it


@dataclass(frozen=True, slots=True)
class Inherited:
    """A policy whose value is put in force in workers that are started afresh as well.

    A worker that is forked has it in any case; one that is spawned starts from nothing.
    """

    knob: str
    policy: Access
    at_rest: Any
    """The value with which nothing is installed."""

    def __post_init__(self) -> None:
        _policies[self.knob] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.policy, name)  # `holds` and `refuses`, where the policy has them

    def read(self) -> Any:
        return self.policy.read()

    def save(self) -> Any:
        return self.policy.save()

    def write(self, value: Any) -> None:
        self.policy.write(value)
        _hand_on()

    def restore(self, saved: Any) -> None:
        self.policy.restore(saved)
        _hand_on()


def _hand_on() -> None:
    """Have workers that are started afresh put the present values in force."""
    present = [(one.policy, one.policy.read(), one.at_rest) for one in _policies.values()]
    wanted = tuple((policy, value) for policy, value, at_rest in present if value != at_rest)
    loader_hook.prepare_workers(partial(_put_in_force, wanted) if wanted else None)


def _put_in_force(wanted: Iterable[tuple[Access, Any]]) -> None:
    for policy, value in wanted:
        policy.write(value)
