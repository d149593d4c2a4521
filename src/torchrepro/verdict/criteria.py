"""How each step of two runs is compared, when they count as the same, and what is not a record.

A step is compared in the finest mode that both recordings allow. Where records cannot be compared,
the digests that a step has of its losses, gradients and parameters are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from torchrepro.ground.messages import printable
from torchrepro.trace.format import OPTIMIZER_STEP
from torchrepro.verdict.diagnosis import NO_VALUE
from torchrepro.verdict.render import counted
from torchrepro.verdict.value import AT_ONE_LEVEL, Agreed, Divergence, Kind, RunAtDivergence

if TYPE_CHECKING:
    from torchrepro.trace.format import Loss
    from torchrepro.trace.reader import Trace

ANY_STEP = -1  # stands for the step of what other threads do: in which one it falls is an accident

NAMES = ("A", "B")  # of the runs, in sentences: their folders have long names, often alike

RERECORD = (
    "record both again with --statistics, or under a profile whose guarantee is aligned, "
    "and compare them with --rtol and --atol"
)

ALIGNED = (1e-3, 1e-5)
"""The rtol and atol of the guarantee `aligned`, unless others are given.

A thousandth is ten thousand times the rounding of float32. Another order of summation stays within
it through many steps; another random number, a skipped op or a lost sample does not. bfloat16
rounds by 0.004 and needs ``rtol`` 0.016: https://docs.pytorch.org/docs/stable/testing.html.
``atol``, for values near zero, is what the same page has for float32.
"""


Statistics = tuple[int, float | None, float | None, float | None, float | None]
"""Count, mean, norm, low and high of an output."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """What it takes for two runs to count as the same."""

    tolerance: tuple[float, float] | None = None  # where statistics are compared and not bits
    # Whether a record that only one run has is a difference. Across devices and precisions it is
    # none: each may have ops of its own.
    needs_partner: bool = True
    notes: tuple[str, ...] = ()  # why these criteria were chosen, where nobody named them
    note_if_different: str = ""  # what else is to be said if the runs differ


def criteria_for(
    pairs: Sequence[Pair], given: tuple[float, float] | None, *, one_program: bool = False
) -> Criteria:
    """Return the criteria for the traces of two runs; `given` are rtol and atol.

    Without them the criterion is the same bits, unless both runs were recorded under the guarantee
    `aligned`, which has a tolerance of its own. Equal bits are within any tolerance, so bits are
    compared where the recordings have no statistics in common. `one_program` says that both runs
    are of one command on one machine.
    """
    notes: tuple[str, ...] = ()
    metas = [trace.meta for pair in pairs for trace in pair.traces]
    if given is None and metas and all(meta.get("guarantee") == "aligned" for meta in metas):
        given = ALIGNED
        notes = (
            "the tolerance is that of the guarantee `aligned`, under which both were recorded",
        )
    if given is None:
        return Criteria()
    obstacle = next(filter(None, map(_lacks_statistics, pairs)), "")
    if obstacle:
        within = f"whether they agree within rtol={given[0]:g}, atol={given[1]:g} cannot be told"
        return Criteria(note_if_different=f"{within}: {obstacle}")
    return Criteria(given, one_program, notes)


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
"""The digests of a step, in the order in which a step makes them.

There are those of the `ARGUMENTS` of optimizers as well; where records are compared, they say more.
"""

_WRITTEN_OUTSIDE = "No op that was recorded wrote it: numpy, `.data` or an assignment did"

PHASE_OF = dict(zip(FIELDS, ("forward", "backward", "optimizer"), strict=True)) | {
    ARGUMENTS: "optimizer"
}


@dataclass(frozen=True)
class Pair:
    """The traces of one process in both runs."""

    left: Trace
    right: Trace
    runs: tuple[str, str]  # the folders, as they were named

    @cached_property
    def steps(self) -> Sequence[int]:
        """The steps that both have."""
        return [step for step in self.left.steps if step in self.right.steps]

    @cached_property
    def in_order(self) -> bool:
        """Whether the main thread ends all steps: what belongs to which of them is no accident."""
        return not any(row.thread for trace in self.traces for row in trace.steps.values())

    @cached_property
    def losses(self) -> tuple[Mapping[int, Sequence[Loss]], ...]:
        """The losses of each step in both; those of no step in particular are under `ANY_STEP`.

        These are the losses of other threads than the main one, and all where these end steps.
        """
        found = []
        for trace in self.traces:
            sides: dict[int, list[Loss]] = defaultdict(list)
            for loss in trace.losses:
                sides[ANY_STEP if loss.thread or not self.in_order else loss.step].append(loss)
            if ANY_STEP in sides:
                sides[ANY_STEP].sort(
                    key=lambda loss: (not loss.is_finite or loss.value, loss.fingerprint)
                )
            found.append(sides)
        return tuple(found)

    @cached_property
    def misses_steps(self) -> bool:
        """Whether one recording has the ops of steps of which the other has none.

        What a full step knows of tensors that were made before it is then not the same.
        """
        left, right = (trace.meta.get("every") or 1 for trace in self.traces)
        return bool(left != right)

    @property
    def traces(self) -> tuple[Trace, Trace]:
        return self.left, self.right

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(str(trace.meta.get("level", "op")) for trace in self.traces)

    @cached_property
    def ended_steps(self) -> Sequence[int]:
        return [
            step for step in self.steps if all(trace.steps[step].finished for trace in self.traces)
        ]

    def is_after_last(self, number: int) -> bool:
        """Whether what has this number comes after the last step of both runs.

        A run that was cut off does not show which step was its last: the other one has to.
        """
        rows = (trace.steps.get(number) for trace in self.traces)
        return not any(row is not None and row.finished for row in rows) and any(
            trace.ends_before(number) for trace in self.traces
        )

    def at_step(
        self, number: int, kind: Kind, what: str, phase: str = "", op: str = ""
    ) -> Divergence:
        """Return a divergence of a step without a record that shows it."""
        after = self.is_after_last(number)
        place = self.left.rank, number, phase
        return Divergence(*place, op=op, kind=kind, what=what, after_last=after)

    def digests(self, number: int, name: str) -> Sequence[bytes]:
        """Return a digest of a step in both runs; nothing for one that has none.

        Of `ANY_STEP` it is one of all steps, in whatever order, where other threads end them.
        """
        if name == LOSS:
            each = (losses.get(number, ()) for losses in self.losses)
            return [b"".join(loss.fingerprint for loss in losses) for losses in each]
        if self.in_order != (number != ANY_STEP):
            return b"", b""
        steps = [number] if self.in_order else self.steps
        rows = ([trace.steps[step] for step in steps] for trace in self.traces)
        return [b"".join(sorted(getattr(row, name) for row in its)) for its in rows]

    def unequal_digest(self, number: int, fields: Sequence[str]) -> Divergence | None:
        """Return the first digest of a step, or of `ANY_STEP`, that differs, if one does."""
        for name in fields:
            digests = self.digests(number, name)
            if not all(digests) or digests[0] == digests[1]:
                continue
            phase, shown = PHASE_OF[name], number
            if number == ANY_STEP and name != LOSS:
                one, other = (trace.steps for trace in self.traces)
                its = {getattr(other[at], name) for at in self.steps}
                shown = next(at for at in self.steps if getattr(one[at], name) not in its)
            if name == LOSS:
                found = self._unequal_losses(number, lambda a, b: a.fingerprint != b.fingerprint)
            elif name == ARGUMENTS:
                what, op = "not recorded which", f"optimizer{OPTIMIZER_STEP}"
                found = self.at_step(shown, Kind.ARGUMENT, what, phase, op)
            else:
                found = self.at_step(shown, Kind.VALUES, "", phase, name)
            left, right = (
                RunAtDivergence(run, "", "", "", (), (each.hex(),))
                for run, each in zip(self.runs, digests, strict=True)
            )
            return found and replace(found, left=left, right=right)
        return None

    def unequal_loss(self, step: int, tolerance: tuple[float, float]) -> Divergence | None:
        rtol, atol = tolerance
        return self._unequal_losses(
            step, lambda a, b: not _near(a.value, b.value, atol + rtol * abs(b.value or 0.0))
        )

    def _unequal_losses(self, step: int, differ: Callable[[Loss, Loss], bool]) -> Divergence | None:
        left, right = (side.get(step, []) for side in self.losses)
        both = next((both for both in zip(left, right, strict=False) if differ(*both)), None)
        if both is None and len(left) == len(right):
            return None
        shown = both[0] if both else (left or right)[0]
        if both is None or len(left) != len(right):
            what = f"{len(left):,} and {len(right):,} losses"
        else:
            texts = ["none" if loss.value is None else f"{loss.value:.9g}" for loss in both]
            thread = self.left.threads.get(shown.thread, "") if shown.thread else ""
            its = f"a loss of thread {thread}" if thread else "its loss"
            what = f"{its} differs: {' and '.join(texts)}"
        found = self.at_step(shown.step, Kind.VALUES, what, PHASE_OF[LOSS], LOSS)
        return replace(found, source=shown.source)

    def unequal_generators(self, number: int) -> list[str]:
        """Return the random generators whose states differ at the end of a step."""
        rows = [trace.steps[number] for trace in self.traces]
        if rows[0].finished != rows[1].finished:
            return []  # one of the runs ended there
        if not self.in_order and number != self.steps[-1]:
            return []  # whichever thread came first
        left, right = (row.random for row in rows)
        return [name for name in left if name in right and left[name] != right[name]]

    def moved_generators(self) -> set[str]:
        """Return the random generators from which one of the runs drew, or which it seeded."""
        moved: set[str] = set()
        for trace in self.traces:
            known = dict(trace.meta.get("generators") or {})
            for row in trace.steps.values():
                states = row.random.items()
                moved |= {name for name, state in states if known.get(name, state) != state}
                known |= row.random
        return moved

    def unequal_seeded_generator(self) -> Divergence | None:
        """Return where a generator that the profiles of both runs seed has another state.

        A generator that nobody seeded has another state in every run. What is drawn from it and
        used shows in what is computed.
        """
        knobs = [trace.meta.get("knobs") or {} for trace in self.traces]
        for number in self.steps:
            names = [
                name
                for name in self.unequal_generators(number)
                if all(its.get(f"seed.{name.partition(':')[0]}") not in NO_VALUE for its in knobs)
            ]
            if names:
                end = "the runs end" if self.is_after_last(number) else "the step ends"
                what = f"the states of {', '.join(names)} differ when {end}"
                return self.at_step(number, Kind.RANDOM, what)
        return None

    def unequal_end(self) -> Divergence | None:
        """Return what a program still held as both recordings ended, and is not the same in both.

        All that ops computed was the same: something else wrote it, after the last op that read it.
        """
        sides = [trace.meta.get("end") or {} for trace in self.traces]
        for kind in ("optimizers", "parameters", "buffers"):
            left, right = (side.get(kind) or {} for side in sides)
            names = [name for name in left if name in right and left[name] != right[name]]
            if names:
                more = f", and {len(names) - 1:,} more" if names[1:] else ""
                what = f"not the same when the recordings end: {printable(names[0])}{more}"
                if {*self.levels} == {"op"}:
                    what += f". {_WRITTEN_OUTSIDE}"
                return self.at_step(self.steps[-1], Kind.INPUT, what)
        return None


class Mode(Enum):
    """How a step is compared, from the finest to the coarsest."""

    OPS = AT_ONE_LEVEL["op"], ()
    MODULES = AT_ONE_LEVEL["module"], ()
    STATE = AT_ONE_LEVEL["step"], ()
    # One of the runs no longer has the records of the step.
    DIGESTS = AT_ONE_LEVEL["step"], (LOSS, "gradients", ARGUMENTS, "parameters")
    # Of a gradient in memory that was unset ops are recorded, and not what it holds: levels do not
    # take it in alike.
    DIGESTS_OF_UNEQUAL_LEVELS = "by parameters and losses", (LOSS, ARGUMENTS, "parameters")
    LOSSES = "by losses", (LOSS,)  # within a tolerance, where there are no statistics

    def __init__(self, words: str, fields: tuple[str, ...]) -> None:
        self.words = words  # as it stands after a number of steps
        self.fields = fields  # the digests that are compared; none where records are

    @property
    def is_in_full(self) -> bool:
        """Whether all that a step computed is compared, and not its state at the end alone."""
        return self in (Mode.OPS, Mode.MODULES)


AT_LEVEL = {"op": Mode.OPS, "module": Mode.MODULES, "step": Mode.STATE}
"""How steps are compared that both runs recorded at one level."""

DECIDING: Mapping[str, Sequence[str]] = {
    "op": ("detail",),
    "module": (),
    "step": ("level", "every"),
}
"""Level of a step -> settings of a recording on which its records depend.

With detail other inputs are read. At level `step` parameters have the names that the recording has
learnt, and one that records some steps in full learns more of them.
"""


def mode_of(pair: Pair, step: int, *, within_tolerance: bool) -> Mode:
    left, right = (trace.steps[step] for trace in pair.traces)
    one, other = (trace.meta for trace in pair.traces)
    if left.level != right.level:
        found = Mode.DIGESTS_OF_UNEQUAL_LEVELS
    elif (
        left.dropped
        or right.dropped
        or any((one.get(key) or None) != (other.get(key) or None) for key in DECIDING[left.level])
    ):
        found = Mode.DIGESTS
    else:
        found = AT_LEVEL[left.level]
    return Mode.LOSSES if within_tolerance and not found.is_in_full else found


def agreed_before(modes: Mapping[int, Mode], step: int) -> Agreed | None:
    """Return the last steps before this one, at which the runs are known to agree."""
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
    """Return in words what is out of tolerance; nothing if all outputs are within it."""
    if len(left) != len(right):
        return f"statistics of {counted(len(left), 'output')} and of {len(right)}"
    if not left:
        return "they differ, and no statistics of them were recorded"
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        what = out_of_tolerance(one, other, rtol, atol)
        if what:
            return f"output {place}: {what}"
    return ""


def out_of_tolerance(left: Statistics, right: Statistics, rtol: float, atol: float) -> str:
    """Return which statistic shows that elements are out of tolerance, if one does.

    With elements within ``atol + rtol * |right|``, means are at most ``atol + rtol * rms`` apart,
    rms likewise (Minkowski), and extremes at most ``atol + rtol * max|right|``. The bound of the
    mean is relative to the rms because values around zero cancel in the mean.
    """
    if left[0] != right[0]:
        return f"{left[0]} and {right[0]} numbers besides NaN"
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
    for name, one, other, scale in rows:
        if not _near(one, other, atol + rtol * (scale or 0.0)):
            shown = ["none" if value is None else f"{value:.6g}" for value in (one, other)]
            return f"{name} {' and '.join(shown)}"
    return ""


def _near(left: float | None, right: float | None, most: float) -> bool:
    # Of statistics NaN is None.
    if left is None or right is None or left == right or left != left:  # noqa: PLR0124 - NaN
        return left is right or left == right or (left != left and right != right)  # noqa: PLR0124
    return math.isfinite(left) and math.isfinite(right) and abs(left - right) <= most
