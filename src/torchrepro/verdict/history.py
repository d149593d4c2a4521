"""Where a value that a record read came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.trace.reading import INPUT, OUTPUT, Record, Site
from torchrepro.verdict.columns import MAIN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torchrepro.trace.reading import Trace

_RECORD = "select id, thread, site, argument, inputs, outputs, step from record"


@dataclass(frozen=True, slots=True)
class Seen:
    """A record in the words of its trace."""

    trace: Trace
    record: Record
    step: int

    @property
    def site(self) -> Site:
        """Where the program made it."""
        return self.trace.sites[self.record.site]

    @property
    def argument(self) -> str:
        """The arguments that are not tensors."""
        return self.trace.arguments[self.record.argument]

    @property
    def thread(self) -> str:
        """The name of the thread it ran on."""
        return self.trace.threads.get(self.record.thread, str(self.record.thread))

    @property
    def inputs(self) -> list[bytes]:
        """The fingerprint of each input."""
        return pieces(self.record.inputs, INPUT)

    @property
    def outputs(self) -> list[bytes]:
        """The fingerprint of each output."""
        return pieces(self.record.outputs, OUTPUT)


def pieces(text: bytes, length: int) -> list[bytes]:
    """Return fingerprints that are stored one after the other."""
    return [text[start : start + length] for start in range(0, len(text), length)]


def seen(trace: Trace, record: int) -> Seen:
    """Return a record by its id."""
    *row, step = trace.connection.execute(f"{_RECORD} where id = ?", (record,)).fetchone()
    return Seen(trace, Record(*row), step)


def last_written(
    trace: Trace, before: int, values: Iterable[bytes], after: int = 0
) -> Mapping[bytes, Seen]:
    """Return for each value the last record between two others that wrote it, where there is one.

    Reads backward and stops as soon as all are found; a value that nothing wrote costs a pass
    over all that lies between.
    """
    missing = set(values)
    found: dict[bytes, Seen] = {}
    if not missing:
        return found
    test = " or ".join(["instr(outputs, ?)"] * len(missing))
    rows = trace.connection.execute(
        f"{_RECORD} where id < ? and id > ? and ({test}) order by id desc",
        (before, after, *missing),
    )
    for *row, step in rows:
        one = Seen(trace, Record(*row), step)
        written = missing & {output[:INPUT] for output in one.outputs}
        found |= dict.fromkeys(written, one)
        missing -= written
        if not missing:
            break
    return found


def in_step_before(this: Seen) -> Seen | None:
    """Return the record that was the same op, the same time round, in the step before.

    There is none on threads that do not keep step.
    """
    trace, key = this.trace, this.site.key
    earlier = [step for step in trace.steps if step < this.step]
    if not earlier or this.record.thread != MAIN:
        return None
    number = _alike(trace, this.step, key).index(this.record.id)
    then = _alike(trace, earlier[-1], key)
    return seen(trace, then[number]) if number < len(then) else None


def _alike(trace: Trace, step: int, key: tuple[str, str, str]) -> list[int]:
    row = trace.steps[step]
    rows = trace.connection.execute(
        "select id, site from record where id >= ? and id < ? and thread = ? order by id",
        (row.first, row.first + row.records, MAIN),
    )
    sites = {number for number, site in trace.sites.items() if site.key == key}
    return [number for number, site in rows if site in sites]
