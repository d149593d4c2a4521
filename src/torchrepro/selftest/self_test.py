"""The answer of a self-test, in a terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.console import Displayed, Styled, parts, table
from torchrepro.messages import some
from torchrepro.selftest.trials import DEVICES, Result, Row
from torchrepro.verdict.render import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.console import Part
    from torchrepro.selftest.promises import Promise

FORMAT = 1
"""The number of the JSON format."""

_NAMED = 2  # settings or promises that are named one by one
_STYLES = {Result.HELD: "green", Result.FAILED: "bold red", Result.NOT_HERE: "dim"}


@dataclass(frozen=True, slots=True)
class SelfTest(Displayed):
    """What became of every promise on one machine."""

    version: str
    """The version of torchrepro."""

    date: str
    machine: Mapping[str, Any]
    """Versions, hardware and devices; see `machine.machine_facts`."""

    promises: tuple[Promise, ...]
    rows: tuple[Row, ...]
    seconds: float

    @property
    def held(self) -> bool:
        """Whether no promise failed."""
        return not self.having(Result.FAILED)

    def having(self, result: Result) -> tuple[Row, ...]:
        """Return the rows with this result."""
        return tuple(row for row in self.rows if row.result is result)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        return {
            "selftest": FORMAT,
            "torchrepro": self.version,
            "date": self.date,
            "machine": dict(self.machine),
            "promises": {promise.name: promise.sentence for promise in self.promises},
            "counts": {str(result): len(self.having(result)) for result in Result},
            "seconds": round(self.seconds, 1),
            "rows": [row.to_json() for row in self.rows],
        }


@parts.register(SelfTest)
def selftest_parts(found: SelfTest) -> tuple[Part, ...]:
    """Return the lines and the table that show a self-test.

    Promises that are held take a line for each device, settings together; so does what is not
    here. Each one that failed has its own, with what was expected and what was found.
    """
    rows = [*_held(found), *_failed(found), *_not_here(found)]
    cells = [(Styled(str(row[0]), _STYLES[row[0]]), *row[1:]) for row in rows]
    return (_heading(found), table(("result", "device", "s", "promise"), cells), _summary(found))


def _heading(found: SelfTest) -> str:
    versions = found.machine["versions"]
    names = [name for names in found.machine["names"].values() for name in dict.fromkeys(names)]
    cpu = found.machine["hardware"].get("cpu", "")
    words = [f"torchrepro {found.version}", f"torch {versions.get('torch')}", *names, cpu]
    return ", ".join(filter(None, [*words, found.date[:10]]))


def _held(found: SelfTest) -> Iterator[tuple[Result, str, str, str]]:
    held = found.having(Result.HELD)
    for promise in found.promises:
        for device in DEVICES:
            rows = _of(held, promise, device)
            if rows:
                seconds = sum(row.seconds for row in rows)
                words = (
                    promise.many.format(counted(len(rows), "setting"))
                    if promise.of_each_knob
                    else promise.sentence
                )
                yield Result.HELD, device, f"{seconds:.1f}", words


def _failed(found: SelfTest) -> Iterator[tuple[Result, str, str, str]]:
    sentences = {promise.name: promise.sentence for promise in found.promises}
    for row in found.having(Result.FAILED):
        subject = row.trial.knob or sentences[row.trial.promise]
        words = f"{subject}: expected: {row.expected}; found: {row.found}"
        yield Result.FAILED, row.trial.device, f"{row.seconds:.1f}", words


def _not_here(found: SelfTest) -> Iterator[tuple[Result, str, str, str]]:
    absent = found.having(Result.NOT_HERE)
    for device in DEVICES:
        reasons = Counter(row.why for row in absent if row.trial.device == device)
        for why in reasons:
            rows = [row for row in absent if (row.trial.device, row.why) == (device, why)]
            yield Result.NOT_HERE, device, "", f"{_amount(rows, found.promises)}: {why}"


def _amount(rows: Sequence[Row], promises: Sequence[Promise]) -> str:
    """Return what several rows are about: the names of a few, or how many there are."""
    knobs = [row.trial.knob for row in rows if row.trial.knob]
    others = [row.trial.promise for row in rows if not row.trial.knob]
    named = some(knobs) if len(knobs) <= _NAMED else counted(len(knobs), "setting")
    if len(others) <= _NAMED:
        return ", ".join(filter(None, [named, *others]))
    return ", ".join(filter(None, [named, counted(len(others), "promise")]))


def _of(rows: Sequence[Row], promise: Promise, device: str) -> list[Row]:
    return [row for row in rows if (row.trial.promise, row.trial.device) == (promise.name, device)]


def _summary(found: SelfTest) -> str:
    counts = {result: len(found.having(result)) for result in Result}
    words = ", ".join(f"{count} {result}" for result, count in counts.items())
    todo = (
        "to send it with its machine: torchrepro selftest --json, as an issue of the project"
        if found.held
        else "to do: send `torchrepro selftest --json` as an issue of the project"
    )
    return f"{words} in {found.seconds:.0f} s\n{todo}"
