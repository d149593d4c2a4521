"""The value of `device.fallback`: one word, or one per op, by name or by pattern."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Value = str | Mapping[str, Any] | None


def per_op(value: Value) -> Mapping[str, str]:
    """Return the word of every op and pattern that `value` names."""
    return value.get("ops", {}) if isinstance(value, Mapping) else {}


def is_pattern(name: str) -> bool:
    """Whether `name` stands for several ops."""
    return any(sign in name for sign in "*?[")


def waits_for_refusal(value: Value) -> bool:
    """Whether `value` does something only once torch refuses to run a kernel."""
    named = per_op(value)
    words = {value} if isinstance(value, str) else set(named.values())
    return words != {"error"} and all(map(is_pattern, named))
