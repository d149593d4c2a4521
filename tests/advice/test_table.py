"""The table of programs is complete, and its lines are there."""

import re
from collections import Counter
from pathlib import Path

import pytest

from .table import CAUSES, REPEATING, VARYING, Line, Repeating, Varying

PROGRAMS = Path(__file__).parent / "programs"
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
