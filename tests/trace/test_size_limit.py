"""Recordings that may take so many bytes on disk."""

import math
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrepro
from torchrepro import TraceError
from torchrepro.messages import shown, size
from torchrepro.trace.reader import Trace, read_run
from torchrepro.trace.request import SMALLEST, bytes_of

from .conftest import Net, weights_trained

STEPS = 150
MB = 10**6


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _train(before_step: Callable[[int], object] = lambda _: None, steps: int = STEPS) -> Any:
    return weights_trained(steps, before_step)


def _read(folder: Path) -> Trace:
    (trace,) = read_run(folder)
    return trace


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make this process the second of so many ranks."""

    def make(count: int) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", str(count))

    return make


@pytest.mark.parametrize(
    ("most", "asked", "count"),
    [
        (MB, {}, 2),
        (MB, {"every": 3}, 2),
        (3 * MB // 4, {}, 4),
        (MB, {"keep": ["layers.0*"], "statistics": True}, 2),
        (2 * MB, {"level": "step"}, 2),
        (700_000, {"level": "module", "every": 2}, 2),
    ],
)
def test_a_recording_never_takes_more_than_its_share(
    tmp_path: Path,
    most: int,
    asked: dict[str, object],
    count: int,
    ranks: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder is within the size after every step; the records left are of the last steps."""
    folder, sizes = tmp_path / "run", []
    steps = STEPS if asked.get("level") != "step" else 500

    ranks(count)
    with torchrepro.record(folder, max_size=count * most, **asked):
        weights = _train(lambda _: sizes.append(_bytes_in(folder)), steps)

    assert max(sizes) <= most
    assert _bytes_in(folder) <= most
    assert weights == _train(steps=steps)
    trace = _read(folder)
    for level in ("op", "module", "step"):
        rows = [row.dropped for row in trace.steps.values() if row.level == level]
        assert rows == sorted(rows, reverse=True)
    dropped = [step for step, row in trace.steps.items() if row.dropped]
    assert (trace.meta["dropped"], trace.meta["max_size"]) == (len(dropped), count * most)
    assert bool(dropped) == ("dropped: the records of" in capsys.readouterr().err)
    for step, row in trace.steps.items():
        assert len(trace.records(step)) == (0 if row.dropped else row.records)
        assert not row.finished or (row.parameters and row.gradients)


@pytest.mark.parametrize(("every", "most"), [(1, MB), (3, 700_000), (50, 480_000)])
def test_the_oldest_steps_in_full_are_dropped_first_and_the_last_two_at_the_end(
    tmp_path: Path, every: int, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No smaller step is dropped while more than two in full are left; the end says what is."""
    folder = tmp_path / "run"
    with torchrepro.record(folder, max_size=most, every=every):
        _train(steps=450)

    steps = {step: row for step, row in _read(folder).steps.items() if row.finished}
    in_full = [step for step, row in steps.items() if row.level == "op" and not row.dropped]
    others = [step for step, row in steps.items() if row.level == "step"]
    dropped = [step for step, row in steps.items() if row.dropped]
    lost = [step for step in others if steps[step].dropped]
    assert in_full == [step for step in steps if step % every == 0][-len(in_full) :]
    assert len(in_full) >= 2
    assert len(in_full) == 2 or not lost
    assert bool(lost) == (every == 50)
    said = capsys.readouterr().err
    assert f"takes {size(_bytes_in(folder))} of {size(most)}" in said
    assert f"kept in full: {_in_words(in_full)};" in said
    assert f"dropped: the records of {_in_words(dropped)};" in said
    assert ("kept at level step" in said) == (every > 1)


def _in_words(steps: list[int]) -> str:
    if len(steps) == 2:
        return f"steps {steps[0]} and {steps[1]}"
    ends = f"steps {steps[0]} to {steps[-1]}"
    return ends if len(steps) > steps[-1] - steps[0] else f"{len(steps)} of the {ends}"


def test_a_size_without_room_for_a_step_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: Callable[[int], None]
) -> None:
    """It is said when it happens and at the end, with what a step takes and what it may take."""
    ranks(2)
    with torchrepro.record(tmp_path / "run", max_size=600_000, keep=["layers*"], statistics=True):
        _train(steps=40)
    said = capsys.readouterr().err

    assert all(row.dropped for row in _read(tmp_path / "run").steps.values())
    assert len(re.findall(r"a step takes up to [\d.]+ kB: 300 kB \(its share of 600 kB", said)) == 2
    assert said.count("for 2 ranks) has room for none in full") == 2
    assert "kept in full: none" in said


def test_steps_that_grow_stay_within_the_size(tmp_path: Path) -> None:
    """Where each step takes more than the one before it, the room of old ones is given back."""
    folder, sizes = tmp_path / "run", []
    with torchrepro.record(folder, max_size=2 * MB):
        for step in range(120):
            tensor = torch.ones(3)
            for _ in range(20 * step):
                tensor = tensor + 1
            torchrepro.end_step()
            sizes.append(_bytes_in(folder))

    assert max(sizes) <= 2 * MB
    rows = list(_read(folder).steps.values())
    assert [row.dropped for row in rows] == sorted((row.dropped for row in rows), reverse=True)
    assert any(row.dropped for row in rows)
    assert not rows[-1].dropped


def test_a_size_that_cannot_be_held_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on, without records, and every step is there."""
    with torchrepro.record(tmp_path / "run", max_size=200_000, level="step"):
        _train(steps=400)

    assert capsys.readouterr().err.count("more than 200 kB: no records are left") == 1
    trace = _read(tmp_path / "run")
    assert trace.ended_steps == 400
    assert all(row.dropped for row in trace.steps.values())


def test_dropped_steps_are_compared_by_what_is_left_of_them(tmp_path: Path) -> None:
    """A fault in one of them is in that step; the answer says what was compared in which way."""
    for name, at, asked in (
        ("whole", -1, {}),
        ("within", -1, {"max_size": MB * 3 // 4}),
        ("faulty", 20, {"max_size": MB * 3 // 4}),
        ("late", STEPS - 5, {"max_size": MB * 3 // 4}),
    ):
        with torchrepro.record(tmp_path / name, **asked):
            _train(lambda step, at=at: step == at and torch.randn(1))
    runs = {name: tmp_path / name for name in ("whole", "within", "faulty", "late")}

    same = torchrepro.compare(runs["whole"], runs["within"])
    early = torchrepro.compare(runs["within"], runs["faulty"])
    late = torchrepro.compare(runs["within"], runs["late"])

    assert same.same
    rows = _read(runs["within"]).steps.values()
    left = sum(row.finished and not row.dropped for row in rows)
    state = "by parameters, gradients and losses"
    assert same.compared.by == (("op by op", left), (state, STEPS - left))
    dropped = (
        f"B dropped the records of {STEPS - left} steps (0 to {STEPS - left - 1}), to stay within"
    )
    assert any(note.startswith(f"{dropped} 750 kB: ") for note in same.notes)
    assert early.first is not None
    assert (early.first.step, early.first.op) == (20, "loss")
    assert early.agreed is not None
    assert (early.agreed.step, early.agreed.by, early.agreed.in_full) == (19, state, None)
    assert early.advice is not None
    assert "steps=(19, 21)" in early.advice.closer
    assert late.first is not None
    assert late.first.step == STEPS - 5
    assert late.first.op == "aten::randn"


def test_a_killed_recording_is_whole_and_within_its_size(tmp_path: Path) -> None:
    """Whenever it is killed, steps without records say so, and all others have theirs."""
    _train(steps=1)
    for step in (3, 40, 41, 42, 100):
        folder = tmp_path / str(step)
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            with torchrepro.record(folder, max_size=MB, every=2):
                _train(lambda at, end=step + 1: at == end and os.kill(os.getpid(), signal.SIGKILL))
        os.waitpid(child, 0)

        assert _bytes_in(folder) <= MB
        trace = _read(folder)
        assert trace.is_truncated
        assert trace.ended_steps == step + 1
        assert all(row.dropped or trace.records(number) for number, row in trace.steps.items())


def test_a_trace_without_an_op_has_room_in_every_size_that_is_taken(
    tmp_path: Path, ranks: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """It stays within the smallest size, whose share of each rank is held to the same."""
    folder, sizes = tmp_path / "run", []
    with torchrepro.record(folder, max_size=SMALLEST):
        for _ in range(9):
            torchrepro.end_step()
            sizes.append(_bytes_in(folder))

    assert SMALLEST / 4 < max(sizes) <= SMALLEST
    assert capsys.readouterr().err == ""
    ranks(3)
    with (
        pytest.raises(TraceError, match=r"each of 3 ranks has 200 kB of it(.|\n)*600 kB or more"),
        torchrepro.record(tmp_path / "ranks", max_size=3 * SMALLEST - 1),
    ):
        pass


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        *((500_000, 500_000), ("500000", 500_000), ("500MB", 500 * MB), ("2GiB", 2 << 30)),
        *(("1500.5 kB", 1_500_500), ("999TB", 999 * 10**12), ("700000 B", 700_000)),
        *(("500M", 500 * MB), ("2g", 2 * 10**9), ("2Gi", 2 << 30)),
    ],
)
def test_a_size_is_written_as_people_write_it(written: str | int, meant: int) -> None:
    """Units of a thousand and of 1024 are told apart, in letters of any case, with a B or not."""
    assert bytes_of(written) == meant


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *((each, "as in 500MB") for each in ("", "MB", "500X", "-5", True, "1e9", "5 apples")),
        *((each, "not a size") for each in ("9" * 400, 10**400, "1000TB", math.nan, math.inf)),
        *((each, "an empty trace takes up to 200 kB") for each in (0, "0MB", "199kB")),
        *((each, f"did you mean: {each}MB") for each in (10, 0.5, "1")),
    ],
)
def test_another_size_is_refused(tmp_path: Path, wrong: object, said: str) -> None:
    """The error names the key, the value as it was given, and what is legal."""
    with (
        pytest.raises(TraceError, match="max_size = ") as caught,
        torchrepro.record(tmp_path / "run", max_size=wrong),
    ):
        pass
    assert said in str(caught.value)
    assert shown(wrong)[:40] in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_step_says_at_which_level_it_was_recorded(tmp_path: Path) -> None:
    """Where steps end on other threads, no step is called recorded in full that was not."""
    with torchrepro.record(tmp_path / "run", every=2):
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(9):
            net(torch.ones(2, 4)).sum().backward()
            if step % 3:
                optimizer.step()
            else:
                thread = threading.Thread(target=optimizer.step)
                thread.start()
                thread.join()

    trace = _read(tmp_path / "run")
    for step, row in trace.steps.items():
        forward = [one for one in trace.records(step) if trace.sites[one.site].phase == "forward"]
        assert (row.level == "op") == bool(forward), step
    assert {row.level for row in trace.steps.values()} == {"op", "step"}
