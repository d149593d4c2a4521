"""The whole numbers that the functions of this package take, judged in one place."""

from __future__ import annotations

from operator import index
from typing import Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem, shown

LARGEST = 2**63 - 1


def whole(argument: str, value: Any, largest: int = LARGEST) -> int:
    """Return `value` as an int from 0 to `largest`; raises `SeedingError` for anything else.

    Integers of numpy and torch are taken; a bool or a float is not, even a whole one.
    """
    try:
        number = None if _is_truth(value) else index(value)
    except (TypeError, ValueError, RuntimeError):  # torch raises the last for other dtypes
        number = None
    if number is None or not 0 <= number <= largest:
        raise SeedingError(
            Problem(
                "not a whole number" if number is None else "out of range",
                key=argument,
                found=shown(repr(value) if isinstance(value, str) else value),
                legal=f"a whole number, 0 to {largest}",
            )
        )
    return number


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
