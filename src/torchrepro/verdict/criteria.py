"""Criteria of a comparison: the mode for each step, tolerances, and differences outside of records.

A step is compared in the finest mode that both recordings allow. If the records of the step cannot
be compared, the digests of its losses, gradients and parameters are compared instead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from torchrepro.ground.errors import printable
from torchrepro.trace.format import OPTIMIZER_STEP
from torchrepro.verdict.diagnosis import NO_VALUE
from torchrepro.verdict.render import counted
from torchrepro.verdict.value import AT_ONE_LEVEL, Agreed, Divergence, Kind, RunAtDivergence

if TYPE_CHECKING:
    from torchrepro.trace.format import Loss, StepRow
    from torchrepro.trace.reader import Trace

# In place of the step of records of other threads: timing decides into which step they fall.
ANY_STEP = -1

NAMES = ("A", "B")  # names of the runs in sentences: folder names are long and often similar

RERECORD = (
    "record both again with --statistics, or under a profile whose guarantee is aligned, "
    "and compare them with --rtol and --atol"
)

ALIGNED = (1e-3, 1e-5)
"""The default rtol and atol of the guarantee `aligned`.

A thousandth is ten thousand times the rounding of float32. Another order of summation stays within
this tolerance for many steps. Another random number, a skipped op or a lost sample exceeds it.
bfloat16 rounds by 0.004 and needs ``rtol`` 0.016: https://docs.pytorch.org/docs/stable/testing.html.
``atol``, for values near zero, is what the same page has for float32.
"""


Statistics = tuple[int, float | None, float | None, float | None, float | None]
"""Count, mean, norm, low and high of an output."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """The conditions under which two runs count as the same."""

    tolerance: tuple[float, float] | None = None  # rtol and atol for statistics; None for bits
    # Whether a record that only one run has is a difference. False if the runs may have used
    # different devices or precisions, which may execute different ops.
    needs_partner: bool = True
    notes: tuple[str, ...] = ()  # the reason for these criteria, unless the user chose them
    note_if_different: str = ""  # an additional note if the runs differ


def criteria_for(
    pairs: Sequence[Pair], tolerance: tuple[float, float] | None, *, one_program: bool = False
) -> Criteria:
    """Return the criteria for comparing the traces of two runs.

    `tolerance` is rtol and atol. Without it, two runs recorded under the guarantee `aligned` are
    compared within the tolerance `ALIGNED`, and all other runs bit by bit. Runs whose recordings
    have no statistics in common are also compared bit by bit, because equal bits are within any
    tolerance.
    `one_program` is true if both runs executed the same command on the same machine.
    """
    notes: tuple[str, ...] = ()
    metas = [trace.meta for pair in pairs for trace in pair.traces]
    if tolerance is None and metas and all(meta.get("guarantee") == "aligned" for meta in metas):
        tolerance = ALIGNED
        notes = (
            "the tolerance comes from the guarantee `aligned`, under which both were recorded",
        )
    if tolerance is None:
        return Criteria()
    obstacle = next(filter(None, map(_lacks_statistics, pairs)), "")
    if obstacle:
        rtol, atol = tolerance
        within = f"whether they agree within rtol={rtol:g}, atol={atol:g} is unknown"
        return Criteria(note_if_different=f"{within}: {obstacle}")
    return Criteria(tolerance, one_program, notes)


def _lacks_statistics(pair: Pair) -> str:
    left, right = pair.levels
    if left != right:
        return (
            f"the levels {left} and {right} have no statistics in common; record both at one level"
        )
    if left != "op":
        return f"the level {left} has no statistics of tensors; record both at the level op"
    both = zip(NAMES, pair.traces, strict=True)
    lacking = [name for name, trace in both if not trace.meta.get("statistics")]
    if not lacking:
        return ""
    have = "has" if len(lacking) == 1 else "have"
    return f"{' and '.join(lacking)} {have} no statistics of tensors; {RERECORD}"


LOSS, ARGUMENTS = "loss", "arguments"
FIELDS = (LOSS, "gradients", "parameters")
"""The digests of a step, in the order of their computation.

Steps also have a digest of the `ARGUMENTS` of optimizers, which is used only without records.
"""

_WRITTEN_OUTSIDE = "No recorded op wrote it: numpy, `.data` or an assignment did"

PHASE_OF = dict(zip(FIELDS, ("forward", "backward", "optimizer"), strict=True)) | {
    ARGUMENTS: "optimizer"
}


@dataclass(frozen=True)
class Pair:
    """The traces of one process in both runs."""

    left: Trace
    right: Trace
    runs: tuple[str, str]  # the folders, as the user named them

    @cached_property
    def steps(self) -> Sequence[int]:
        """The steps that both traces have."""
        return [step for step in self.left.steps if step in self.right.steps]

    @cached_property
    def in_order(self) -> bool:
        """Whether the main thread ends every step. If not, timing decides the step of a record."""
        return not any(row.thread for trace in self.traces for row in trace.steps.values())

    @cached_property
    def losses(self) -> tuple[Mapping[int, Sequence[Loss]], ...]:
        """Two mappings, one for each run, from a step to the losses of that step.

        Losses of threads other than the main thread are under the key `ANY_STEP`. If such a thread
        ends steps, all losses are under that key.
        """
        losses_of_runs = []
        for trace in self.traces:
            by_step: dict[int, list[Loss]] = defaultdict(list)
            for loss in trace.losses:
                by_step[ANY_STEP if loss.thread or not self.in_order else loss.step].append(loss)
            if ANY_STEP in by_step:
                by_step[ANY_STEP].sort(
                    key=lambda loss: (not loss.is_finite or loss.value, loss.fingerprint)
                )
            losses_of_runs.append(by_step)
        return tuple(losses_of_runs)

    @cached_property
    def misses_steps(self) -> bool:
        """Whether the left run recorded ops in other steps than the right run.

        Then a tensor from an earlier step may be known in one recording, but new in the other.
        """
        left, right = (trace.meta.get("every") or 1 for trace in self.traces)
        return bool(left != right)

    @property
    def traces(self) -> tuple[Trace, Trace]:
        return self.left, self.right

    def rows(self, step: int) -> tuple[StepRow, StepRow]:
        return self.left.steps[step], self.right.steps[step]

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(str(trace.meta.get("level", "op")) for trace in self.traces)

    @cached_property
    def ended_steps(self) -> Sequence[int]:
        return [step for step in self.steps if all(row.finished for row in self.rows(step))]

    def is_after_last(self, number: int) -> bool:
        """Whether step `number` has only records after the last step of both runs.

        It is enough if one run shows this: a run that was cut off does not show its last step.
        """
        rows = (trace.steps.get(number) for trace in self.traces)
        return not any(row is not None and row.finished for row in rows) and any(
            trace.ends_before(number) for trace in self.traces
        )

    def at_step(
        self, number: int, kind: Kind, what: str, phase: str = "", op: str = ""
    ) -> Divergence:
        """Return a divergence in step `number`, for a difference that no record shows."""
        after = self.is_after_last(number)
        position = self.left.rank, number, phase
        return Divergence(*position, op=op, kind=kind, what=what, after_last=after)

    def digests(self, number: int, name: str) -> Sequence[bytes]:
        """Return the digest called `name` of a step, for each run. A missing digest is empty.

        If a thread other than the main thread ends steps, only `ANY_STEP` has a digest, which
        covers all steps, in any order.
        """
        if name == LOSS:
            of_runs = (losses.get(number, ()) for losses in self.losses)
            return [b"".join(loss.fingerprint for loss in losses) for losses in of_runs]
        if self.in_order != (number != ANY_STEP):
            return b"", b""
        steps = [number] if self.in_order else self.steps
        rows = ([trace.steps[step] for step in steps] for trace in self.traces)
        return [b"".join(sorted(getattr(row, name) for row in of_run)) for of_run in rows]

    def unequal_digest(self, number: int, fields: Sequence[str]) -> Divergence | None:
        """Return a divergence for the first digest in `fields` that differs, or None."""
        for name in fields:
            digests = self.digests(number, name)
            if not all(digests) or digests[0] == digests[1]:
                continue
            phase, shown = PHASE_OF[name], number
            if number == ANY_STEP and name != LOSS:
                lefts, rights = (trace.steps for trace in self.traces)
                known = {getattr(rights[at], name) for at in self.steps}
                shown = next(at for at in self.steps if getattr(lefts[at], name) not in known)
            if name == LOSS:
                first = self._unequal_losses(number, lambda a, b: a.fingerprint != b.fingerprint)
            elif name == ARGUMENTS:
                problem, op = "not recorded which", f"optimizer{OPTIMIZER_STEP}"
                first = self.at_step(shown, Kind.ARGUMENT, problem, phase, op)
            else:
                first = self.at_step(shown, Kind.VALUES, "", phase, name)
            left, right = (
                RunAtDivergence(run, "", "", "", (), (digest.hex(),))
                for run, digest in zip(self.runs, digests, strict=True)
            )
            return first and replace(first, left=left, right=right)
        return None

    def unequal_loss(self, step: int, tolerance: tuple[float, float]) -> Divergence | None:
        rtol, atol = tolerance
        return self._unequal_losses(
            step, lambda a, b: not _near(a.value, b.value, atol + rtol * abs(b.value or 0.0))
        )

    def _unequal_losses(self, step: int, differ: Callable[[Loss, Loss], bool]) -> Divergence | None:
        left, right = (losses.get(step, []) for losses in self.losses)
        both = next((both for both in zip(left, right, strict=False) if differ(*both)), None)
        if both is None and len(left) == len(right):
            return None
        shown = both[0] if both else (left or right)[0]
        if both is None or len(left) != len(right):
            difference = f"{len(left):,} and {len(right):,} losses"
        else:
            texts = ["none" if loss.value is None else f"{loss.value:.9g}" for loss in both]
            thread = self.left.threads.get(shown.thread, "") if shown.thread else ""
            subject = f"a loss of thread {thread}" if thread else "its loss"
            difference = f"{subject} differs: {' and '.join(texts)}"
        divergence = self.at_step(shown.step, Kind.VALUES, difference, PHASE_OF[LOSS], LOSS)
        return replace(divergence, source=shown.source)

    def unequal_generators(self, number: int) -> list[str]:
        """Return the names of the generators whose states differ at the end of a step."""
        rows = self.rows(number)
        if rows[0].finished != rows[1].finished:
            return []  # one of the runs ended in this step
        if not self.in_order and number != self.steps[-1]:
            return []  # states before the last step depend on the timing of threads
        left, right = (row.random for row in rows)
        return [name for name in left if name in right and left[name] != right[name]]

    def moved_generators(self) -> set[str]:
        """Return the names of the generators that at least one run seeded or drew from."""
        moved: set[str] = set()
        for trace in self.traces:
            known = dict(trace.meta.get("generators") or {})
            for row in trace.steps.values():
                states = row.random.items()
                moved |= {name for name, state in states if known.get(name, state) != state}
                known |= row.random
        return moved

    def unequal_seeded_generator(self) -> Divergence | None:
        """Return a divergence for the first step that ends with unequal states of a generator.

        Only generators that both profiles seed are compared. An unseeded generator has a different
        state in every run. If the program uses random numbers from it, other values differ too.
        """
        knobs = [trace.meta.get("knobs") or {} for trace in self.traces]
        for number in self.steps:
            names = [
                name
                for name in self.unequal_generators(number)
                if all(run.get(f"seed.{name.partition(':')[0]}") not in NO_VALUE for run in knobs)
            ]
            if names:
                end = "the runs end" if self.is_after_last(number) else "the step ends"
                difference = f"the states of {', '.join(names)} differ when {end}"
                return self.at_step(number, Kind.RANDOM, difference)
        return None

    def unequal_end(self) -> Divergence | None:
        """Return a divergence if a final optimizer state, parameter or buffer differs, else None.

        If all ops returned equal results, something other than an op has written this value.
        """
        ends = [trace.meta.get("end") or {} for trace in self.traces]
        for group in ("optimizers", "parameters", "buffers"):
            left, right = (end.get(group) or {} for end in ends)
            names = [name for name in left if name in right and left[name] != right[name]]
            if names:
                rest = f", and {len(names) - 1:,} more" if names[1:] else ""
                text = f"different at the end of the recordings: {printable(names[0])}{rest}"
                if {*self.levels} == {"op"}:
                    text += f". {_WRITTEN_OUTSIDE}"
                return self.at_step(self.steps[-1], Kind.INPUT, text)
        return None


class Mode(Enum):
    """A way to compare a step. The modes are in order, the finest first."""

    OPS = AT_ONE_LEVEL["op"], ()
    MODULES = AT_ONE_LEVEL["module"], ()
    STATE = AT_ONE_LEVEL["step"], ()
    # The records cannot be compared, for example because one run has dropped them.
    DIGESTS = AT_ONE_LEVEL["step"], (LOSS, "gradients", ARGUMENTS, "parameters")
    # Without gradients: levels treat gradients in uninitialized memory differently.
    DIGESTS_OF_UNEQUAL_LEVELS = "by parameters and losses", (LOSS, ARGUMENTS, "parameters")
    LOSSES = "by losses", (LOSS,)  # within a tolerance, without statistics of tensors

    def __init__(self, words: str, fields: tuple[str, ...]) -> None:
        self.words = words  # for sentences, after a number of steps
        self.fields = fields  # the digests to compare; empty if records are compared

    @property
    def is_in_full(self) -> bool:
        """Whether all results in a step are compared, not only the state at the end of the step."""
        return self in (Mode.OPS, Mode.MODULES)


AT_LEVEL = {"op": Mode.OPS, "module": Mode.MODULES, "step": Mode.STATE}
"""The mode for steps that both runs recorded at the same level."""

DECIDING: Mapping[str, Sequence[str]] = {
    "op": ("detail",),
    "module": (),
    "step": ("level", "every"),
}
"""Level of a step -> settings of a recording that affect its records.

`detail` changes which inputs are read. At the level `step`, a recording that records some steps in
full learns more names of parameters.
"""


def mode_of(pair: Pair, step: int, *, within_tolerance: bool) -> Mode:
    left, right = pair.rows(step)
    left_meta, right_meta = (trace.meta for trace in pair.traces)
    if left.level != right.level:
        mode = Mode.DIGESTS_OF_UNEQUAL_LEVELS
    elif (
        left.dropped
        or right.dropped
        or any(
            (left_meta.get(key) or None) != (right_meta.get(key) or None)
            for key in DECIDING[left.level]
        )
    ):
        mode = Mode.DIGESTS
    else:
        mode = AT_LEVEL[left.level]
    return Mode.LOSSES if within_tolerance and not mode.is_in_full else mode


def agreed_before(modes: Mapping[int, Mode], step: int) -> Agreed | None:
    """Return how far two runs agree before `step`; None if no earlier step was compared."""
    before = {number: mode for number, mode in modes.items() if number < step}
    if not before:
        return None
    last = max(before)
    in_full = [number for number, mode in before.items() if mode.is_in_full]
    then_in_full = step in modes and modes[step].is_in_full
    return Agreed(last, before[last].words, max(in_full, default=None), then_in_full)


def excess(
    left: Sequence[Statistics], right: Sequence[Statistics], rtol: float, atol: float
) -> str:
    """Return a clause on the first output out of tolerance; empty if all are within tolerance."""
    if len(left) != len(right):
        return f"statistics of {counted(len(left), 'output')} and of {len(right)}"
    if not left:
        return "the outputs differ, and their statistics were not recorded"
    for position, (left_row, right_row) in enumerate(zip(left, right, strict=True)):
        difference = out_of_tolerance(left_row, right_row, rtol, atol)
        if difference:
            return f"output {position}: {difference}"
    return ""


def out_of_tolerance(left: Statistics, right: Statistics, rtol: float, atol: float) -> str:
    """Return a clause on the first statistic out of tolerance; empty if all are within tolerance.

    If all elements are within ``atol + rtol * |right|``, both the means and the root mean squares
    (rms) are at most ``atol + rtol * rms`` apart, by Minkowski's inequality. Extremes are at most
    ``atol + rtol * max|right|`` apart. The bound of the mean is relative to the rms, because values
    around zero cancel each other in the mean.
    """
    if left[0] != right[0]:
        return f"{left[0]} and {right[0]} numbers that are not NaN"
    rms = [
        None if norm is None or not count else norm / math.sqrt(count)
        for count, _, norm, *_ in (left, right)
    ]
    sizes = [abs(value) for value in right[3:] if value is not None and math.isfinite(value)]
    largest = max(sizes, default=0.0)
    rows: tuple[tuple[str, float | None, float | None, float | None], ...] = (
        ("mean", left[1], right[1], rms[1]),
        ("root mean square", rms[0], rms[1], rms[1]),
        ("lowest", left[3], right[3], largest),
        ("highest", left[4], right[4], largest),
    )
    for name, left_value, right_value, scale in rows:
        if not _near(left_value, right_value, atol + rtol * (scale or 0.0)):
            shown = [
                "none" if value is None else f"{value:.6g}" for value in (left_value, right_value)
            ]
            return f"{name} {' and '.join(shown)}"
    return ""


def _near(left: float | None, right: float | None, most: float) -> bool:
    # Statistics store NaN as None.
    if left is None or right is None or left == right or left != left:  # noqa: PLR0124 - NaN
        return left is right or left == right or (left != left and right != right)  # noqa: PLR0124
    return math.isfinite(left) and math.isfinite(right) and abs(left - right) <= most
