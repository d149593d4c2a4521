"""Drift: when it is detected, how it is reported, and that the guard leaves nothing behind."""

# ruff: noqa: PT012 - what raises is a step, or the end of the profile

import json
import os
import pickle
import sys
import threading
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch.optim import optimizer as optimizers

import torchrepro
from torchrepro.application import guard

BENCHMARK = "backends.cudnn.benchmark"
NCCL = "env.NCCL_ALGO"


def guarded(mode, *overrides):
    return torchrepro.apply("debug-strict", [f"guard={mode}", *overrides])


def flip():
    torch.backends.cudnn.benchmark = True


def test_a_change_that_is_restored_before_the_next_step_is_no_drift(step):
    """A flag that a context manager, or the program, changes for a moment is not reported."""
    with guarded("error") as applied:
        step()
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True):
            pass
        with torch.backends.mkldnn.flags(enabled=False, deterministic=False):
            pass
        flip()
        torch.backends.cudnn.benchmark = False
        os.environ["NCCL_ALGO"] = "^Tree"
        os.environ["NCCL_ALGO"] = "Ring"
        torch.use_deterministic_algorithms(False)
        torch.use_deterministic_algorithms(True)
        step()
        assert applied.report.drift == ()


def test_each_new_value_is_one_warning(step, capsys):
    """`warn` reports a knob with old and new value and step, once for every new value."""
    with guarded("warn"):
        step()
        line = sys._getframe().f_lineno + 1
        torch.backends.cudnn.benchmark = True
        for _ in range(3):
            step()
    assert capsys.readouterr().err == (
        f"torchrepro: drift: {BENCHMARK} was false, is true "
        f"(before step 1; set at {__file__}:{line})\n"
    )


@pytest.mark.parametrize("steps", [0, 2])
def test_every_step_and_the_end_of_a_drifted_run_raise(steps, step, world):
    """A program that catches the error cannot continue: the next step and the end raise it again.

    Every knob is restored before the end raises, and the error can be sent to another process.
    """
    before = world()
    with pytest.raises(torchrepro.DriftError) as caught, guarded("error") as applied:
        flip()
        for _ in range(steps):
            with pytest.raises(torchrepro.DriftError, match=BENCHMARK):
                step()

    assert before == world()
    assert not applied.active
    (drift,) = applied.report.drift
    when = "before step 0" if steps else "before any step"
    assert (drift.knob, drift.was, drift.now, drift.when) == (BENCHMARK, False, True, when)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.drift) == (str(caught.value), caught.value.drift)
    assert copy.drift == (drift,)


def test_a_report_during_the_run_is_current_and_complete(step):
    """`applied.report` reads again; table, notebook and JSON name the drift."""
    with guarded("warn") as applied:
        assert applied.report.drift == ()
        step()
        line = sys._getframe().f_lineno + 1
        os.environ["NCCL_ALGO"] = "^Tree"
        report = applied.report

    where = {"when": "after step 0", "where": f"{__file__}:{line}", "called": "", "by": ""}
    change = {"knob": NCCL, "was": "Ring", "now": "^Tree", **where, "moved_on": False}
    assert json.loads(json.dumps(report.to_json()["drift"])) == [change]
    assert "Ring -> ^Tree" in str(report)
    assert "Ring -&gt; ^Tree" in report._repr_html_()


def test_an_inner_profile_decides_while_it_is_active(step):
    """A change by an inner profile is no drift; after its end the outer profile decides again."""
    with pytest.raises(torchrepro.DriftError) as caught, guarded("error") as outer:
        with torchrepro.apply({"backends": {"cudnn": {"benchmark": True}}}) as inner:
            step()
            torch.backends.cudnn.benchmark = False
            with pytest.raises(torchrepro.DriftError):
                step()
            torch.backends.cudnn.benchmark = True
        step()
        assert outer.report.drift == ()
        flip()
        step()

    assert [(drift.was, drift.now) for drift in inner.report.drift] == [(True, False)]
    assert [(drift.was, drift.now) for drift in caught.value.drift] == [(False, True)]


def test_the_end_of_an_inner_profile_reports_no_drift_of_the_outer_one(capsys):
    """Drift from an outer profile is reported once, at the end of the outer profile."""
    with guarded("warn"):
        with torchrepro.apply({"backends": {"cudnn": {"benchmark_limit": 7}}}):
            flip()
        within = capsys.readouterr().err

    assert within == ""
    assert capsys.readouterr().err.count(f"drift: {BENCHMARK}") == 1


def test_a_profile_that_corrects_earlier_drift_does_not_hide_it():
    """The report of the outer profile keeps drift from before an inner profile was applied."""
    with torchrepro.apply("debug-strict", ["guard=none"]) as outer:
        torch.use_deterministic_algorithms(False)
        with torchrepro.apply("debug-strict", ["guard=none"]) as inner:
            before = inner.report
        torch.use_deterministic_algorithms(True)

    assert before.drift == ()
    assert "backends.torch.deterministic_algorithms" in {drift.knob for drift in outer.report.drift}
    assert "is active" not in outer.report.summary


def test_a_flag_that_torch_changes_along_is_no_drift_of_the_outer_profile(step):
    """A profile may change more knobs than it names; this is no drift of the outer profile."""
    with guarded("error", "backends.cudnn.deterministic=true") as outer:
        with torchrepro.apply({"backends": {"torch": {"deterministic_algorithms": "none"}}}):
            step()
        with torchrepro.apply("train-fast"):
            step()
        step()
        assert outer.report.drift == ()


def test_an_inner_profile_may_turn_the_guard_off(step):
    """`guard: none` within `guard: error` stops the guard until the inner profile ends."""
    with pytest.raises(torchrepro.DriftError), guarded("error"):
        with torchrepro.apply({"guard": "none"}):
            flip()
            step()
        step()


def test_steps_of_other_threads_are_checked_without_false_alarms(step, in_thread):
    """A thread's own number of threads is no drift at its step; a changed flag is."""
    in_thread(torch.set_num_threads, 3)
    applied = guarded("error", "backends.cpu.num_threads=1")
    in_thread(step)
    in_thread(flip)
    with pytest.raises(torchrepro.DriftError) as caught:
        in_thread(step)
    with pytest.raises(torchrepro.DriftError):
        applied.restore()

    assert [drift.knob for drift in caught.value.drift] == [BENCHMARK]


def _watched_attributes():
    """Return all attributes that the guard wraps."""
    setters = [vars(owner).get(name) for owner, name in guard.setters()]
    hooks = list(optimizers._global_optimizer_pre_hooks.values())
    kept = [*guard.guards, *guard._watched]
    return [*setters, os.putenv, os.unsetenv, *hooks, *kept]


@pytest.mark.parametrize("mode", ["null", "none", "warn", "error"])
def test_only_a_guard_adds_hooks_and_wrappers(mode, step):
    """Without a guard there is no hook, and no writer is wrapped.

    After guarded profiles, also nested and drifted ones, torch has its own functions again.
    """
    before = _watched_attributes()
    with suppress(torchrepro.DriftError), guarded(mode), guarded(mode):
        during, hooks = _watched_attributes(), optimizers._global_optimizer_pre_hooks.values()
        added = [hook for hook in hooks if hook.__module__ == "torchrepro.application.guard"]
        flip()
        step()

    assert ([each for each in during if each in before] == before) == (mode in ("null", "none"))
    assert len(added) == (mode in ("warn", "error"))
    assert _watched_attributes() == before


def test_a_line_is_reported_only_for_its_own_write(step):
    """A new guard does not report writes that an earlier guard observed."""
    with pytest.raises(torchrepro.DriftError), guarded("error"):
        flip()
    with guarded("warn") as outer:
        with pytest.raises(torchrepro.DriftError), guarded("error"):
            flip()
        flip()
        step()

    line = flip.__code__.co_firstlineno + 1
    assert [drift.where for drift in outer.report.drift] == [f"{__file__}:{line}"]


def test_a_line_that_an_ended_guard_observed_is_not_reported_for_a_later_write():
    """After a guard has ended, writes are not observed, so the report has no line for them."""
    with torchrepro.apply("debug-strict", ["guard=none"]) as outer:
        with torchrepro.apply({"guard": "warn"}):
            flip()
        torch.backends.cudnn.benchmark = False
        flip()
        report = outer.report

    assert [(drift.knob, drift.where) for drift in report.drift] == [(BENCHMARK, "")]


def test_a_write_in_another_thread_is_not_blamed_for_a_knob_of_this_one(step, in_thread):
    """A thread is not reported as the writer of a knob that only reads differently in it."""

    def writes_something_else():
        os.environ["UNRELATED"] = "1"
        del os.environ["UNRELATED"]

    in_thread(torch.set_num_threads, 1)
    with (
        pytest.raises(torchrepro.DriftError) as caught,
        guarded("error", "backends.cpu.num_threads=2"),
    ):
        in_thread(writes_something_else)
        line = sys._getframe().f_lineno + 1
        torch.set_num_threads(1)
        step()

    assert [drift.where for drift in caught.value.drift] == [f"{__file__}:{line}"]


def test_other_profiles_do_not_change_which_line_is_reported():
    """The line that changed a knob is reported, also if another thread applies profiles."""
    ended = threading.Event()

    def writes_something_else():
        while not ended.is_set():
            os.environ["UNRELATED"] = "1"
        del os.environ["UNRELATED"]

    before = sys.getswitchinterval()
    thread = threading.Thread(target=writes_something_else)
    with pytest.raises(torchrepro.DriftError) as caught, guarded("error"):
        line = sys._getframe().f_lineno + 1
        torch.backends.cudnn.benchmark = True
        sys.setswitchinterval(1e-6)
        thread.start()
        try:
            for _ in range(30):
                with torchrepro.apply({"backends": {"cudnn": {"deterministic": True}}}):
                    pass
        finally:
            ended.set()
            thread.join()
            sys.setswitchinterval(before)

    assert [drift.where for drift in caught.value.drift] == [f"{__file__}:{line}"]


def test_another_wrapper_around_ours_stays_and_reports_nothing(monkeypatch):
    """A program's wrapper of a watched setter stays; ours within only calls the original then."""
    told: list[str] = []
    watch = guard.watch_writers(lambda: told.append("written"))
    monkeypatch.setattr(torch._C, "_set_cudnn_benchmark", partial(torch._C._set_cudnn_benchmark))
    torch._C._set_cudnn_benchmark(False)
    watch.close()
    torch._C._set_cudnn_benchmark(True)

    assert told == ["written"]
    assert torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize(
    ("leaves", "ends_with"),
    [
        (SystemExit(0), torchrepro.DriftError),
        (SystemExit(5), SystemExit),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
    ids=repr,
)
def test_drift_hides_no_failure_and_success_hides_no_drift(leaves, ends_with, capsys):
    """`sys.exit(0)` within the block raises the drift, like the end of the block.

    If the program already fails with another error, drift is reported and not raised.
    """
    with pytest.raises(ends_with), guarded("error"):
        flip()
        raise leaves

    is_said = f"{BENCHMARK} = true" in capsys.readouterr().err
    assert is_said == (ends_with is not torchrepro.DriftError)


def test_a_write_that_torch_refuses_raises_as_without_a_guard():
    """A wrapped setter raises the setter's error, and has its name."""
    with guarded("error"):
        with pytest.raises((TypeError, RuntimeError)):
            torch.backends.cudnn.benchmark = "yes"  # type: ignore[assignment]
        assert torch._C._set_cudnn_benchmark.__name__ == "_set_cudnn_benchmark"


@pytest.mark.parametrize("locked", [True, False])
def test_a_lock_guards_the_number_of_threads(locked, monkeypatch):
    """Another number is drift under `run --lock` although no profile names it."""
    if locked:
        monkeypatch.setenv(guard.LOCKED, "1")
    before = torch.get_num_threads()
    try:
        with torchrepro.apply("seed-only") as applied:
            torch.set_num_threads(before + 1)
            drift = [(each.knob, each.was, each.now) for each in applied.report.drift]
    finally:
        torch.set_num_threads(before)

    assert drift == [("backends.cpu.num_threads", before, before + 1)] * locked
