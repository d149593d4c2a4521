"""`verify` gives tested advice: the true cause, the user's line, and a fix that works."""

from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from torchrepro.verdict.value import Edit

from .scoring import (
    PROGRAMS,
    Answer,
    markdown,
    names_cause,
    plain_results,
    read_answer,
    score_all,
    total,
)
from .table import CAUSES, REPEATING, VARYING, Repeating, Varying

ANSWER = """\
not the same: diverged at step 0
  where    train.py:12   loss = net(x)
  cause    The clock: time.time at train.py:4,
           or so.
  edit     train.py:4   torch.manual_seed(int(time.time()))
  becomes  torch.manual_seed(1234)
  try
    torchrepro verify seed-only -- python train.py
  tried  the same in 3 runs
  runs        2 runs, run-2 differs from run-1
"""
GUESSES = "A generator of its own, the clock, an address, the order of files, the order of a set."
ROWS: list[Varying | Repeating] = [*VARYING, *REPEATING]


def test_the_scorer_reads_an_answer() -> None:
    """Its lines, its cause, and the edit and the command that it prints."""
    edit = Edit("train.py:4", "torch.manual_seed(int(time.time()))", "torch.manual_seed(1234)")

    assert read_answer(ANSWER) == Answer(
        lines=(("train.py", 12), ("train.py", 4), ("train.py", 4)),
        cause="The clock: time.time at train.py:4, or so.",
        edit=edit,
        command="torchrepro verify seed-only -- python train.py",
    )
    assert read_answer("the same: 3 steps") == Answer((), "", None, None)


def test_a_list_of_guesses_does_not_score_as_a_cause() -> None:
    """One cause scores, and the same cause among others does not."""
    (row,) = (row for row in VARYING if row.name == "sentiment_lstm")

    assert names_cause(read_answer(ANSWER).cause, row)
    assert not names_cause(GUESSES, row)


def test_the_table_matches_the_programs() -> None:
    """Each program has a row; each line that a row names is in its file once."""
    lines = [(row.name, line) for row in VARYING for line in row.lines]
    lines += [(row.name, line) for row in REPEATING for line in row.differs]

    assert sorted(row.name for row in ROWS) == sorted(path.name for path in PROGRAMS.iterdir())
    for name, line in lines:
        text = (PROGRAMS / name / line.file).read_text(encoding="utf-8")
        stripped = [each.strip() for each in text.splitlines()]
        assert stripped.count(line.text) == 1, (name, line)


def test_there_are_as_many_programs_as_required() -> None:
    """40 programs vary, at least three for each cause; 20 repeat, 3 of them with other ops."""
    causes = Counter(row.causes[0] for row in VARYING)

    assert (len(VARYING), len(REPEATING)) == (40, 20)
    assert {cause for row in VARYING for cause in row.causes} == set(causes) == set(CAUSES)
    assert min(causes.values()) >= 3
    assert sum(bool(row.differs) for row in REPEATING) == 3


@pytest.mark.benchmark
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_program_repeats_or_does_not(row: Varying | Repeating, tmp_path: Path) -> None:
    """Three runs in one folder have one result, or two of five runs differ."""
    results = plain_results(row, tmp_path)

    if isinstance(row, Repeating):
        assert len(set(islice(results, 3))) == 1
    else:
        first = next(results)
        assert any(result != first for result in islice(results, 4))


@pytest.mark.benchmark
def test_advice_of_verify_is_correct(tmp_path: Path) -> None:
    """For 40 programs: the line, the cause, and a fix that works; no false alarm."""
    results = score_all(tmp_path)

    print(markdown(results))
    sums = total(results)
    assert sums.alarms == ()
    assert sums.false == ()
    assert sums.lines >= 36
    assert sums.causes >= 38
    assert sums.remedies >= 34
