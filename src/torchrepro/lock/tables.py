"""The answers of `check` and `diff` as a terminal shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrepro.console import table
from torchrepro.lock.diff import HELD, HELD_STRICTLY, Rank
from torchrepro.messages import printable, shown, some

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrepro.console import Part, Table
    from torchrepro.lock.check import CheckResult
    from torchrepro.lock.diff import Comparison, Difference, NotCompared

_NONE = {
    "profile": "not set",
    "knobs": "not set",
    "environment": "not set",
    "seeding calls": "not seeded",
    "packs": "not used",
}


def difference_parts(found: Comparison, left: str, right: str) -> tuple[Part, ...]:
    """Return what a reader is shown of a comparison: the table, then what could not be compared."""
    differing = [each for each in found.differences if each.rank is not Rank.STARTED]
    aside = found.having(Rank.STARTED)
    parts: list[Part] = [_table(differing, left, right)] if differing else ["the same"]
    parts += [
        f"{each.key}: {_value(each, each.left)} | {_value(each, each.right)}" for each in aside
    ]
    return (*parts, *_not_compared_lines(found.not_compared))


def checked_parts(found: CheckResult) -> tuple[Part, ...]:
    """Return what a reader is shown of a check: what breaks the lock, then the verdict."""
    parts: list[Part] = [_table(found.broken, "locked", "here")] if found.broken else []
    parts.append(_verdict(found))
    held = HELD_STRICTLY if found.strict else HELD
    for rank in (rank for rank in Rank if rank not in held):
        names = [f"{_name(each)} ({_change(each)})" for each in found.comparison.having(rank)]
        if names:
            parts.append(f"not held, {rank}: {some(names)}")
    return (*parts, *_not_compared_lines(found.not_compared))


def _verdict(found: CheckResult) -> str:
    if found.met:
        return f"{found.lock} is met: nothing differs that it holds"
    counts = [
        f"{number} that {rank.value if number == 1 else _PLURAL[rank]}"
        for rank in HELD_STRICTLY
        if (number := sum(each.rank is rank for each in found.broken))
    ]
    return f"{found.lock} is not met: {', '.join(counts)}"


_CALLED = {
    "guarantee": "guarantee ",
    "versions": "version of ",
    "environment": "exported ",
    "packs": "version of pack ",
}

_PLURAL = {
    Rank.CHANGES: "change numbers",
    Rank.MAY: "may change numbers",
    Rank.SHOULD_NOT: "should not change numbers",
}


def _table(rows: Sequence[Difference], left: str, right: str) -> Table:
    cells = [
        (str(each.rank), _name(each), _value(each, each.left), _value(each, each.right))
        for each in rows
    ]
    return table(("how likely", "what differs", left, right), cells)


def _name(found: Difference) -> str:
    """Return a key as it is called where sections are not named."""
    where = f"{', '.join(found.ranks)}: " if found.ranks else ""
    return where + _CALLED.get(found.section, "") + printable(found.key)


def _change(found: Difference) -> str:
    return f"{_value(found, found.left)} -> {_value(found, found.right)}"


def _value(found: Difference, value: Any) -> str:
    return _NONE.get(found.section, "none") if value is None else shown(value)


def _not_compared_lines(rows: Iterable[NotCompared]) -> list[str]:
    """Return a line for each side that does not tell of something."""
    sides = dict.fromkeys(each.side for each in rows)
    return [
        f"not compared, {side} does not tell: "
        + some([printable(str(each)) for each in rows if each.side == side])
        for side in sides
    ]
