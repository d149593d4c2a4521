"""What follows a divergence: a closer look, bisecting perturbations, and escalation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ProfileError
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import flatten
from torchrepro.trace.reader import read_run
from torchrepro.verdict.diagnosis import edit_at, next_level, worker_init_edit, worker_init_sentence
from torchrepro.verdict.render import headline, moment, place
from torchrepro.verdict.value import Advice, Kind
from torchrepro.verification.perturbations import HASH_SEED, RunEnvironment
from torchrepro.verification.process_perturbations import LOADING
from torchrepro.verification.result import EscalationTrial, StressResult
from torchrepro.verification.runner import all_failed, status_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.verdict.value import Divergence, Verdict
    from torchrepro.verification.perturbations import StressPlan
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner, Setup


def look_closer(runner: Runner, verdict: Verdict, setups: tuple[Setup, Setup]) -> Verdict:
    """Return a verdict with what two more runs, one in each of `setups`, show of its divergence.

    Where other data was loaded these runs record the loading. Any other divergence they record in
    detail. The verdict stays, with a note, if these runs diverge at another place or not at all.
    """
    first = verdict.first
    if first is None or not first.op:
        return verdict  # it has no op
    if first.phase == "data" and first.kind is Kind.DATA:
        return _follow_into_dataset(runner, verdict, first, setups)
    steps = max(first.step - 1, 0), first.step + 1
    keep = (*runner.request.keep, first.module)
    detailed = replace(runner, request=replace(runner.request, steps=steps, keep=keep, detail=True))
    when = moment(first.step, after_last=first.after_last)
    runs = _run_each(detailed, f"a closer look {when}".rstrip(), setups)
    note = "a closer look showed nothing: its runs ended before they got there"
    if all(run.recorded for run in runs):
        closer = runner.compare(*runs)
        verdict = replace(verdict, program=closer.program)
        if closer.first is not None and _spot(closer.first) == _spot(first):
            verdict = replace(verdict, first=closer.first)
            note = "the divergence is shown as two more runs recorded it, in detail"
        else:
            what = f"diverge {place(closer.first)}" if closer.first else "were the same there"
            note = f"two more runs, recorded in detail, {what}: it varies from run to run"
        verdict = runner.advised(verdict, runs[0])
    # The advice does not ask for the closer look that has been taken.
    advice = verdict.advice and replace(verdict.advice, closer="")
    return with_note(replace(verdict, advice=advice), note)


def _run_each(runner: Runner, what: str, setups: Sequence[Setup]) -> list[Run]:
    runs = []
    for number, (resolved, environment) in enumerate(setups, start=1):
        runner.say(f"{what}, run {number} of {len(setups)} ...")
        runs.append(runner.run(resolved, f"closer-{number}", environment))
    return runs


def _spot(first: Divergence) -> tuple[object, ...]:
    return first.rank, first.step, first.phase, first.module, first.op


def _follow_into_dataset(
    runner: Runner, verdict: Verdict, first: Divergence, setups: Sequence[Setup]
) -> Verdict:
    """Return the verdict of two runs that record the loading, if they diverge in the data.

    They record what every function of the program returns while a batch is loaded. Worker processes
    are not recorded, so these runs load in the main process.
    """
    loader, seeded = _loader_with_workers(verdict, first)
    steps = None if loader and loader.get("iterable") else (0, first.step + 1)
    request = replace(runner.request, steps=steps, samples=True, detail=True, statistics=False)
    recorder = replace(runner, request=request, tolerance=None)
    progress = "what the dataset returns"
    if loader:
        progress = LOADING
        in_main = RunEnvironment(in_process={LOADING: True})
        setups = [(resolved, environment | in_main) for resolved, environment in setups]
    runs = _run_each(recorder, progress, setups)
    found = recorder.compare(*runs) if all(run.recorded for run in runs) else None
    if found is not None and found.first is not None:
        if found.first.phase != "data":
            return with_note(verdict, f"{progress}: two more runs diverge {place(found.first)}")
        note = "two more runs recorded what the dataset returned"
        if loader:
            where = f"the workers' batches diverge {place(first)}"
            note = f"{where}; loading in the main process shows where"
        advice = found.advice and replace(found.advice, closer="")  # there is no more to see
        return with_note(replace(found, advice=advice), note)
    failed = next((run for run in runs if run.status or not run.recorded), None)
    if failed is not None:
        note = f"a closer look showed nothing: the program failed, see {failed.log}"
        return with_note(verdict, note)
    if not loader:
        note = "two more runs were the same there: it varies from run to run"
        return with_note(verdict, note)
    init = loader.get("worker_init_fn")
    why = (
        worker_init_sentence(init, seeded=seeded)
        if init
        else "Something depends on the worker: its id, its pid, or which of them finishes first."
    )
    advice = Advice(
        cause="The batches differ when worker processes load them, and did not in two runs that "
        f"loaded in the main process. {why}",
        knob="dataloader.num_workers",
        setting="dataloader.num_workers=0",
        closer="",
        edit=worker_init_edit(seeded=seeded) if init else "",
    )
    note = "two more runs, which loaded in the main process, were the same"
    return with_note(replace(verdict, advice=advice), note)


def _loader_with_workers(verdict: Verdict, first: Divergence) -> tuple[Mapping[str, Any], bool]:
    """Return the loader in whose batch two runs diverge, if it has workers, as a trace has it.

    And whether torchrepro seeds loaders whose author seeded nothing.
    """
    for trace in read_run(verdict.left, records=False):
        for loader in trace.meta.get("loaders") or () if trace.rank == first.rank else ():
            if loader.get("where") == first.source and loader.get("workers"):
                knobs = trace.meta.get("knobs") or {}
                return loader, knobs.get("dataloader.seeding") == "auto"
    return {}, False


def with_note(verdict: Verdict, note: str) -> Verdict:
    """Return a verdict with one more note, before the others."""
    return replace(verdict, notes=(note, *verdict.notes))


def bisect_perturbations(
    runner: Runner, resolved: ResolvedProfile | None, plan: StressPlan, first: Run, number: int
) -> StressResult:
    """Return which perturbation alone makes the runs diverge, or which of them together.

    `first` is the run without perturbations. `number` is that of the run that differs from it: its
    perturbations are tried again, at most two runs for each halving.
    """

    def diverges(names: Sequence[str]) -> bool:
        runner.say(f"perturbed by {', '.join(names) or 'nothing'} ...")
        done = len(list(runner.folder.glob("stress-*.log")))
        environment = plan.environment(number, names)
        run = runner.run(resolved, f"stress-{done + 1}", environment, tuple(names))
        return not runner.compare(first, run).same

    stressed = StressResult(plan.names, plan.skipped)
    if diverges(()):
        return replace(stressed, what="the runs diverge without any perturbation as well")
    found = bisect(plan.names, diverges)
    alone = f"perturbing the {found[0]} alone makes the runs diverge"
    several = f"it takes several perturbations together: {', '.join(found)}"
    return replace(stressed, culprits=found, what=several if found[1:] else alone)


def bisect(names: Sequence[str], diverges: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Return one of `names` for which `diverges` holds, or the fewest found for which it does.

    It holds for all of them together.
    """
    while len(names) > 1:
        middle = len(names) // 2
        halves = (names[:middle], names[middle:])
        half = next((half for half in halves if diverges(half)), None)
        if half is None:
            break
        names = half
    return tuple(names)


def with_perturbation(
    verdict: Verdict, stressed: StressResult, plan: StressPlan, resolved: ResolvedProfile | None
) -> Verdict:
    """Return a verdict that names the perturbation behind it, and what helps against it."""
    verdict = with_note(verdict, stressed.what)
    if len(stressed.culprits) != 1 or verdict.advice is None:
        return verdict
    row = next(row for row in plan.rows if row.name in stressed.culprits)
    given = flatten(resolved.values if resolved else {})
    fix = ""
    for each in row.fixes:
        key, _, value = each.partition("=")
        if str(given.get(key, "")).lower() != value:
            fix = each
            break
    edit = verdict.advice.edit
    if row.source:  # the program reads what was perturbed: edit a seed from it, or its last read
        reads = verdict.program.reads
        seed = next((each for each in reads if each.is_other_seed), None)
        last = next((each for each in reversed(reads) if each.what == row.source), None)
        found = seed or last
        edit = edit_at(found) if found else ""
    advice = replace(
        verdict.advice,
        cause=f"{row.finding[:1].upper()}{row.finding[1:]}: {stressed.what} ({row.action}).",
        knob=fix.partition("=")[0],
        setting=fix,
        edit=edit,
    )
    return replace(verdict, advice=advice)


def with_other_hash_seed(
    runner: Runner,
    plan: StressPlan,
    first: Run,
    setup: tuple[ResolvedProfile, RunEnvironment],
    *,
    closer: bool,
) -> tuple[Run, Verdict, StressResult]:
    """Run under another hash seed than that of the profile; all runs under the profile's agree."""
    resolved, environment = setup
    other = resolve(resolved, (f'env.PYTHONHASHSEED="{plan.other_hash_seed}"',))
    runner.say(f"with another {HASH_SEED} than that of the profile ...")
    run = runner.run(other, HASH_SEED.replace(" ", "-"), environment, (HASH_SEED,))
    verdict = runner.compare(first, run)
    stressed = StressResult((*plan.names, HASH_SEED), plan.skipped)
    if verdict.same:
        return run, verdict, stressed
    if closer:
        verdict = look_closer(runner, verdict, (setup, (other, environment)))
    advice = replace(
        verdict.advice or Advice("", "", "", ""),
        cause="The order of a set of strings, or a hash of text, decides the result. It differs "
        "when Python's hash seed does: `torchrepro run` fixes it, `+repro=` alone does not.",
        knob="",
        setting="",
        closer="",
        edit="sort it before it is used: sorted(...)",
    )
    what = (
        "it differs when Python's hash seed does: `torchrepro run` and `verify` fix it, "
        "`+repro=` alone does not"
    )
    stressed = replace(stressed, culprits=(HASH_SEED,), what=what)
    return run, with_note(replace(verdict, advice=advice), what), stressed


def escalate(
    runner: Runner,
    resolved: ResolvedProfile,
    verdict: Verdict,
    environments: Sequence[RunEnvironment],
) -> Iterator[EscalationTrial]:
    """Yield the levels above a profile as they are tried, up to one on which the runs are the same.

    Each level is chosen by the divergence that is left below it. On each the command runs once in
    each environment. The first run is compared with each of the others.
    """
    done: list[str] = []
    stricter = resolved
    overrides: tuple[str, ...] = ()
    while level := next_level(stricter.values, verdict.first, verdict.program, done):
        done.append(level.name)
        level = replace(level, overrides=(*overrides, *level.overrides))
        try:
            stricter = resolve(resolved, level.overrides)
        except ProfileError as refused:
            what = f"the profile does not take it: {refused}"
            yield EscalationTrial(level, same=False, what=what)
            continue
        overrides = level.overrides
        runs = []
        for position, environment in enumerate(environments, start=1):
            runner.say(f"with {level.name}, run {position} of {len(environments)} ...")
            name = f"level-{len(done)}-run-{position}"
            runs.append(runner.run(stricter, name, environment))
        if all_failed(runs):
            what = f"it ended with {status_in_words(runs[0].status)}: see {runs[0].log}"
        elif not any(run.recorded for run in runs):
            what = "nothing was recorded"
        else:
            verdicts = [runner.compare(runs[0], run) for run in runs[1:]]
            verdict = next((each for each in verdicts if not each.same), verdicts[0])
            what = headline(verdict)
        yield EscalationTrial(level, verdict.same, what)
        if verdict.same:
            return
