"""Runs of which one has less than the other: fewer steps, fewer processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrepro.verdict.columns import MAIN
from torchrepro.verdict.digests import at_step
from torchrepro.verdict.pair import NAMES
from torchrepro.verdict.value import Divergence, Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrepro.trace.reading import Trace
    from torchrepro.verdict.pair import Pair

CUT = " (killed, ended by os._exit, or it still runs)"


def ended(pair: Pair) -> Divergence | None:
    """Return where one of two runs ended that were the same up to there.

    What a run that was killed would have done is not known: it is never the same as another.
    """
    last = [_last_step(trace) for trace in pair.traces]
    if not pair.steps:
        return at_step(pair, max(min(last), 0), Kind.ENDED, _nothing_in_common(pair, last))
    short = last.index(min(last))
    asked = pair.traces[short].meta.get("steps")
    if last[0] != last[1] and not (asked and last[short] >= asked[1]):
        shorter, longer = pair.names[short], pair.names[1 - short]
        killed = CUT if pair.traces[short].is_cut else ""
        what = f"{shorter} ended after step {last[short]}{killed}; {longer} goes on to {max(last)}"
        return at_step(pair, last[short] + 1, Kind.ENDED, what)
    cut = [side for side, trace in enumerate(pair.traces) if trace.is_cut]
    if not cut:
        return None  # more of it was not to be recorded
    names = " and ".join(pair.names[side] for side in cut)
    step = min(last[side] for side in cut)
    return at_step(pair, step + 1, Kind.ENDED, f"{names} ended after step {step}{CUT}")


def _last_step(trace: Trace) -> int:
    """Return the number of the last step; what only other threads did after it is none."""
    steps = list(trace.steps.values())
    if steps and not steps[-1].finished and steps[-1].records:
        its = steps[-1]
        of_main = trace.connection.execute(
            "select 1 from record where id >= ? and id < ? and thread = ? limit 1",
            (its.first, its.first + its.records, MAIN),
        ).fetchone()
        steps = steps if of_main else steps[:-1]
    return steps[-1].step if steps else -1


def _nothing_in_common(pair: Pair, last: list[int]) -> str:
    empty = [name for name, step in zip(pair.names, last, strict=True) if step < 0]
    if empty:
        return f"no step was recorded in {' and '.join(empty)}"
    return "no step was recorded in both runs"


def missing(
    left: Mapping[tuple[int, int], Trace],
    right: Mapping[tuple[int, int], Trace],
) -> list[Divergence]:
    """Return the processes that only one of two runs has."""
    return [
        Divergence.without_op(
            rank,
            0,
            Kind.ENDED,
            f"only {NAMES[(rank, ordinal) not in left]} has {_process(ordinal)} of rank {rank}",
        )
        for rank, ordinal in sorted(left.keys() ^ right.keys())
    ]


def _process(ordinal: int) -> str:
    return f"process {ordinal}" if ordinal else "a recording"
