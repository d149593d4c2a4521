"""Following a divergence in a loader's batch into the dataset.

Two more runs record what every function of the program returns while a batch is loaded. Worker
processes are not recorded, so these runs load in the main process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torchrepro.trace.reader import read_run
from torchrepro.verdict.diagnosis import worker_init_edit, worker_init_sentence
from torchrepro.verdict.render import place
from torchrepro.verdict.value import Advice, Kind
from torchrepro.verification.perturbations import RunEnvironment, combined
from torchrepro.verification.process_perturbations import LOADING

if TYPE_CHECKING:
    from torchrepro.verdict.value import Divergence, Verdict
    from torchrepro.verification.result import Run
    from torchrepro.verification.runner import Runner, Setup

IN_MAIN = RunEnvironment(in_process={LOADING: True})
"""What has a run load in the main process."""

NO_WORKERS = "dataloader.num_workers"

_ONLY_IN_WORKERS = (
    "The batches differ when worker processes load them, and did not in two runs that loaded in "
    "the main process."
)


@dataclass(frozen=True, slots=True)
class LoaderWithWorkers:
    """A loader whose batches differ, as the trace of a run tells of it."""

    worker_init_fn: str
    """Name and place of the author's; empty without one."""
    iterable: bool
    """Whether its dataset is read in another order without workers, being one that has no indices.
    """
    seeded: bool
    """Whether torchrepro seeds loaders whose author seeded nothing."""

    @property
    def advice(self) -> Advice:
        """What to do where the batches differ only when workers load them."""
        return Advice(
            cause=f"{_ONLY_IN_WORKERS} {self._why}",
            knob=NO_WORKERS,
            setting=f"{NO_WORKERS}=0",
            closer="",
            edit=self._edit,
        )

    @property
    def _why(self) -> str:
        if self.worker_init_fn:
            return worker_init_sentence(self.worker_init_fn, seeded=self.seeded)
        depends = (
            "Something depends on the worker: its id, its pid, or which of them finishes first"
        )
        return f"{depends}."

    @property
    def _edit(self) -> str:
        return worker_init_edit(seeded=self.seeded) if self.worker_init_fn else ""


@dataclass(frozen=True, slots=True)
class Loading:
    """How two more runs load what differs, and what to say of it."""

    environment: RunEnvironment
    steps: tuple[int, int] | None
    """The steps that are recorded; None for all."""
    progress: str
    equal: str
    """The note where these runs are the same."""
    shown: str
    """The note where they diverge in the data."""
    advice: Advice | None = None
    """What to do where they are the same, if that says anything."""


def loading_of(verdict: Verdict) -> Loading | None:
    """Return how to follow a verdict into the dataset; None where it is not about loaded data."""
    first = verdict.first
    if first is None or first.phase != "data" or first.kind is not Kind.DATA:
        return None
    loader = _with_workers(verdict, first)
    until_there = 0, first.step + 1
    if loader is None:
        return Loading(
            RunEnvironment(),
            until_there,
            "what the dataset returns",
            "two more runs were the same there: it varies from run to run",
            "two more runs recorded what the dataset returned",
        )
    return Loading(
        IN_MAIN,
        None if loader.iterable else until_there,
        LOADING,
        "two more runs, which loaded in the main process, were the same",
        f"the workers' batches diverge {place(first)}; loading in the main process shows where",
        loader.advice,
    )


def _with_workers(verdict: Verdict, first: Divergence) -> LoaderWithWorkers | None:
    """Return the loader in whose batch two runs diverge, if it has worker processes."""
    for trace in read_run(verdict.left, records=False):
        for its in trace.meta.get("loaders") or () if trace.rank == first.rank else ():
            if its.get("where") == first.source and its.get("workers"):
                seeded = (trace.meta.get("knobs") or {}).get("dataloader.seeding") == "auto"
                init = its.get("worker_init_fn") or ""
                return LoaderWithWorkers(init, bool(its.get("iterable")), seeded)
    return None


def follow_into_dataset(
    runner: Runner, verdict: Verdict, setups: tuple[Setup, Setup], loading: Loading
) -> Verdict:
    """Return the verdict of two runs that record the loading, if they diverge in the data.

    The verdict stays, with what that means, if they are the same, diverge elsewhere, or fail.
    """
    request = replace(
        runner.request, steps=loading.steps, samples=True, detail=True, statistics=False
    )
    recorder = replace(runner, request=request, tolerance=None)
    runs: list[Run] = []
    for number, (resolved, environment) in enumerate(setups, start=1):
        runner.say(f"{loading.progress}, run {number} of {len(setups)} ...")
        there = combined([environment, loading.environment])
        runs.append(recorder.run(resolved, f"closer-{number}", there))
    found = recorder.compare(*runs) if all(run.recorded for run in runs) else None
    if found is not None and found.first is not None:
        return _diverged(verdict, loading, found, found.first)
    failed = next((run for run in runs if run.status or not run.recorded), None)
    if failed is not None:
        return with_note(
            verdict, f"a closer look showed nothing: the program failed, see {failed.log}"
        )
    return with_note(replace(verdict, advice=loading.advice or verdict.advice), loading.equal)


def _diverged(verdict: Verdict, loading: Loading, found: Verdict, first: Divergence) -> Verdict:
    """Return `found`, of the runs that recorded the loading, if they diverge in the data."""
    if first.phase != "data":
        return with_note(verdict, f"{loading.progress}: two more runs diverge {place(first)}")
    advice = found.advice and replace(found.advice, closer="")  # there is no more to see
    return with_note(replace(found, advice=advice), loading.shown)


def with_note(verdict: Verdict, note: str) -> Verdict:
    """Return a verdict with one more note, before the others."""
    return replace(verdict, notes=(note, *verdict.notes))
