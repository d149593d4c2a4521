"""Where two profiles disagree, key by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.profile.composition import NOT_INHERITED, flatten

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved


@dataclass(frozen=True, slots=True)
class Difference:
    """A key that two profiles set differently; None where one leaves it alone."""

    key: str
    left: Any
    right: Any


def differences(left: Resolved, right: Resolved) -> list[Difference]:
    """Return the keys on which `left` and `right` disagree, name and description aside."""
    one, two = flatten(left.values), flatten(right.values)
    keys = [key for key in sorted({*one, *two}) if key not in NOT_INHERITED]
    return [
        Difference(key, one.get(key), two.get(key)) for key in keys if one.get(key) != two.get(key)
    ]
