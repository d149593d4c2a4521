"""What `verify` advises was tried: the cause that is there, the user's line, and what works."""

import re
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
from .table import CAUSES, REPEATING, VARYING, Line, Repeating, Varying

SHORT = """\
not the same: diverged at step 0
  where    train.py:12   loss = net(x)
  cause    The clock: time.time at train.py:4.
  edit     train.py:4   torch.manual_seed(int(time.time()))
  becomes  torch.manual_seed(1234)
  try
    torchrepro verify seed-only -- python train.py
  tried  the same in 3 runs
  runs        2 runs, run-2 differs from run-1
"""
LONG = """\
not the same: diverged at step 0, in the forward pass
  source        /tmp/one/train.py:22   paths = torch.from_numpy(np.stack(...
  likely cause  The program made this tensor from other values: a generator of its own, the clock,
                an address, the order of files, the order of a set.
  try           seed=1234   (torchrepro explain seed)
"""


def test_an_answer_is_read() -> None:
    """Its lines, its cause, and the edit and the command that it prints."""
    edit = Edit("train.py:4", "torch.manual_seed(int(time.time()))", "torch.manual_seed(1234)")

    answer = read_answer(SHORT)

    assert answer == Answer(
        lines=(("train.py", 12), ("train.py", 4), ("train.py", 4)),
        cause="The clock: time.time at train.py:4.",
        edit=edit,
        command="torchrepro verify seed-only -- python train.py",
        prose=(),
    )


def test_what_cannot_be_typed_is_no_command() -> None:
    """A setting after `try` is prose: nobody can type it."""
    answer = read_answer(LONG)

    assert (answer.edit, answer.command) == (None, None)
    assert answer.prose == ("seed=1234   (torchrepro explain seed)",)


def test_a_list_of_guesses_names_no_cause() -> None:
    """One cause counts, and the same among others does not."""
    (row,) = (row for row in VARYING if row.name == "sentiment_lstm")

    assert names_cause(read_answer(SHORT).cause, row)
    assert not names_cause(read_answer(LONG).cause, row)


LINES = [(row.name, line) for row in VARYING for line in row.lines] + [
    (row.name, line) for row in REPEATING for line in row.differs
]


@pytest.mark.parametrize(("name", "line"), LINES, ids=[f"{n}-{li.file}" for n, li in LINES])
def test_a_line_of_the_table_is_in_its_program_once(name: str, line: Line) -> None:
    """Each line that a row names stands once in its file."""
    text = (PROGRAMS / name / line.file).read_text(encoding="utf-8")

    stripped = [each.strip() for each in text.splitlines()]

    assert stripped.count(line.text) == 1


def test_each_program_has_a_row() -> None:
    """No folder is without a row, and no row without a folder."""
    rows: list[Varying | Repeating] = [*VARYING, *REPEATING]

    names = sorted(row.name for row in rows)

    assert names == sorted(path.name for path in PROGRAMS.iterdir())


def test_the_programs_are_as_many_as_asked_for() -> None:
    """40 programs vary, at least three for each cause; 20 repeat, 3 of them with other ops."""
    causes = Counter(row.causes[0] for row in VARYING)

    assert (len(VARYING), len(REPEATING)) == (40, 20)
    assert set(causes) == set(CAUSES)
    assert min(causes.values()) >= 3
    assert sum(bool(row.differs) for row in REPEATING) == 3


def test_what_is_expected_can_be_read() -> None:
    """Each cause is a pattern, and the further causes of a row are causes."""
    for pattern in CAUSES.values():
        re.compile(pattern)
    assert {cause for row in VARYING for cause in row.causes} <= set(CAUSES)


@pytest.mark.benchmark
@pytest.mark.parametrize("row", VARYING, ids=lambda row: row.name)
def test_a_program_does_not_repeat(row: Varying, tmp_path: Path) -> None:
    """By itself it has a second result within five runs in one folder, and mostly at once."""
    results = plain_results(row, tmp_path)

    first = next(results)

    assert any(result != first for result in islice(results, 4))


@pytest.mark.benchmark
@pytest.mark.parametrize("row", REPEATING, ids=lambda row: row.name)
def test_a_program_repeats(row: Repeating, tmp_path: Path) -> None:
    """By itself, three runs in one folder have one result."""
    assert len(set(islice(plain_results(row, tmp_path), 3))) == 1


@pytest.mark.benchmark
def test_what_verify_advises_was_tried(tmp_path: Path) -> None:
    """Of 40 programs the line, the cause and what helps; nothing that does not, and no alarm."""
    results = score_all(tmp_path)

    print(markdown(results))
    sums = total(results)
    assert sums.alarms == ()
    assert sums.false == ()
    assert sums.lines >= 36
    assert sums.causes >= 38
    assert sums.remedies >= 34
