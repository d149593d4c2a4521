"""Compares a whole run with one that began at a later step of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from torchrepro.messages import printable
from torchrepro.trace.format import OPTIMIZER_STEP, OTHERS
from torchrepro.trace.reader import read_run
from torchrepro.verdict.columns import Pair
from torchrepro.verdict.criteria import (
    FIELDS,
    Criteria,
    at_step,
    digest,
    unequal_digest,
    unequal_generators,
)
from torchrepro.verdict.diagnosis import advice, evidence_of, rule_of
from torchrepro.verdict.evidence import COARSE, RESUMED
from torchrepro.verdict.recordings import CUT, facts, losses, program, settings
from torchrepro.verdict.records import Records
from torchrepro.verdict.value import AT_ONE_LEVEL, Advice, Compared, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.value import Divergence

_ALLOCATES = "aten::empty"
_LOADING = {"forward": (), "backward": ("data",), "optimizer": ("data", "collective")}
"""Phases besides those of `FIELDS` that come before the one of a digest."""


def compare_resumed(
    runs: tuple[str, str], whole: Iterable[Trace], resumed: Iterable[Trace]
) -> Verdict | None:
    """Compare a run with one that went on from a checkpoint of it; None where that is not known.

    The parameters before the first step of `resumed` are those after a step of `whole`, with which
    that did not begin itself.
    """
    left, right = _trained(whole), _trained(resumed)
    shifts = {_shift(Pair(*each, runs)) for each in zip(left, right, strict=False)}
    shift = shifts.pop() if len(shifts) == 1 and len(left) == len(right) else None
    # Those that are aligned have a tolerance, and digests have none.
    if shift is None or all(its.meta.get("guarantee") == "aligned" for its in (*left, *right)):
        return None
    found, pair = _compared(runs, left, right, shift)
    found = replace(
        found,
        settings=tuple(each for each in settings(pair) if each.name != RESUMED),
        about=tuple(map(facts, pair.traces)),
        notes=(f"B goes on from A: its step 0 is step {shift} of A",),
    )
    likely = advice(found, pair.left.meta)
    if found.first is None or likely is None:
        return found
    evidence = evidence_of(found, pair.left.meta)
    rule, op = rule_of(evidence), found.first.op
    is_known = found.first.kind is Kind.ENDED or evidence.holds("is_other_program")
    if not (is_known or rule.kernel or op.endswith(OPTIMIZER_STEP)):
        likely = Advice(cause=_not_restored(pair, found.first))
    return replace(found, advice=replace(likely, closer=""))


def _shift(pair: Pair) -> int | None:
    whole, resumed = pair.traces
    befores = zip(whole.meta.get("before") or (), resumed.meta.get("before") or (), strict=False)
    restored = {its for began, its in befores if its != began}
    if not restored or not pair.in_order:
        return None
    after: dict[str, int] = {}
    for number, row in whole.steps.items():
        if row.finished:
            after.setdefault(row.parameters.hex(), number)
    if not restored <= after.keys():
        return None
    following = whole.steps.get(max(after[its] for its in restored) + 1)
    return following.step - min(resumed.steps) if following and following.finished else None


def _not_restored(pair: Pair, first: Divergence) -> str:
    left = pair.left.steps
    before = left[first.step - 1].random if first.step - 1 in left else {}
    drew = [
        name
        for name in unequal_generators(pair, first.step)
        if left[first.step].random[name] != before.get(name)
    ]
    if first.phase == "optimizer":
        what = "the state of the optimizer, which made another step of equal gradients"
    elif drew:
        names = ", ".join(drew)
        what = f"random generators ({names}), whose states differ after step {first.step}"
    elif first.phase == "data":
        what = "the place in the data"
    else:
        what = "the place in the data, a buffer, or what else the program keeps"
    return f"The parameters were restored, and likely not: {what}."


def compare_from(whole: str, resumed: str, shift: int) -> Verdict:
    """Compare the steps of `resumed` with those of `whole`, whose step `shift` is its first.

    They are compared by losses, gradients and parameters: what a program does to begin, and what it
    logs, may differ. The first op is named that computed something else, where it is known.
    """
    with ExitStack() as stack:
        sides = [read_run(run) for run in (whole, resumed)]
        for trace in chain(*sides):
            stack.callback(trace.close)
        left, right = map(_trained, sides)
        return _compared((whole, resumed), left, right, shift)[0]


def _compared(
    runs: tuple[str, str], whole: Iterable[Trace], resumed: Iterable[Trace], shift: int
) -> tuple[Verdict, Pair]:
    pairs = [
        Pair(left, _shifted(right, shift), runs)
        for left, right in zip(whole, resumed, strict=False)
    ]
    found = [(pair, _first(pair)) for pair in pairs]
    differing = [(pair, first) for pair, first in found if first is not None]
    pair, first = min(
        differing, key=lambda each: (each[1].step, each[1].rank), default=(pairs[0], None)
    )
    steps = [step for step in pairs[0].ended_steps if _is_compared(pairs[0], step)]
    verdict = Verdict(
        first is None and bool(steps),
        *runs,
        Compared(
            ranks=len(pairs),
            steps=len(steps),
            ops=0,
            bytes=sum(pairs[0].right.steps[step].bytes for step in steps),
            level=pairs[0].levels[1],
            by=((AT_ONE_LEVEL["step"], len(steps)),),
        ),
        first,
        losses=losses(pair),
        program=program(pair, [each for each in pairs if each is not pair]),
    )
    return verdict, pair


def _trained(traces: Iterable[Trace]) -> Sequence[Trace]:
    """Return the trace of the process of each rank that made most steps."""
    found: dict[int, Trace] = {}
    for trace in traces:
        best = found.get(trace.rank)
        if best is None or trace.ended_steps > best.ended_steps:
            found[trace.rank] = trace
    return [found[rank] for rank in sorted(found)]


def _shifted(trace: Trace, shift: int) -> Trace:
    """Have the steps of a trace numbered as those of the run that it goes on."""
    trace.steps = {
        number + shift: replace(row, step=number + shift) for number, row in trace.steps.items()
    }
    trace.losses = [replace(loss, step=loss.step + shift) for loss in trace.losses]
    return trace


def _is_compared(pair: Pair, step: int) -> bool:
    return any(all(digest(pair, side, step, name) for side in (0, 1)) for _, name in FIELDS)


def _first(pair: Pair) -> Divergence | None:
    for step in pair.ended_steps:
        first = unequal_digest(pair, step, FIELDS)
        if first is not None:
            return _first_op(pair, step, first.phase) or first
    ends = [
        max((number for number, row in trace.steps.items() if row.finished), default=-1)
        for trace in pair.traces
    ]
    cut = [CUT if trace.is_truncated else "" for trace in pair.traces]
    if ends[0] != ends[1] or any(cut):
        what = (
            f"the whole run ends after step {ends[0]}{cut[0]}, "
            f"the resumed one after step {ends[1]}{cut[1]}"
        )
        return at_step(pair, min(ends) + 1, Kind.ENDED, what)
    return _unequal_end(pair)


def _unequal_end(pair: Pair) -> Divergence | None:
    """Return what both hold as they end whose value is not there in the resumed run.

    Names count optimizers and models as they come, which is from another step on there.
    """
    left, right = (trace.meta.get("end") or {} for trace in pair.traces)
    for kind in ("optimizers", "buffers"):
        its = right.get(kind) or {}
        names = [
            name
            for name, digest in (left.get(kind) or {}).items()
            if name in its and name != OTHERS and digest not in its.values()
        ]
        if names:
            what = f"not the same when the runs end: {printable(names[0])}"
            return at_step(pair, pair.steps[-1], Kind.VALUES, what)
    return None


def _first_op(pair: Pair, step: int, phase: str) -> Divergence | None:
    """Return the first op of a step that differs, if it is known: what came before `phase` agrees.

    What one run alone has is how it begins, or what it logs, and what allocates holds no value.
    """
    if any(trace.steps[step].level in COARSE for trace in pair.traces):
        return None
    phases = [name for name, _ in FIELDS]
    records = Records(pair, Criteria(needs_partner=False), [step])
    for reader in records.readers:
        for number, site in reader.trace.sites.items():
            before = site.phase in phases[: phases.index(phase)] or site.phase in _LOADING[phase]
            if before or site.op.startswith(_ALLOCATES):
                reader.sites["compared"][number] = False
    found = records.step(step).first
    return None if found is None else records.describe(found)
