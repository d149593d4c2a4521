"""What two recordings say besides what was computed: their ends, their settings, their programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING

from torchrepro.ground.messages import printable, size
from torchrepro.seeding.nondeterministic_calls import row_of_read
from torchrepro.trace.format import MAIN, StepRow
from torchrepro.verdict.criteria import ANY_STEP, NAMES, Pair
from torchrepro.verdict.diagnosis import (
    FEATURES,
    LOADER,
    NOT_ALIKE,
    RESUMED,
    WORKERS,
    accelerator,
)
from torchrepro.verdict.program_text import with_source
from torchrepro.verdict.records import is_at
from torchrepro.verdict.render import are, counted, short
from torchrepro.verdict.value import (
    BOTH_CUT,
    Divergence,
    Kind,
    LeftOut,
    Loader,
    NotFinite,
    Program,
    RunFacts,
    Setting,
    UncontrolledRead,
    UninitializedRead,
)

if TYPE_CHECKING:
    from torchrepro.trace.reader import Trace

    Traces = Mapping[tuple[int, int], Trace]  # by rank, and by number of the process within it

CUT = " (killed, ended by os._exit, or still running)"


def truncation(pair: Pair) -> Divergence | None:
    """Return where one of two runs ended that are the same up to there.

    A run that was killed is never the same as another: nobody knows what it would have done.
    """
    last = [_last_step(trace, other) for trace, other in (pair.traces, pair.traces[::-1])]
    if not pair.steps:
        empty = " and ".join(name for name, step in zip(NAMES, last, strict=True) if step < 0)
        what = f"nothing was recorded in {empty}" if empty else "no step was recorded in both runs"
        return pair.at_step(max(min(last), 0), Kind.ENDED, what)
    cut = [trace.is_truncated for trace in pair.traces]
    ended = last.index(min(last))
    asked = pair.traces[ended].meta.get("steps")
    is_shorter = last[0] != last[1] and not (asked and last[ended] >= asked[1])
    if not is_shorter:
        if not any(cut):
            return None  # more of it was not to be recorded
        ended = cut.index(True)
    step = min(last) if all(cut) else last[ended]
    if all(cut):
        ends = [f"{name} after step {each}" for name, each in zip(NAMES, last, strict=True)]
        return pair.at_step(step + 1, Kind.ENDED, f"{BOTH_CUT}{CUT}: {' and '.join(ends)}")
    row = pair.traces[ended].steps.get(step)
    what = f"{NAMES[ended]} ended before its first step"
    if row is not None:
        what = f"{NAMES[ended]} ended {'after' if row.finished else 'in the middle of'} step {step}"
    what += CUT * cut[ended]
    if is_shorter:
        final = pair.traces[1 - ended].steps[max(last)]
        until = final.step if final.finished else final.step - 1
        goes_on = f"to step {until}" if until > step else "after it"
        what += f"; {NAMES[1 - ended]} goes on {goes_on}"
    return pair.at_step(step + 1, Kind.ENDED, what)


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
    # What comes after the last step is left out where it has no place in the other recording, or no
    # record of the main thread.
    steps = list(trace.steps.values())
    if steps and _is_not_of(steps[-1], other):
        steps.pop()
    if steps and not steps[-1].finished and steps[-1].records:
        of_main = any(MAIN in outline.threads for outline in trace.outlines(steps[-1].step))
        steps = steps if of_main else steps[:-1]
    return steps[-1].step if steps else -1


def missing_processes(left: Traces, right: Traces) -> Iterator[Divergence]:
    for rank, ordinal in sorted(left.keys() ^ right.keys()):
        which = f"process {ordinal}" if ordinal else "a recording"
        what = f"only {NAMES[(rank, ordinal) not in left]} has {which} of rank {rank}"
        yield Divergence(rank, 0, kind=Kind.ENDED, what=what)


# What holds settings in a trace's meta: sections, with the prefix of their names, and single keys.
SECTIONS = {"knobs": "", "versions": "version of ", "hardware": "hardware: "}
SINGLE = ("guarantee", "profile", "digest", "level", "world_size", "program", *NOT_ALIKE)


def settings(pair: Pair) -> tuple[Setting, ...]:
    """Return the knobs, versions and pieces of hardware in which two runs differ.

    Traces of killed runs do not tell whether they are alike.
    """
    left, right = (
        {name: str(meta[name]) for name in SINGLE if meta.get(name) is not None}
        | {
            f"{called}{name}": str(value)
            for section, called in SECTIONS.items()
            for name, value in (meta.get(section) or {}).items()
        }
        for meta in (trace.meta for trace in pair.traces)
    )
    return tuple(
        Setting(name, left.get(name), right.get(name))
        for name in {**left, **right}
        if left.get(name) != right.get(name)
        and (name not in NOT_ALIKE or (name in left and name in right))
    )


def program(pair: Pair, others: Sequence[Pair] = ()) -> Program:
    """Return what the program has that may explain why its runs diverge.

    `pair` is of the processes that diverge first; what the `others` read comes after its reads.
    """
    metas = left, right = [trace.meta for trace in pair.traces]
    loaders = [
        Loader(its["where"], its["workers"], its["dataset"], its.get("worker_init_fn") or "")
        for meta in metas
        for its in meta.get("loaders") or ()
    ]
    # Loaders are recorded at every level, other features by their ops alone.
    unseen = any(meta.get("level", "op") != "op" for meta in metas)
    unknown = any("loaders" not in meta for meta in metas)
    sites = [site for trace in pair.traces for site in trace.sites.values()]
    features = [
        name
        for name, uses in FEATURES.items()
        if (unseen and (unknown or name != LOADER)) or any(map(uses, sites))
    ]
    if LOADER in features and (unknown or any(each.workers for each in loaders)):
        features.append(WORKERS)
    threads = [its for trace in pair.traces for its in trace.threads.items()]
    # What each model is called, where that stands for no other module.
    models = {**(right.get("models") or {}), **(left.get("models") or {})}
    times = Counter(models.values())
    taken = {site.module.partition(":")[0] for site in sites}.union(models)
    files = {file for meta in metas for file in meta.get("modules") or ()}
    began = [meta["began"] for meta in metas if meta.get("began") is not None]
    unwritten = {
        (
            short(each["allocated"]),
            short(each["read"]),
            each["op"],
            each["is_nan"],
        ): UninitializedRead(each["allocated"], each["read"], printable(each["op"]), each["is_nan"])
        for meta in metas
        for each in meta.get("unwritten") or ()
    }
    return Program(
        features=tuple(features),
        accelerator=accelerator(left) or accelerator(right),
        loaders=tuple(dict.fromkeys(loaders)),
        reads=_reads([pair, *others]),
        threads=tuple(dict.fromkeys(name for number, name in threads if number != MAIN)),
        models=tuple(
            (model, name)
            for model, name in models.items()
            if times[name] == 1 and name not in taken
        ),
        files=tuple(sorted(files)),
        began=min(began, default=None),
        unwritten=tuple(unwritten.values()),
    )


def _reads(pairs: Sequence[Pair]) -> tuple[UncontrolledRead, ...]:
    found: dict[tuple[str, str, str], UncontrolledRead] = {}
    for pair in pairs:
        left, right = (
            {(its["name"], its["what"], short(its["where"])): its for its in sources or ()}
            for sources in (trace.meta.get("sources") for trace in pair.traces)
        )
        for key, its in (right | left).items():
            name = printable(its["name"])
            row = row_of_read(its["name"], its["what"])
            if row is None:
                continue
            read = UncontrolledRead(
                name,
                what=row.what,
                where=its["where"],
                instead=row.edit(name, in_sample=its.get("in_sample") is True),
                in_sample=bool(row.in_sample and its.get("in_sample")),
                step=its["step"],
                record=its["record"],
                left=left.get(key, {}).get("value") or "",
                right=right.get(key, {}).get("value") or "",
            )
            if key not in found or (read.is_other_seed and not found[key].is_other_seed):
                found[key] = read
    reads = tuple(found.values())
    began = [trace.meta.get("began") for pair in pairs for trace in pair.traces]
    until = min((each for each in began if each is not None), default=None)
    return tuple(with_source(read, reads, until) if read.is_other_seed else read for read in reads)


_NEAR = 3  # lines that are named instead


def line_left_out(pairs: Sequence[Pair], where: str) -> LeftOut:
    """Return how many records a line has, in the run that has more of them, or others near it."""
    records = [0, 0]
    sources = set[str]()
    for pair in pairs:
        for side, trace in enumerate(pair.traces):
            sources.update(short(site.source) for site in trace.sites.values())
            its = {number for number, site in trace.sites.items() if is_at(site, where)}
            for step in trace.steps if its else ():
                each = chain.from_iterable(outline.sites for outline in trace.outlines(step))
                records[side] += sum(map(its.__contains__, each))
    file, _, line = short(where).rpartition(":")
    near = sorted(
        (each for each in sources if each.rpartition(":")[0] == file),
        key=lambda each: (abs(int(each.rpartition(":")[2]) - int(line)), each),
    )
    return LeftOut(where, max(records), () if any(records) else tuple(near[:_NEAR]))


COMMIT = 12  # digits of a commit that are shown


def facts(trace: Trace) -> RunFacts:
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


def losses(pair: Pair) -> tuple[tuple[int, float | None, float | None], ...]:
    """Return the loss of each step in both runs; the mean where a step has several.

    Those of other threads than the main one belong to no step in particular, and are left out.
    """
    sides: list[dict[int, float | None]] = [{}, {}]
    for means, by_step in zip(sides, pair.losses, strict=True):
        for step, some in by_step.items() if ANY_STEP not in by_step else ():
            numbers = [
                each.value for each in some if each.value is not None and each.value == each.value
            ]
            means[step] = sum(numbers) / len(numbers) if len(numbers) == len(some) else None
    left, right = sides
    return tuple((step, left.get(step), right.get(step)) for step in sorted({*left, *right}))


def not_finite(trace: Trace) -> NotFinite | None:
    known = [loss for loss in trace.losses if loss.value is not None]
    first = next((place for place, loss in enumerate(known) if not loss.is_finite), None)
    if first is None:
        return None
    last = not any(loss.is_finite for loss in known[first:])
    return NotFinite(known[first].step, str(known[first].value), last)


def words_of_not_finite(
    found: tuple[NotFinite | None, ...], unwritten: Sequence[UninitializedRead]
) -> Iterator[str]:
    """Yield a sentence on losses that are no finite numbers, and one on each unwritten read."""
    same = found[0] == found[1]
    for name, its in [("", found[0])] if same else zip(NAMES, found, strict=True):
        if its is not None:
            when = f"from step {its.step} on" if its.on else f"at step {its.step}"
            yield f"{name and f'{name}: '}loss is {its.value} {when}"
    for each in unwritten:
        yield (
            f"{short(each.read)} reads memory that nothing had written: {short(each.allocated)} "
            "allocated it, as torch.empty does"
        )


def notes(pair: Pair) -> Iterator[str]:
    """Yield what a reader has to know about the two recordings."""
    both = [*zip(NAMES, pair.traces, strict=True)]
    detailed = [name for name, trace in both if trace.meta.get("detail")]
    if len(detailed) == 1:
        yield (
            f"only {detailed[0]} was recorded with --detail: steps are compared by parameters, "
            "gradients and losses, not op by op"
        )
    hidden = {short(line) for trace in pair.traces for line in trace.meta.get("hidden") or ()}
    if hidden:
        lines = ", ".join(map(printable, sorted(hidden)))
        yield f"ops that {lines} hides from all modes of torch were not recorded, nor compared"
    if any(each.name == RESUMED for each in settings(pair)):
        rows = [
            [row for row in trace.steps.values() if row.finished and row.parameters]
            for trace in pair.traces
        ]
        if all(rows):
            one, other = (its[-1] for its in rows)
            equal = one.parameters == other.parameters
            yield (
                f"the parameters after the last step of each, {one.step} in {NAMES[0]} and "
                f"{other.step} in {NAMES[1]}, are "
                f"{'the same, bit for bit' if equal else 'unequal'}"
            )
    unchanged = [_unchanged_steps(trace) for trace in pair.traces]
    for name, steps in (
        [("", unchanged[0])] if len({*unchanged}) == 1 else zip(NAMES, unchanged, strict=True)
    ):
        if steps:
            yield f"{name and f'{name}: '}no parameter changed in any of {counted(steps, 'step')}"
    for name, trace in both:
        if trace.is_truncated:
            yield f"{name} was killed or still runs: it is compared up to its last whole step"
        dropped = [step for step, row in trace.steps.items() if row.dropped and row.finished]
        if dropped:
            most, ranks = trace.meta.get("max_size"), trace.meta.get("world_size") or 1
            within = f", to stay within {size(most // ranks)}" if most else ""
            if most and ranks > 1:
                within += f" (its share of {size(most)} for {ranks:,} ranks)"
            yield (
                f"{name} dropped the records of {counted(len(dropped), 'step')} "
                f"({_in_words(dropped)}){within}: their parameters, gradients and losses are there"
            )
    dropped_tails = [
        name
        for name, trace in both
        if any(row.dropped and not row.finished for row in trace.steps.values())
    ]
    if dropped_tails:
        of = " and ".join(dropped_tails)
        yield f"what comes after the last step was dropped in {of}, and is not compared"
    for (name, mine), (_, theirs) in (both, both[::-1]):
        asked, last = theirs.meta.get("steps"), max(theirs.steps, default=0)
        left_out = [
            row
            for step, row in mine.steps.items()
            if step not in theirs.steps
            and (step < last or (asked and step > asked[1]) or _is_not_of(row, theirs))
        ]
        ended = [row.step for row in left_out if row.finished]
        if ended:
            steps_are = f"{counted(len(ended), 'step')} {are(len(ended))}"
            yield f"{steps_are} recorded in {name} only: {_in_words(ended)}"
        if len(left_out) > len(ended):
            yield f"what comes after the last step is recorded in {name} only"
    unequal = {step: names for step in pair.steps if (names := pair.unequal_generators(step))}
    moved = pair.moved_generators() if unequal else ()
    for step, names in unequal.items():
        used = ", ".join(name for name in names if name in moved)
        if used:
            is_after = pair.is_after_last(step)
            end = "when the runs end" if is_after else f"from the end of step {step} on"
            yield f"the states of {used} differ {end}"
            return


_SPANS = 4  # ranges of steps that a note names


def _in_words(steps: Sequence[int]) -> str:
    # Within a range, a step and its place among all rise alike.
    spans = groupby(enumerate(steps), lambda each: each[1] - each[0])
    ranges = [[step for _, step in span] for _, span in spans]
    words = [f"{its[0]} to {its[-1]}" if len(its) > 1 else str(its[0]) for its in ranges]
    if len(words) > _SPANS:
        words[_SPANS:] = [f"{len(words) - _SPANS} more ranges"]
    return " and ".join([*filter(None, [", ".join(words[:-1])]), words[-1]])


def unequal_replicas(name: str, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield a sentence for each rank whose parameters no longer equal those of the first rank.

    Ranks whose parameters never agree are no replicas: each holds a part of the model. Those that
    agree until an optimizer changes them may have a seed in common and nothing else, unless DDP is
    to keep them equal.
    """
    ranks = [trace for trace in traces if not trace.meta.get("ordinal")]
    for first, other in ((ranks[0], other) for other in ranks[1:]):
        begun = first.meta.get("before") or [""]
        kept = all(trace.meta.get("replicated") for trace in (first, other))
        kept = kept and all(begun) and begun == other.meta.get("before")
        pairs: list[tuple[int, bytes, bytes]] = [
            (step, first.steps[step].parameters, other.steps[step].parameters)
            for step in first.steps
            if step in other.steps
        ]
        agreed = [step for step, one, two in pairs if one and one == two]
        trained = [step for step, one, _ in pairs if step in agreed and one.hex() not in begun]
        since = -1 if kept else min(trained, default=max(first.steps, default=0))
        unequal = [step for step, one, two in pairs if step > since and one != two]
        if unequal:
            last = max((step for step in agreed if step < unequal[0]), default=None)
            yield (
                f"{name}: the parameters of ranks {first.rank} and {other.rank} agree "
                f"{'as training begins' if last is None else f'at step {last}'} "
                f"and no longer at step {unequal[0]}"
            )


def _unchanged_steps(trace: Trace) -> int:
    """Return how many steps of optimizers there are if none has changed a parameter, else 0."""
    rows = [row for row in trace.steps.values() if row.finished and row.parameters]
    begun = trace.meta.get("before") or ()
    # What compiled code of an optimizer writes may show in its next step only.
    is_known = len(rows) > len(begun)
    return len(rows) if is_known and all(row.parameters.hex() in begun for row in rows) else 0
