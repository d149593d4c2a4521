"""Comparison of a whole run with a run that resumed from one of its checkpoints.

Steps of the resumed run get their numbers in the whole run. Each step is compared by its losses,
gradients and parameters, because ops of the setup and of logging may differ.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from torchrepro.ground.errors import printable
from torchrepro.trace.format import OPTIMIZER_STEP
from torchrepro.verdict import recordings
from torchrepro.verdict.criteria import FIELDS, PHASE_OF, Criteria, Pair
from torchrepro.verdict.diagnosis import (
    COARSE,
    OWN_STATE,
    PAGES,
    RESUMED,
    advice,
    evidence_of,
    rule_of,
)
from torchrepro.verdict.records import Records
from torchrepro.verdict.value import AT_ONE_LEVEL, Advice, Cause, Compared, Kind, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.value import Divergence

# Phase of a digest -> earlier phases that have no digest in `FIELDS`.
_LOADING = {"forward": (), "backward": ("data",), "optimizer": ("data", "collective")}
_ALLOCATES = "aten::empty"


def compare_resumed(
    runs: tuple[str, str], whole: Iterable[Trace], resumed: Iterable[Trace]
) -> Verdict | None:
    """Compare the run `whole` with a run that resumed from a checkpoint of `whole`.

    Returns None if `resumed` is not recognized as such a run. It is recognized if it begins with
    the parameters that `whole` had after a step, and not with the initial parameters of `whole`.
    Also returns None if both runs were recorded under the guarantee `aligned`.
    """
    left, right = _trained(whole), _trained(resumed)
    shifts = {_shift(Pair(*processes, runs)) for processes in zip(left, right, strict=False)}
    shift = shifts.pop() if len(shifts) == 1 and len(left) == len(right) else None
    # Runs under `aligned` are compared within a tolerance, which digests do not support.
    if shift is None or all(trace.meta.get("guarantee") == "aligned" for trace in (*left, *right)):
        return None
    verdict, pair = _compared_from(runs, left, right, shift)
    verdict = replace(
        verdict,
        settings=tuple(setting for setting in recordings.settings(pair) if setting.name != RESUMED),
        about=tuple(map(recordings.facts, pair.traces)),
        notes=(f"B resumes from A: its step 0 is step {shift} of A",),
    )
    likely = advice(verdict, pair.left.meta)
    if verdict.first is None or likely is None:
        return verdict
    evidence = evidence_of(verdict, pair.left.meta)
    rule, op = rule_of(evidence), verdict.first.op
    is_known = verdict.first.kind is Kind.ENDED or evidence.holds("is_other_program")
    if not (is_known or rule.kernel or op.endswith(OPTIMIZER_STEP)):
        cause = _not_restored(pair, verdict.first)
        likely = Advice(cause.sentence, cause_id=cause.page)
    return replace(verdict, advice=replace(likely, closer=""))


def _shift(pair: Pair) -> int | None:
    whole, resumed = pair.traces
    befores = zip(whole.meta.get("before") or (), resumed.meta.get("before") or (), strict=False)
    restored = {digest for began, digest in befores if digest != began}
    if not restored or not pair.in_order:
        return None
    after: dict[str, int] = {}
    for number, row in whole.steps.items():
        if row.finished:
            after.setdefault(row.parameters.hex(), number)
    if not restored <= after.keys():
        return None
    following = whole.steps.get(max(after[digest] for digest in restored) + 1)
    return following.step - min(resumed.steps) if following and following.finished else None


def _not_restored(pair: Pair, first: Divergence) -> Cause:
    left = pair.left.steps
    before = left[first.step - 1].random if first.step - 1 in left else {}
    drew = [
        name
        for name in pair.unequal_generators(first.step)
        if left[first.step].random[name] != before.get(name)
    ]
    if first.phase == "optimizer":
        page = PAGES["optimizer"]
        state = "the state of the optimizer, which took a different step with equal gradients"
    elif drew:
        names, page = ", ".join(drew), PAGES["generator"]
        state = f"random generators ({names}), whose states differ after step {first.step}"
    elif first.phase == "data":
        page, state = PAGES["loader"], "the position in the data"
    else:
        page = PAGES[OWN_STATE]
        state = "the position in the data, a buffer, or another state of the program"
    return Cause(f"The parameters were restored, but most likely not {state}.", page)


def compare_from(whole: str, resumed: str, shift: int, losses: int = 0) -> Verdict:
    """Compare a resumed run with the run `whole`, from step `shift` of `whole` on.

    The checkpoint was saved in that step, after `losses` losses of the step were computed. Steps
    are compared by losses, gradients and parameters, because ops of the setup and of logging may
    differ. The divergence names the first op with a different result, if it is known.
    """
    runs = whole, resumed
    with recordings.opened_runs(runs) as sides:
        left, right = (_trained(run.values()) for run in sides)
        return _compared_from(runs, left, right, shift, losses)[0]


def _compared_from(
    runs: tuple[str, str],
    whole: Iterable[Trace],
    resumed: Iterable[Trace],
    shift: int,
    losses: int = 0,
) -> tuple[Verdict, Pair]:
    pairs = []
    for left, right in zip(whole, resumed, strict=False):
        # Give each step of the resumed run its number in the whole run.
        right.steps = {n + shift: replace(row, step=n + shift) for n, row in right.steps.items()}
        right.losses = [replace(loss, step=loss.step + shift) for loss in right.losses]
        positions = [number for number, loss in enumerate(left.losses) if loss.step == shift]
        before = {*positions[:losses]}
        left.losses = [loss for n, loss in enumerate(left.losses) if n not in before]
        pairs.append(Pair(left, right, runs))
    divergences = [
        (first, pair) for pair in pairs if (first := _first_from(pair, losses)) is not None
    ]
    first, pair = min(
        divergences, key=lambda pair: (pair[0].step, pair[0].rank), default=(None, pairs[0])
    )
    steps = [
        step for step in pairs[0].steps if any(all(pairs[0].digests(step, name)) for name in FIELDS)
    ]
    compared = Compared(
        ranks=len(pairs),
        steps=len(steps),
        ops=0,
        bytes=sum(pairs[0].right.steps[step].bytes for step in steps),
        level=pairs[0].levels[1],
        by=((AT_ONE_LEVEL["step"], len(steps)),),
    )
    uses = recordings.program(pair, [rest for rest in pairs if rest is not pair])
    same = first is None and bool(steps)
    return Verdict(same, *runs, compared, first, losses=recordings.losses(pair), program=uses), pair


def _trained(traces: Iterable[Trace]) -> Sequence[Trace]:
    """Return one trace for each rank: the trace of the process with the most finished steps."""
    by_rank = groupby(traces, key=attrgetter("rank"))
    return [max(processes, key=attrgetter("ended_steps")) for _, processes in by_rank]


def _first_from(pair: Pair, losses_before: int) -> Divergence | None:
    for step in pair.steps:  # including a last step that did not end
        first = pair.unequal_digest(step, FIELDS)
        if first is not None:
            is_whole = step != pair.steps[0] or not losses_before
            return (_first_op(pair, step, first.phase) if is_whole else None) or first
    left, right = (
        max(
            (number for number, row in trace.steps.items() if row.finished),
            default=min(trace.steps, default=0) - 1,
        )
        for trace in pair.traces
    )
    cut = [recordings.CUT if trace.is_truncated else "" for trace in pair.traces]
    if left != right or any(cut):
        sentence = (
            f"the whole run ends after step {left}{cut[0]}, "
            f"the resumed one after step {right}{cut[1]}"
        )
        return pair.at_step(min(left, right) + 1, Kind.ENDED, sentence)
    # A final state differs only if the resumed run has its value under no name. Names number the
    # optimizers and models in order of appearance, which may be another order in a resumed run.
    mine, theirs = (trace.meta.get("end") or {} for trace in pair.traces)
    for group in ("optimizers", "buffers"):
        resumed_values = theirs.get(group) or {}
        for name, digest in (mine.get(group) or {}).items():
            if name in resumed_values and digest not in resumed_values.values():
                sentence = f"different at the end of the runs: {printable(name)}"
                return pair.at_step(pair.steps[-1], Kind.VALUES, sentence)
    return None


def _first_op(pair: Pair, step: int, phase: str) -> Divergence | None:
    """Return a divergence for the first op of a step that differs; None if the op is unknown.

    Phases before `phase` are known to be equal, and are skipped. So are ops that only allocate
    memory, and ops that only one run has, because these set up the run or log.
    """
    if any(row.level in COARSE for row in pair.rows(step)):
        return None
    phases = [PHASE_OF[name] for name in FIELDS]
    agree = (*phases[: phases.index(phase)], *_LOADING[phase])
    records = Records(pair, Criteria(needs_partner=False), [step])
    for reader in records.readers:
        for number, site in reader.trace.sites.items():
            if site.phase in agree or site.op.startswith(_ALLOCATES):
                reader.sites["compared"][number] = False
    first = records.step(step).first
    return None if first is None else records.describe(first)
