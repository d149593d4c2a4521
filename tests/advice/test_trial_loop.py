"""The loop of trials keeps its limit of runs, trusts no agreement by chance, and concludes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchrepro.advice.trial_loop import Conclusion, Trial, TrialLoop
from torchrepro.trace.request import RecordingRequest
from torchrepro.verdict.value import Cause, Compared, Divergence, Edit, Kind, Verdict
from torchrepro.verification.leftovers import DivergedRuns, Leftovers
from torchrepro.verification.perturbations import RunEnvironment
from torchrepro.verification.result import Run
from torchrepro.verification.runner import Runner, RunRequest

PINNED = Trial(change="the clock pinned", resolved=None, runs=2)
CONCLUSION = Conclusion(
    cause=Cause("The clock.", "clock"), command="torchrepro verify", tried="the same"
)


def verdict_of(*, same: bool) -> Verdict:
    compared = Compared(ranks=1, steps=3, ops=9, bytes=9, level="op")
    first = None if same else Divergence(0, 3, kind=Kind.OUTPUTS)
    return Verdict(same=same, left="A", right="B", compared=compared, first=first)


def run_of(name: str, result: str) -> Run:
    return Run(name, f"/{name}", f"/{name}.log", 0, 1.0, 3, recorded=True, perturbed=(result,))


@dataclass(frozen=True, slots=True)
class FakeRunner(Runner):
    """Starts no process: a run has the result that `results` has for the start of its name."""

    results: Mapping[str, str] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)

    def run(self, resolved: Any, name: str, environment: Any, perturbed: Any = ()) -> Run:
        self.started.append(name)
        return run_of(name, self.results[name.rpartition("-")[0]])

    def compare(self, first: Run, second: Run) -> Verdict:
        return verdict_of(same=first.perturbed == second.perturbed)


def diverged(folder: Path, **results: str) -> tuple[DivergedRuns, list[str]]:
    by_name = {name.replace("_", "-"): result for name, result in results.items()}
    request = RecordingRequest("", "op", None, ())
    runner = FakeRunner(("true",), folder, request, None, lambda text: None, results=by_name)
    between = run_of("run-1", "A"), run_of("run-2", "B")
    runs = DivergedRuns(
        request=RunRequest(("true",)),
        runner=runner,
        environments=(RunEnvironment(), RunEnvironment()),
        verdict=verdict_of(same=False),
        meta={},
        leftovers=Leftovers(None, None, between, ()),  # type: ignore[arg-type]
    )
    return runs, runner.started


def test_a_trial_that_agrees_ends_the_script_with_what_it_explains(tmp_path):
    """No later trial is run, and the conclusion is in the advice."""
    runs, started = diverged(tmp_path, trial_1="C")

    def script():
        yield replace(PINNED, explains=CONCLUSION)
        yield PINNED

    verdict, tried = TrialLoop(runs).conclude(script())

    assert (verdict.advice.cause, verdict.advice.command) == ("The clock.", "torchrepro verify")
    assert [(trial.same, trial.runs) for trial in tried] == [(True, 2)]
    assert started == ["trial-1-1", "trial-1-2"]


def test_an_explanation_may_be_a_script_of_further_trials(tmp_path):
    """The further trials replace the script, and conclude if none of them agrees."""
    runs, started = diverged(tmp_path, trial_1="C", trial_2="C")

    def further():
        outcome = yield PINNED
        return CONCLUSION if outcome.same else None

    def script():
        yield replace(PINNED, explains=further())
        yield PINNED

    verdict, _ = TrialLoop(runs).conclude(script())

    assert verdict.advice.cause == "The clock."
    assert started == ["trial-1-1", "trial-1-2", "trial-2-1", "trial-2-2"]


def test_without_a_conclusion_the_verdict_stays(tmp_path):
    """A trial that is refused is listed with the reason and without runs."""
    runs, started = diverged(tmp_path)

    def script():
        yield replace(PINNED, refused="no such profile", explains=CONCLUSION)

    verdict, tried = TrialLoop(runs).conclude(script())

    assert verdict == runs.verdict
    assert [(trial.same, trial.runs, trial.answer) for trial in tried] == [
        (False, 0, "no such profile")
    ]
    assert started == []


def test_no_trial_starts_whose_runs_exceed_the_limit(tmp_path):
    """Neither does it make the copy of the folder that its edit needs."""
    runs, started = diverged(tmp_path, trial_1="C")
    edit = Edit(f"{tmp_path}/nowhere.py:1", "a", "b")

    def script():
        yield PINNED
        yield replace(PINNED, edit=edit)
        yield PINNED

    _, tried = TrialLoop(runs, most=3).conclude(script())

    assert len(tried) == 1
    assert len(started) == 2


def test_an_agreement_that_unchanged_runs_share_shows_nothing(tmp_path):
    """If most runs without the change agree with it, it explains nothing, and no trial follows."""
    runs, started = diverged(tmp_path, trial_1="A", unchanged="A")

    def script():
        yield replace(PINNED, is_checked=True, explains=CONCLUSION)
        yield replace(PINNED, explains=CONCLUSION)

    verdict, tried = TrialLoop(runs).conclude(script())

    assert verdict == runs.verdict
    assert [trial.same for trial in tried] == [False, True]
    assert "by chance" in tried[0].answer
    assert tried[1].answer == "most are the same"
    assert started == ["trial-1-1", "trial-1-2", "unchanged-1", "unchanged-2"]


def test_an_agreement_that_unchanged_runs_do_not_share_counts(tmp_path):
    """Most runs without the change differ from the runs with it."""
    runs, _ = diverged(tmp_path, trial_1="A", unchanged="B")

    def script():
        yield replace(PINNED, is_checked=True, explains=CONCLUSION)

    verdict, tried = TrialLoop(runs).conclude(script())

    assert verdict.advice.cause == "The clock."
    assert [trial.same for trial in tried] == [True, False]
    assert tried[1].answer == "most differ"
