"""Whether two recorded runs were the same, and where they diverge if not."""

from __future__ import annotations

import gc
import math
import sqlite3
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrepro.console import parts
from torchrepro.errors import TraceError
from torchrepro.messages import Problem
from torchrepro.trace.reader import read_run
from torchrepro.trace.request import LEVELS
from torchrepro.verdict.columns import (
    ALONE,
    INDEPENDENT,
    NAMES,
    PROPAGATED,
    Pair,
    StepComparison,
)
from torchrepro.verdict.diagnosis import advice, rung_above_recording
from torchrepro.verdict.records import asked_of
from torchrepro.verdict.render import verdict_parts
from torchrepro.verdict.step_digests import Streams, ended, missing
from torchrepro.verdict.value import Cell, Compared, Divergence, Kind, Setting, Verdict
from torchrepro.verdict.wording import are, counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.diagnosis import EscalationLevel
    from torchrepro.verdict.records import Comparison, Criteria


SECTIONS = {"knobs": "", "versions": "version of ", "hardware": "hardware: "}
"""Parts of what a trace says of its run that hold settings, and how a setting is called."""

SINGLE = ("guarantee", "profile", "digest", "level", "world_size", "program")


def settings(pair: Pair) -> tuple[Setting, ...]:
    """Return the knobs, versions and pieces of hardware in which two runs differ."""
    left, right = (_settings(trace.meta) for trace in pair.traces)
    return tuple(
        Setting(name, left.get(name), right.get(name))
        for name in {**left, **right}
        if left.get(name) != right.get(name)
    )


def _settings(meta: Mapping[str, Any]) -> dict[str, str]:
    found = {name: str(meta[name]) for name in SINGLE if meta.get(name) is not None}
    for section, called in SECTIONS.items():
        found |= {
            f"{called}{name}": str(value) for name, value in (meta.get(section) or {}).items()
        }
    return found


def losses(pair: Pair) -> tuple[tuple[int, float | None, float | None], ...]:
    """Return the loss of each step in both runs, the mean of those of several backward passes."""
    left, right = (_losses(trace) for trace in pair.traces)
    return tuple((step, left.get(step), right.get(step)) for step in sorted({*left, *right}))


def _losses(trace: Trace) -> dict[int, float | None]:
    found = {}
    for step, group in groupby(trace.losses, key=attrgetter("step")):
        values = [loss.value for loss in group]
        numbers = [value for value in values if value is not None]
        whole = bool(numbers) and len(numbers) == len(values)
        found[step] = sum(numbers) / len(numbers) if whole else None
    return found


def notes(pair: Pair) -> Iterator[str]:
    """Yield what a reader has to know of how two recordings go together."""
    for trace, name in zip(pair.traces, pair.names, strict=True):
        if trace.is_truncated:
            yield f"{name} was killed or still runs: it is compared up to its last whole step"
        if not trace.sealed:
            yield (
                f"{name} was recorded by torchrepro 0.2.0 or older, without digests: "
                "not all damage to it would be seen"
            )
    for mine, theirs, name in (
        (pair.left, pair.right, pair.names[0]),
        (pair.right, pair.left, pair.names[1]),
    ):
        steps = [step for step in mine.steps if step not in theirs.steps]
        asked, last = theirs.meta.get("steps"), max(theirs.steps, default=0)
        left_out = [step for step in steps if step < last or (asked and step > asked[1])]
        if left_out:
            steps_are = f"{counted(len(left_out), 'step')} {are(len(left_out))}"
            yield f"{steps_are} recorded in {name} only, from step {left_out[0]} on"
    streams = Streams(pair)
    parted = next((step for step in pair.steps if streams.unequal(step)), None)
    if parted is not None:
        generators = ", ".join(streams.unequal(parted))
        yield f"the states of {generators} differ from the end of step {parted} on"


def replicas(name: str, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield a sentence for each rank whose parameters once were those of the first and are not now.

    Ranks that never agree share a model among them, and are no replicas.
    """
    ranks = [trace for trace in traces if not trace.meta.get("ordinal")]
    for first, other in ((ranks[0], other) for other in ranks[1:]):
        pairs: list[tuple[int, bytes, bytes]] = [
            (step, first.steps[step].parameters, other.steps[step].parameters)
            for step in first.steps
            if step in other.steps
        ]
        agreed = [step for step, one, two in pairs if one and one == two]
        parted = [step for step, one, two in pairs if agreed and step > agreed[0] and one != two]
        if parted:
            yield (
                f"{name}: the parameters of ranks {first.rank} and {other.rank} agree at step "
                f"{max(step for step in agreed if step < parted[0])} "
                f"and no longer at step {parted[0]}"
            )


parts.register(Verdict, verdict_parts)


def compare(
    run_a: Path | str, run_b: Path | str, *, rtol: float | None = None, atol: float | None = None
) -> Verdict:
    """Compare two recorded runs, by their bits or, with a tolerance, by statistics of tensors.

    Returns a `Verdict`: the same, or the first divergence. Runs that were both recorded under the
    guarantee `aligned` are held to its tolerance. Raises `TraceError` for a folder that holds no
    trace, for recordings that cannot be compared in this way, and where nothing is compared.
    """
    return answer(run_a, run_b, tolerance_of(rtol, atol))


def tolerance_of(rtol: float | None, atol: float | None) -> tuple[float, float] | None:
    """Return a tolerance of which at least one part is given; raises `TraceError` for a bad one."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not 0 <= value < math.inf:
            raise TraceError(
                Problem("no tolerance", key=name, found=str(value), legal="0 or more, and finite")
            )
    return None if rtol is None and atol is None else (rtol or 0.0, atol or 0.0)


def answer(
    run_a: Path | str,
    run_b: Path | str,
    tolerance: tuple[float, float] | None,
    *,
    one_program: bool = False,
) -> Verdict:
    """Return whether two runs are the same, as `asked.asked_of` takes the question."""
    with ExitStack() as stack:
        stack.enter_context(_no_garbage_sought())
        left, right = (_opened(run, stack) for run in (run_a, run_b))
        runs = str(run_a), str(run_b)
        stack.enter_context(_read_to_the_end(runs))
        pairs = [Pair(left[which], right[which], runs) for which in sorted(left) if which in right]
        asked = asked_of(pairs, tolerance, one_program=one_program)
        verdict = _answer(runs, (left, right), pairs, asked)
        return replace(verdict, advice=advice(verdict, next(iter(left.values())).meta))


def next_rung(verdict: Verdict) -> EscalationLevel | None:
    """Return what to add to the profile of the left run where two runs part; None at the top.

    Raises `TraceError` if its recording is gone.
    """
    if verdict.first is None:
        return None
    with ExitStack() as stack:
        meta = next(iter(_opened(verdict.left, stack, records=False).values())).meta
        return rung_above_recording(meta, verdict.first)


@contextmanager
def _read_to_the_end(runs: tuple[str, str]) -> Iterator[None]:
    """Raise `TraceError` if a trace, which was whole when it was opened, cannot be read on."""
    try:
        yield
    except sqlite3.Error as error:
        found = " or ".join(runs)
        raise TraceError(
            Problem(f"has changed since it was opened: {error}", found=found)
        ) from None


@contextmanager
def _no_garbage_sought() -> Iterator[None]:
    """Leave the garbage collector out of it: rows are no garbage, and many enough to call it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _opened(
    run: Path | str, stack: ExitStack, *, records: bool = True
) -> dict[tuple[int, int], Trace]:
    """Return the traces of a run by rank and process."""
    traces = read_run(run, records=records)
    for trace in traces:
        stack.callback(trace.close)
    # Which of several processes of a rank was there first is a matter of time; its name is not.
    traces.sort(key=lambda trace: (trace.rank, _name(trace), int(trace.meta.get("ordinal", 0))))
    found: dict[tuple[int, int], Trace] = {}
    for trace in traces:
        before = sum(rank == trace.rank for rank, _ in found)
        found[trace.rank, before] = trace
    return found


def _name(trace: Trace) -> tuple[bool, str, str]:
    """Return what a process is called: the main one comes first."""
    name = str(trace.meta.get("process", ""))
    return name != "MainProcess", name, str(trace.meta.get("program", ""))


def _answer(
    runs: tuple[str, str],
    traces: tuple[dict[tuple[int, int], Trace], dict[tuple[int, int], Trace]],
    pairs: Sequence[Pair],
    asked: Criteria,
) -> Verdict:
    left, right = traces
    if pairs and not any(pair.steps for pair in pairs) and _all_have_steps(pairs):
        raise TraceError(
            Problem(
                "no step was recorded in both runs",
                found=" and ".join(runs),
                todo="record the same steps of both",
            )
        )
    found = [PairComparison.of(pair, asked.comparison(pair)) for pair in pairs]
    absent = missing(left, right)
    first = _first(found)
    tally = sum((one.tally for one in found), Counter[str]())
    if first is not None:
        tally[first.sort] -= 1
    parting = first.first if first else next((divergence for divergence in absent), None)
    compared = _compared(pairs)
    if parting is None and not any(one.anything for one in found):
        raise TraceError(
            Problem(
                "nothing was recorded that could be compared",
                found=" and ".join(runs),
                todo=f"record both at one level, finer than `{compared.level}`",
            )
        )
    return Verdict(
        same=parting is None,
        left=runs[0],
        right=runs[1],
        compared=compared,
        first=parting,
        tolerance=asked.tolerance,
        propagated=tally[PROPAGATED],
        independent=tally[INDEPENDENT],
        by_module=tuple(sum((one.by_module for one in found), Counter[str]()).items()),
        map=tuple(_cells(found)),
        losses=losses(pairs[0]) if pairs else (),
        settings=settings(pairs[0]) if pairs else (),
        across_ranks=tuple(
            sentence
            for name, side in zip(NAMES, traces, strict=True)
            for sentence in replicas(name, list(side.values()))
        ),
        notes=(
            *asked.notes,
            *([asked.if_unequal] if parting and asked.if_unequal else []),
            *_notes(found, absent, tally[ALONE]),
        ),
    )


def _all_have_steps(pairs: Sequence[Pair]) -> bool:
    return all(trace.steps for pair in pairs for trace in pair.traces)


@dataclass(frozen=True)
class PairComparison:
    """What the comparison of two traces found."""

    pair: Pair
    steps: dict[int, StepComparison]
    first: Divergence | None
    sort: str
    """How the first record differs."""
    notes: Sequence[str]
    anything: bool
    """Whether there was anything to compare."""

    @classmethod
    def of(cls, pair: Pair, comparison: Comparison) -> PairComparison:
        """Compare two traces."""
        steps, first, sort = {}, None, INDEPENDENT
        for number in pair.steps:
            found = steps[number] = comparison.step(number)
            if first is None and found.first is not None:
                first, sort = found.first(), found.sort
            found.first = None  # it holds the records of the step
        if first is None:
            first, sort = comparison.otherwise() or ended(pair), ""
        return cls(pair, steps, first, sort, comparison.notes(), comparison.anything)

    @property
    def tally(self) -> Counter[str]:
        """Records that differ, by how they do."""
        return sum((step.tally for step in self.steps.values()), Counter[str]())

    @property
    def by_module(self) -> Counter[str]:
        """Records that differ, by module, in the order in which modules first differ."""
        total: Counter[str] = Counter()
        for step in self.steps.values():
            total.update(step.differing)
        return total

    @property
    def order(self) -> tuple[int, bool, int]:
        """What comes first: of one step, what a rank did itself before what others sent it."""
        first = self.first
        if first is None:
            raise ValueError("the traces do not part")
        sent = first.phase == "collective" and first.kind is Kind.OUTPUTS
        late = first.kind in (Kind.ENDED, Kind.INCOMPARABLE)
        return first.step, sent or late, first.rank


def _first(found: Iterable[PairComparison]) -> PairComparison | None:
    parted = [one for one in found if one.first is not None]
    return min(parted, key=lambda one: one.order, default=None)


def _cells(found: Sequence[PairComparison]) -> Iterable[Cell]:
    steps = sorted({number for one in found for number in one.steps})
    for number in steps:
        both = [one.steps[number] for one in found if number in one.steps]
        whole = both[0]
        for other in both[1:]:
            whole.add(other)
        for module, total in whole.totals.items():
            differing = whole.differing.get(module, 0)
            yield Cell(number, module, total - differing, differing)


def _compared(pairs: Sequence[Pair]) -> Compared:
    rows = [pair.left.steps[step] for pair in pairs for step in pair.steps]
    levels = [str(trace.meta.get("level", "op")) for pair in pairs for trace in pair.traces]
    return Compared(
        ranks=len({pair.left.rank for pair in pairs}),
        steps=len({row.step for row in rows}),
        ops=sum(row.records for row in rows),
        bytes=sum(row.bytes for row in rows),
        level=min(levels, key=LEVELS.index, default=LEVELS[0]),
    )


def _notes(
    found: Sequence[PairComparison], absent: Sequence[Divergence], alone: int
) -> Iterable[str]:
    said: dict[str, None] = {}
    for one in found:
        rank = f"rank {one.pair.left.rank}: " if len(found) > 1 else ""
        said |= dict.fromkeys(f"{rank}{note}" for note in (*notes(one.pair), *one.notes))
    said |= dict.fromkeys(divergence.what for divergence in absent)
    if alone:
        said[f"{counted(alone, 'more op')} {are(alone)} in one of the runs only"] = None
    return said
