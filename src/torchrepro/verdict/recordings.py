"""Opens two recordings; facts about them: where the runs end, their settings, and the program."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, groupby
from math import isnan
from operator import attrgetter
from typing import TYPE_CHECKING

from torchrepro.ground.errors import TraceError, printable, size
from torchrepro.seeding.call_records import ObservedCall
from torchrepro.seeding.nondeterministic_calls import row_of_read
from torchrepro.trace.format import MAIN, StepRow
from torchrepro.trace.reader import read_run
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
    IgnoredLine,
    Kind,
    Loader,
    NondeterministicRead,
    NotFinite,
    Program,
    RunFacts,
    Setting,
    UninitializedRead,
)

if TYPE_CHECKING:
    from torchrepro.trace.reader import Trace

    Traces = Mapping[tuple[int, int], Trace]  # (rank, number of the process in the rank) -> trace

CUT = " (killed, ended by os._exit, or still running)"


@contextmanager
def opened_runs(runs: tuple[str, str]) -> Iterator[Sequence[Traces]]:
    """Open the traces of two runs, by rank and number of the process; close them at the end.

    Raises `TraceError` if a folder has no trace, or if a trace changes meanwhile.
    """

    def order(trace: Trace) -> tuple[int, bool, str, str, int]:
        # Sort the processes of a rank by name, because they may start in any order.
        name, meta = str(trace.meta.get("process", "")), trace.meta
        program, ordinal = str(meta.get("program", "")), int(meta.get("ordinal", 0))
        return trace.rank, name != "MainProcess", name, program, ordinal

    with ExitStack() as stack:
        opened: list[Traces] = []
        for run in runs:
            traces = read_run(run)
            for trace in traces:
                stack.callback(trace.close)
            by_rank = groupby(sorted(traces, key=order), key=attrgetter("rank"))
            opened.append(
                {(rank, n): trace for rank, group in by_rank for n, trace in enumerate(group)}
            )
        try:
            yield opened
        except sqlite3.Error as error:
            problem = f"has changed since it was opened: {error}"
            raise TraceError.about(problem, found=" or ".join(runs)) from None


def truncation(pair: Pair) -> Divergence | None:
    """Return a divergence if one run ended before the other, or was killed; else None.

    The runs are known to agree up to that end. A killed run never counts as the same as another
    run, because its further steps are unknown.
    """
    left, right = pair.traces
    last = [_last_step(left, right), _last_step(right, left)]
    if not pair.steps:
        empty = " and ".join(name for name, step in zip(NAMES, last, strict=True) if step < 0)
        reason = (
            f"nothing was recorded in {empty}" if empty else "no step was recorded in both runs"
        )
        return pair.at_step(max(min(last), 0), Kind.ENDED, reason)
    cut = [left.is_truncated, right.is_truncated]
    ended = last.index(min(last))
    asked = pair.traces[ended].meta.get("steps")
    is_shorter = last[0] != last[1] and not (asked and last[ended] >= asked[1])
    if not is_shorter and not any(cut):
        return None  # all requested steps were recorded
    if all(cut):
        ends = " and ".join(
            f"{name} after step {step}" for name, step in zip(NAMES, last, strict=True)
        )
        return pair.at_step(min(last) + 1, Kind.ENDED, f"{BOTH_CUT}{CUT}: {ends}")
    if not is_shorter:
        ended = cut.index(True)
    step = last[ended]
    row = pair.traces[ended].steps.get(step)
    reason = f"{NAMES[ended]} ended before its first step"
    if row is not None:
        where = "after" if row.finished else "in the middle of"
        reason = f"{NAMES[ended]} ended {where} step {step}"
    reason += CUT * cut[ended]
    if is_shorter:
        final = pair.traces[1 - ended].steps[max(last)]
        until = final.step if final.finished else final.step - 1
        until_then = f"to step {until}" if until > step else "after it"
        reason += f"; {NAMES[1 - ended]} continues {until_then}"
    return pair.at_step(step + 1, Kind.ENDED, reason)


def _is_not_of(row: StepRow, counterpart: Trace) -> bool:
    """Whether `row` has records after the last step that the other recording cannot have.

    It cannot have them if it has another level in this step, or has dropped the records.
    """
    if row.finished:
        return False
    step = counterpart.steps.get(row.step)
    level = counterpart.level_of(row.step) if step is None else step.level
    return level != row.level or (step is not None and step.dropped)


def _last_step(trace: Trace, counterpart: Trace) -> int:
    # Skip records after the last step if they have no counterpart, or are all of other threads.
    steps = list(trace.steps.values())
    if steps and _is_not_of(steps[-1], counterpart):
        steps.pop()
    if steps and not steps[-1].finished and steps[-1].records:
        of_main = any(MAIN in outline.threads for outline in trace.outlines(steps[-1].step))
        steps = steps if of_main else steps[:-1]
    return steps[-1].step if steps else -1


def missing_processes(left: Traces, right: Traces) -> Iterator[Divergence]:
    for rank, ordinal in sorted(left.keys() ^ right.keys()):
        which = f"process {ordinal}" if ordinal else "a recording"
        reason = f"only {NAMES[(rank, ordinal) not in left]} has {which} of rank {rank}"
        yield Divergence(rank, 0, kind=Kind.ENDED, what=reason)


# Settings in the metadata of a trace: sections, with a prefix for the names in them, and keys.
SECTIONS = {"knobs": "", "versions": "version of ", "hardware": "hardware: "}
SINGLE = ("guarantee", "profile", "digest", "level", "world_size", "program", *NOT_ALIKE)


def settings(pair: Pair) -> tuple[Setting, ...]:
    """Return the knobs, versions and pieces of hardware that differ between two runs.

    The settings `NOT_ALIKE` are skipped if a run lacks them, because it was killed.
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


def program(pair: Pair, more_pairs: Sequence[Pair] = ()) -> Program:
    """Return the facts about the program that may explain why two runs of it diverge.

    `pair` has the traces of the process that diverges first. Nondeterministic reads of this process
    come before the reads of `more_pairs`.
    """
    metas = left, right = [trace.meta for trace in pair.traces]
    loaders = [
        Loader(row["where"], row["workers"], row["dataset"], row.get("worker_init_fn") or "")
        for meta in metas
        for row in meta.get("loaders") or ()
    ]
    # Loaders are recorded at every level. Other features are known only by their ops.
    unseen = any(meta.get("level", "op") != "op" for meta in metas)
    unknown = any("loaders" not in meta for meta in metas)
    sites = [site for trace in pair.traces for site in trace.sites.values()]
    features = [
        name
        for name, uses in FEATURES.items()
        if (unseen and (unknown or name != LOADER)) or any(map(uses, sites))
    ]
    if LOADER in features and (unknown or any(loader.workers for loader in loaders)):
        features.append(WORKERS)
    threads = [thread for trace in pair.traces for thread in trace.threads.items()]
    # Use the program's name of a model only if it is unique.
    models = {**(right.get("models") or {}), **(left.get("models") or {})}
    times = Counter(models.values())
    taken = {site.module.partition(":")[0] for site in sites}.union(models)
    files = {file for meta in metas for file in meta.get("modules") or ()}
    began = [meta["began"] for meta in metas if meta.get("began") is not None]
    unwritten = {
        (
            short(read["allocated"]),
            short(read["read"]),
            read["op"],
            read["is_nan"],
        ): UninitializedRead(read["allocated"], read["read"], printable(read["op"]), read["is_nan"])
        for meta in metas
        for read in meta.get("unwritten") or ()
    }
    return Program(
        features=tuple(features),
        accelerator=accelerator(left) or accelerator(right),
        loaders=tuple(dict.fromkeys(loaders)),
        reads=_reads([pair, *more_pairs]),
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


def _observed_calls(trace: Trace) -> dict[tuple[str, str, str], ObservedCall]:
    calls = map(ObservedCall.from_json, trace.meta.get("sources") or ())
    return {(call.name, call.what, short(call.where)): call for call in calls}


def _reads(pairs: Sequence[Pair]) -> tuple[NondeterministicRead, ...]:
    by_key: dict[tuple[str, str, str], NondeterministicRead] = {}
    for pair in pairs:
        left, right = map(_observed_calls, pair.traces)
        for key, call in (right | left).items():
            row = row_of_read(call.name, call.what)
            if row is None:
                continue
            name = printable(call.name)
            read = NondeterministicRead(
                name,
                row.what,
                call.where,
                row.edit(name, in_sample=call.in_sample),
                call.step,
                call.record,
                in_sample=bool(row.in_sample and call.in_sample),
                left=left[key].value or "" if key in left else "",
                right=right[key].value or "" if key in right else "",
            )
            if key not in by_key or (read.is_differing_seed and not by_key[key].is_differing_seed):
                by_key[key] = read
    reads = tuple(by_key.values())
    began = [trace.meta.get("began") for pair in pairs for trace in pair.traces]
    until = min((time for time in began if time is not None), default=None)
    return tuple(
        with_source(read, reads, until) if read.is_differing_seed else read for read in reads
    )


_NEAR = 3  # how many near lines are proposed


def count_ignored(pairs: Sequence[Pair], location: str) -> IgnoredLine:
    """Return the larger number of records of a line in a run. If it is 0, add the nearest lines."""
    records = [0, 0]
    sources = set[str]()
    for pair in pairs:
        for run, trace in enumerate(pair.traces):
            sources.update(short(site.source) for site in trace.sites.values())
            sites = {number for number, site in trace.sites.items() if is_at(site, location)}
            if not sites:
                continue
            for step in trace.steps:
                used = chain.from_iterable(outline.sites for outline in trace.outlines(step))
                records[run] += sum(map(sites.__contains__, used))
    file, _, line = short(location).rpartition(":")
    near = sorted(
        (source for source in sources if source.rpartition(":")[0] == file),
        key=lambda source: (abs(int(source.rpartition(":")[2]) - int(line)), source),
    )
    return IgnoredLine(location, max(records), () if any(records) else tuple(near[:_NEAR]))


COMMIT = 12  # how many digits of a commit are shown


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
    """Return (step, left loss, right loss) for each step. Several losses of a step are averaged.

    Losses of threads other than the main thread belong to no step, and are skipped.
    """
    sides: list[dict[int, float | None]] = [{}, {}]
    for means, by_step in zip(sides, pair.losses, strict=True):
        if ANY_STEP in by_step:
            continue
        for step, losses_of_step in by_step.items():
            values = (loss.value for loss in losses_of_step)
            numbers = [value for value in values if value is not None and not isnan(value)]
            is_whole = len(numbers) == len(losses_of_step)
            means[step] = sum(numbers) / len(numbers) if is_whole else None
    left, right = sides
    return tuple((step, left.get(step), right.get(step)) for step in sorted({*left, *right}))


def not_finite(trace: Trace) -> NotFinite | None:
    known = [loss for loss in trace.losses if loss.value is not None]
    first = next((position for position, loss in enumerate(known) if not loss.is_finite), None)
    if first is None:
        return None
    last = not any(loss.is_finite for loss in known[first:])
    return NotFinite(known[first].step, str(known[first].value), last)


def loss_sentences(
    firsts: tuple[NotFinite | None, ...], unwritten: Sequence[UninitializedRead]
) -> Iterator[str]:
    """Yield sentences on losses that are not finite, and on reads of uninitialized memory."""
    same = firsts[0] == firsts[1]
    for name, loss in [("", firsts[0])] if same else zip(NAMES, firsts, strict=True):
        if loss is not None:
            when = f"from step {loss.step} on" if loss.on else f"at step {loss.step}"
            yield f"{name and f'{name}: '}loss is {loss.value} {when}"
    for read in unwritten:
        yield (
            f"{short(read.read)} reads uninitialized memory: {short(read.allocated)} "
            "allocated it, as torch.empty does"
        )


def notes(pair: Pair) -> Iterator[str]:
    """Yield sentences for the user on the limits of two recordings, such as dropped steps."""
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
        yield f"ops that {lines} hides from all modes of torch were not recorded or compared"
    unread = [trace.meta.get("unread") or 0 for trace in pair.traces]
    if any(unread):
        yield (
            f"{max(unread):,} outputs of ops were overwritten before they were read, by code that "
            "no recorded op shows; they were not compared"
        )
    if any(setting.name == RESUMED for setting in settings(pair)):
        rows = [
            [row for row in trace.steps.values() if row.finished and row.parameters]
            for trace in pair.traces
        ]
        if all(rows):
            last_left, last_right = (ended[-1] for ended in rows)
            equal = last_left.parameters == last_right.parameters
            yield (
                f"the parameters after the last step of each run, {last_left.step} in {NAMES[0]} "
                f"and {last_right.step} in {NAMES[1]}, are "
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
            yield f"{name} was killed or still runs: it is compared up to its last complete step"
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
        droppers = " and ".join(dropped_tails)
        yield f"records after the last step were dropped in {droppers}, and are not compared"
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
            yield f"records after the last step are in {name} only"
    unequal = {step: names for step in pair.steps if (names := pair.unequal_generators(step))}
    moved = pair.moved_generators() if unequal else ()
    for step, names in unequal.items():
        used = ", ".join(name for name in names if name in moved)
        if used:
            is_after = pair.is_after_last(step)
            end = "when the runs end" if is_after else f"from the end of step {step} on"
            yield f"the states of {used} differ {end}"
            return


_SPANS = 4  # how many ranges of steps a note lists


def _in_words(steps: Sequence[int]) -> str:
    # Within a range, the difference of a step and its position is constant.
    spans = groupby(enumerate(steps), lambda numbered: numbered[1] - numbered[0])
    ranges = [[step for _, step in span] for _, span in spans]
    words = [f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in ranges]
    if len(words) > _SPANS:
        words[_SPANS:] = [f"{len(words) - _SPANS} more ranges"]
    return " and ".join([*filter(None, [", ".join(words[:-1])]), words[-1]])


def unequal_replicas(name: str, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield a sentence for each rank whose parameters no longer equal those of the first rank.

    Ranks whose parameters never agree have different parts of the model, and are skipped. If
    parameters agree only until an optimizer changes them, the ranks may just share a seed. Such
    ranks are skipped too, unless DDP replicates the model.
    """
    ranks = [trace for trace in traces if not trace.meta.get("ordinal")]
    for first, replica in ((ranks[0], replica) for replica in ranks[1:]):
        begun = first.meta.get("before") or [""]
        kept = all(trace.meta.get("replicated") for trace in (first, replica))
        kept = kept and all(begun) and begun == replica.meta.get("before")
        pairs: list[tuple[int, bytes, bytes]] = [
            (step, first.steps[step].parameters, replica.steps[step].parameters)
            for step in first.steps
            if step in replica.steps
        ]
        agreed = [step for step, mine, theirs in pairs if mine and mine == theirs]
        trained = [step for step, mine, _ in pairs if step in agreed and mine.hex() not in begun]
        since = -1 if kept else min(trained, default=max(first.steps, default=0))
        unequal = [step for step, mine, theirs in pairs if step > since and mine != theirs]
        if unequal:
            last = max((step for step in agreed if step < unequal[0]), default=None)
            yield (
                f"{name}: the parameters of ranks {first.rank} and {replica.rank} agree "
                f"{'as training begins' if last is None else f'at step {last}'} "
                f"and no longer at step {unequal[0]}"
            )


def _unchanged_steps(trace: Trace) -> int:
    """Return the number of optimizer steps if no step changed a parameter. Otherwise return 0."""
    rows = [row for row in trace.steps.values() if row.finished and row.parameters]
    begun = trace.meta.get("before") or ()
    # Changes by compiled optimizers may become visible only in the next step.
    is_known = len(rows) > len(begun)
    return len(rows) if is_known and all(row.parameters.hex() in begun for row in rows) else 0
