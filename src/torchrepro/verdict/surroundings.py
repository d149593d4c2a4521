"""What is said of two runs besides their ops: settings, losses, replicas, how they ended."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchrepro.verdict.digests import Streams
from torchrepro.verdict.value import Setting
from torchrepro.verdict.words import are, counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torchrepro.trace.reading import Trace
    from torchrepro.verdict.pair import Pair

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
        if trace.is_cut:
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
