"""Compares what two recordings hold besides records: settings, digests of steps, and their ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrepro.messages import printable, size
from torchrepro.seeding.uncontrolled import row_of_read
from torchrepro.verdict.columns import MAIN, NAMES
from torchrepro.verdict.evidence import (
    FEATURES,
    LOADER,
    NO_VALUE,
    NOT_ALIKE,
    RESUMED,
    WORKERS,
    accelerator,
    short,
)
from torchrepro.verdict.render import are, counted
from torchrepro.verdict.value import (
    BOTH_CUT,
    Divergence,
    Kind,
    Loader,
    Program,
    RunFacts,
    Setting,
    Side,
    UncontrolledRead,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrepro.trace.format import Loss, StepRow
    from torchrepro.trace.reader import Trace
    from torchrepro.verdict.columns import Pair


LOSS = "loss"
FIELDS = (
    ("forward", LOSS),
    ("backward", "gradients"),
    ("optimizer", "parameters"),
)
"""Phase and name of each digest of a step, in the order in which a step makes them."""

AT_EVERY_LEVEL = (("forward", LOSS), ("optimizer", "parameters"))
"""Digests that all levels take in the same way.

Of a gradient in memory that was unset ops are recorded, and not what it holds.
"""


def unequal_digest(
    pair: Pair, number: int, fields: Sequence[tuple[str, str]]
) -> Callable[[], Divergence] | None:
    """Return what describes the first digest of a step that differs, if one does."""
    for phase, name in fields:
        left, right = (digest(pair, side, number, name) for side in (0, 1))
        if left and right and left != right:
            return partial(_describe_digest, pair, number, (phase, name), (left, right))
    return None


def digest(pair: Pair, side: int, number: int, name: str) -> bytes:
    """Return a digest of a step in one of two runs; nothing if it has none."""
    if name == LOSS:
        return b"".join(loss.fingerprint for loss in pair.losses[side].get(number, ()))
    row = pair.traces[side].steps[number]
    return row.gradients if name == "gradients" else row.parameters


def _describe_digest(
    pair: Pair, number: int, field: tuple[str, str], digests: tuple[bytes, bytes]
) -> Divergence:
    sides = [
        Side(run, "", "", "", (), (digest.hex(),))
        for run, digest in zip(pair.runs, digests, strict=True)
    ]
    what = ""
    if field[1] == LOSS:
        what = unequal_losses(pair, number, lambda one, other: one.fingerprint != other.fingerprint)
    found = at_step(pair, number, Kind.VALUES, what, *field, tuple(sides))
    if not what:
        return found
    losses = (loss for side in pair.losses for loss in side.get(number, ()))
    return replace(found, source=next(losses).source)  # where the backward pass began


def before_what_followed(pair: Pair, found: Divergence) -> Divergence:
    """Return the loss of a step if it differs, in place of what was computed after it.

    This is for a divergence that is known by the values alone which a step left behind.
    """
    if found.kind is not Kind.VALUES or found.phase == "forward":
        return found
    loss = unequal_digest(pair, found.step, FIELDS[:1])
    return found if loss is None else loss()


def unequal_losses(pair: Pair, step: int, differ: Callable[[Loss, Loss], bool]) -> str:
    """Return in words how the losses of a step differ; nothing if they do not."""
    left, right = (side.get(step, []) for side in pair.losses)
    if len(left) != len(right):
        return f"{counted(len(left), 'loss')} and {len(right)}"
    values = (
        (one.value, other.value)
        for one, other in zip(left, right, strict=True)
        if differ(one, other)
    )
    texts = ["none" if value is None else f"{value:.9g}" for value in next(values, ())]
    return f"its loss differs: {' and '.join(texts)}" if texts else ""


def _unequal_generators(pair: Pair, number: int) -> list[str]:
    """Return the random generators whose states differ at the end of a step."""
    rows = [trace.steps[number] for trace in pair.traces]
    if rows[0].finished != rows[1].finished:
        return []  # one of the runs ended there
    left, right = (row.random for row in rows)
    return [name for name in left if name in right and left[name] != right[name]]


def unequal_seeded_generator(pair: Pair) -> Divergence | None:
    """Return where a generator that the profiles of both runs seed has another state.

    A generator that nobody seeded has another state in every run. What is drawn from it and used
    shows in what is computed.
    """
    for number in pair.steps:
        names = [
            name
            for name in _unequal_generators(pair, number)
            if all(
                (trace.meta.get("knobs") or {}).get(f"seed.{name.partition(':')[0]}")
                not in NO_VALUE
                for trace in pair.traces
            )
        ]
        if names:
            end = "the runs end" if pair.is_after_last(number) else "the step ends"
            what = f"the states of {', '.join(names)} differ when {end}"
            return at_step(pair, number, Kind.RANDOM, what)
    return None


def at_step(
    pair: Pair,
    number: int,
    kind: Kind,
    what: str,
    phase: str = "",
    op: str = "",
    sides: tuple[Side | None, ...] = (None, None),
) -> Divergence:
    """Return a divergence of a step as a whole."""
    left, right = sides
    after_last = pair.is_after_last(number)
    whole = Divergence.without_op(pair.left.rank, number, kind, what, after_last=after_last)
    return replace(whole, phase=phase, op=op, left=left, right=right)


CUT = " (killed, ended by os._exit, or still running)"


def truncation(pair: Pair) -> Divergence | None:
    """Return where one of two runs ended that are the same up to there.

    A run that was killed is never the same as another: nobody knows what it would have done.
    """
    last = [_last_step(trace, other) for trace, other in (pair.traces, pair.traces[::-1])]
    if not pair.steps:
        empty = [name for name, step in zip(NAMES, last, strict=True) if step < 0]
        what = "no step was recorded in both runs"
        if empty:
            what = f"nothing was recorded in {' and '.join(empty)}"
        return at_step(pair, max(min(last), 0), Kind.ENDED, what)
    cut = [side for side, trace in enumerate(pair.traces) if trace.is_truncated]
    ended, other = last.index(min(last)), last.index(max(last))
    asked = pair.traces[ended].meta.get("steps")
    is_shorter = last[0] != last[1] and not (asked and last[ended] >= asked[1])
    if not is_shorter:
        if not cut:
            return None  # more of it was not to be recorded
        ended = cut[0]
    step = last[ended] if is_shorter else min(last[side] for side in cut)
    if len(cut) == len(NAMES):
        ends = [f"{name} after step {each}" for name, each in zip(NAMES, last, strict=True)]
        return at_step(pair, step + 1, Kind.ENDED, f"{BOTH_CUT}{CUT}: {' and '.join(ends)}")
    row = pair.traces[ended].steps.get(step)
    what = f"{NAMES[ended]} ended before its first step"
    if row is not None:
        what = f"{NAMES[ended]} ended {'after' if row.finished else 'in the middle of'} step {step}"
    what += CUT if ended in cut else ""
    if is_shorter:
        final = pair.traces[other].steps[max(last)]
        until = final.step if final.finished else final.step - 1
        what += f"; {NAMES[other]} goes on {f'to step {until}' if until > step else 'after it'}"
    return at_step(pair, step + 1, Kind.ENDED, what)


def _is_not_of(row: StepRow, other: Trace) -> bool:
    """Whether what comes after the last step has no place in the other recording.

    The other one would hold it at another level, or has dropped it.
    """
    if row.finished:
        return False
    its = other.steps.get(row.step)
    level = other.level_of(row.step) if its is None else its.level
    return level != row.level or (its is not None and its.dropped)


def _last_step(trace: Trace, other: Trace) -> int:
    """Return the number of the last step, or -1.

    A trailing unfinished step without records of the main thread is excluded, and one that has no
    place in the other recording.
    """
    steps = list(trace.steps.values())
    if steps and _is_not_of(steps[-1], other):
        steps.pop()
    if steps and not steps[-1].finished and steps[-1].records:
        of_main = any(MAIN in outline.threads for outline in trace.outlines(steps[-1].step))
        steps = steps if of_main else steps[:-1]
    return steps[-1].step if steps else -1


def missing_processes(
    left: Mapping[tuple[int, int], Trace],
    right: Mapping[tuple[int, int], Trace],
) -> list[Divergence]:
    """Return the processes that only one of two runs has."""
    return [
        Divergence.without_op(
            rank,
            0,
            Kind.ENDED,
            f"only {NAMES[(rank, ordinal) not in left]} has "
            f"{f'process {ordinal}' if ordinal else 'a recording'} of rank {rank}",
        )
        for rank, ordinal in sorted(left.keys() ^ right.keys())
    ]


SECTIONS = {"knobs": "", "versions": "version of ", "hardware": "hardware: "}
"""Sections of a trace's meta that hold settings, each with the prefix of their names."""

SINGLE = ("guarantee", "profile", "digest", "level", "world_size", "program", *NOT_ALIKE)


def settings(pair: Pair) -> tuple[Setting, ...]:
    """Return the knobs, versions and pieces of hardware in which two runs differ.

    Traces of killed runs do not tell whether they are alike.
    """
    sides: list[dict[str, str]] = []
    for meta in (trace.meta for trace in pair.traces):
        found = {name: str(meta[name]) for name in SINGLE if meta.get(name) is not None}
        for section, called in SECTIONS.items():
            its = meta.get(section) or {}
            found |= {f"{called}{name}": str(value) for name, value in its.items()}
        sides.append(found)
    left, right = sides
    return tuple(
        Setting(name, left.get(name), right.get(name))
        for name in {**left, **right}
        if left.get(name) != right.get(name)
        and (name not in NOT_ALIKE or (name in left and name in right))
    )


def program(pair: Pair) -> Program:
    """Return what the program has that may explain why its runs diverge."""
    left, right = (trace.meta for trace in pair.traces)
    loaders = [
        Loader(
            where=each["where"],
            workers=each["workers"],
            dataset=each["dataset"],
            worker_init_fn=each.get("worker_init_fn") or "",
        )
        for meta in (left, right)
        for each in meta.get("loaders") or ()
    ]
    return Program(
        features=_features(pair, loaders),
        accelerator=accelerator(left) or accelerator(right),
        loaders=tuple(dict.fromkeys(loaders)),
        reads=_reads(left.get("sources") or (), right.get("sources") or ()),
        threads=tuple(
            dict.fromkeys(
                name
                for trace in pair.traces
                for number, name in trace.threads.items()
                if number != MAIN
            )
        ),
        models=_models(pair),
    )


def _models(pair: Pair) -> tuple[tuple[str, str], ...]:
    """Return what each model of either run is called, where that stands for no other module."""
    left, right = (trace.meta.get("models") or {} for trace in pair.traces)
    named = {**right, **left}
    times = Counter(named.values())
    paths = {
        site.module.partition(":")[0] for trace in pair.traces for site in trace.sites.values()
    }
    taken = paths.union(named)
    return tuple(
        (model, name) for model, name in named.items() if times[name] == 1 and name not in taken
    )


COMMIT = 12
"""Digits of a commit that are shown."""


def facts(trace: Trace) -> RunFacts:
    """Return when, where and from what a run was recorded."""
    meta = trace.meta
    repository = meta.get("repository") or {}
    changed = repository.get("changed_files")
    commit = str(repository.get("commit") or "")[:COMMIT] or str(repository.get("unknown") or "")
    if isinstance(changed, int) and changed:
        commit += f", {counted(changed, 'file')} changed"
    profile, guarantee = meta.get("profile") or "none", meta.get("guarantee")
    return RunFacts(
        date=meta.get("date") or "",
        host=meta.get("host") or "",
        torch=str((meta.get("versions") or {}).get("torch") or ""),
        commit=commit,
        profile=f"{profile} ({guarantee})" if guarantee else profile,
    )


def _features(pair: Pair, loaders: Sequence[Loader]) -> tuple[str, ...]:
    """Return the features that the program uses, or may use as far as its recordings tell.

    Loaders are recorded at every level, other features by their ops alone.
    """
    unseen = any(trace.meta.get("level", "op") != "op" for trace in pair.traces)
    unknown = any("loaders" not in trace.meta for trace in pair.traces)
    sites = [site for trace in pair.traces for site in trace.sites.values()]
    found = [
        name
        for name, uses in FEATURES.items()
        if (unseen and (unknown or name != LOADER)) or any(map(uses, sites))
    ]
    if LOADER in found and (unknown or any(each.workers for each in loaders)):
        found.append(WORKERS)
    return tuple(found)


def _reads(left: Sequence[Any], right: Sequence[Any]) -> tuple[UncontrolledRead, ...]:
    """Return the places at which either run reads what no seed decides, or gives a seed."""
    sides = [
        {(each["name"], each["what"], short(each["where"])): each for each in side}
        for side in (left, right)
    ]
    found = []
    for (name, what, _), read in (sides[1] | sides[0]).items():
        row = row_of_read(name, what)
        if row is not None:
            seeds = [side.get((name, what, short(read["where"])), {}) for side in sides]
            found.append(
                UncontrolledRead(
                    name=printable(name),
                    what=row.what,
                    where=read["where"],
                    instead=row.edit(printable(name), in_sample=read.get("in_sample") is True),
                    step=read["step"],
                    record=read["record"],
                    left=seeds[0].get("value") or "",
                    right=seeds[1].get("value") or "",
                )
            )
    return tuple(found)


def losses(pair: Pair) -> tuple[tuple[int, float | None, float | None], ...]:
    """Return the loss of each step in both runs; the mean where a step has several."""
    sides: list[dict[int, float | None]] = [{}, {}]
    for means, by_step in zip(sides, pair.losses, strict=True):
        for step, some in by_step.items():
            numbers = [loss.value for loss in some if loss.value is not None]
            means[step] = sum(numbers) / len(numbers) if len(numbers) == len(some) else None
    left, right = sides
    return tuple((step, left.get(step), right.get(step)) for step in sorted({*left, *right}))


def notes(pair: Pair) -> Iterator[str]:
    """Yield what a reader has to know about the two recordings."""
    yield from _unlike_recordings(pair)
    detailed = [
        name for name, trace in zip(NAMES, pair.traces, strict=True) if trace.meta.get("detail")
    ]
    if len(detailed) == 1:
        yield (
            f"only {detailed[0]} was recorded with --detail: steps are compared by parameters, "
            "gradients and losses, not op by op"
        )
    for trace, name in zip(pair.traces, NAMES, strict=True):
        if trace.is_truncated:
            yield f"{name} was killed or still runs: it is compared up to its last whole step"
        yield from _dropped_records(trace, name)
    dropped_tails = [
        name
        for trace, name in zip(pair.traces, NAMES, strict=True)
        if any(row.dropped and not row.finished for row in trace.steps.values())
    ]
    if dropped_tails:
        of = " and ".join(dropped_tails)
        yield f"what comes after the last step was dropped in {of}, and is not compared"
    for mine, theirs, name in (
        (pair.left, pair.right, NAMES[0]),
        (pair.right, pair.left, NAMES[1]),
    ):
        steps = [step for step in mine.steps if step not in theirs.steps]
        asked, last = theirs.meta.get("steps"), max(theirs.steps, default=0)
        left_out = [
            step
            for step in steps
            if step < last or (asked and step > asked[1]) or _is_not_of(mine.steps[step], theirs)
        ]
        ended = [step for step in left_out if mine.steps[step].finished]
        if ended:
            steps_are = f"{counted(len(ended), 'step')} {are(len(ended))}"
            yield f"{steps_are} recorded in {name} only: {_in_words(ended)}"
        if len(left_out) > len(ended):
            yield f"what comes after the last step is recorded in {name} only"
    first = next((step for step in pair.steps if _unequal_generators(pair, step)), None)
    if first is not None:
        generators = ", ".join(_unequal_generators(pair, first))
        since = (
            "when the runs end" if pair.is_after_last(first) else f"from the end of step {first} on"
        )
        yield f"the states of {generators} differ {since}"


def _dropped_records(trace: Trace, name: str) -> Iterator[str]:
    """Yield of which steps the records were dropped, to stay within a size for all ranks."""
    dropped = [step for step, row in trace.steps.items() if row.dropped and row.finished]
    most, ranks = trace.meta.get("max_size"), trace.meta.get("world_size", 1)
    within = f", to stay within {size(most // ranks)}" if most else ""
    if most and ranks > 1:
        within += f" (its share of {size(most)} for {ranks:,} ranks)"
    if dropped:
        yield (
            f"{name} dropped the records of {counted(len(dropped), 'step')} "
            f"({_in_words(dropped)}){within}: their parameters, gradients and losses are there"
        )


def _unlike_recordings(pair: Pair) -> Iterator[str]:
    """Yield that one run was recorded with detail, and how one ended that was resumed."""
    detailed = [
        name for trace, name in zip(pair.traces, NAMES, strict=True) if trace.meta.get("detail")
    ]
    if len(detailed) == 1:
        yield (
            f"only {detailed[0]} was recorded with --detail: steps are compared by parameters, "
            "gradients and losses, not op by op"
        )
    if all(each.name != RESUMED for each in settings(pair)):
        return
    left, right = (
        [row for row in trace.steps.values() if row.finished and row.parameters][-1:]
        for trace in pair.traces
    )
    if left and right:
        equal = left[0].parameters == right[0].parameters
        yield (
            f"the parameters after the last step of each, {left[0].step} in {NAMES[0]} and "
            f"{right[0].step} in {NAMES[1]}, are {'the same, bit for bit' if equal else 'unequal'}"
        )


def _in_words(steps: Sequence[int]) -> str:
    """Return numbers in their order as the ranges that they are, as in ``0 to 39 and 61``."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    words = [f"{first} to {last}" if first < last else str(first) for first, last in spans]
    if len(words) > _SPANS:
        words[_SPANS:] = [f"{len(words) - _SPANS} more ranges"]
    return " and ".join([*filter(None, [", ".join(words[:-1])]), words[-1]])


_SPANS = 4
"""Ranges of steps that a note names."""


def unequal_replicas(name: str, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield a sentence for each rank whose parameters no longer equal those of the first rank.

    Ranks whose parameters never agree are no replicas: each holds a part of the model.
    """
    ranks = [trace for trace in traces if not trace.meta.get("ordinal")]
    for first, other in ((ranks[0], other) for other in ranks[1:]):
        pairs: list[tuple[int, bytes, bytes]] = [
            (step, first.steps[step].parameters, other.steps[step].parameters)
            for step in first.steps
            if step in other.steps
        ]
        agreed = [step for step, one, two in pairs if one and one == two]
        unequal = [step for step, one, two in pairs if agreed and step > agreed[0] and one != two]
        if unequal:
            yield (
                f"{name}: the parameters of ranks {first.rank} and {other.rank} agree at step "
                f"{max(step for step in agreed if step < unequal[0])} "
                f"and no longer at step {unequal[0]}"
            )
