"""The cause of changed results follows from a table of results, without any run."""

from __future__ import annotations

import pytest

from torchrepro.checking.causes import (
    BOTH,
    CODE,
    ENVIRONMENT,
    HERE,
    LOCK,
    OLD,
    OLD_UNTRACKED,
    OLD_VARIABLES,
    UNKNOWN,
    Table,
    cause,
    next_cell,
)
from torchrepro.lock.diff import Difference
from torchrepro.lock.locked_results import Numbers, StepResults

EXPORTED = Difference("environment", "OMP_NUM_THREADS", "2", "1")
DIGEST = Difference("other variables", "ACME_MODE", "sha256:1", "sha256:2")
NUMPY = Difference("versions", "numpy", "1.0", "2.0")
TORCH = Difference("versions", "torch", "2.12", "2.13")
FILE = Difference("data", "~/data.txt", "1", "2")
SET, NOT_SET = {"MODE": "set"}, {"MODE": "not set"}

CASES = {
    # The results of each cell beside a lock of "a", the differences, who, and words of the reason.
    "code": ("b a", {}, CODE, ""),
    "code and untracked files": ("b c a", {"has_untracked": True}, CODE, ""),
    "code, although settings differ": ("b a", {"settings": (TORCH, EXPORTED)}, CODE, ""),
    "nothing known": ("b b", {}, UNKNOWN, "nothing that the lock records differs"),
    "a variable that the program reads": ("b b", {"read": SET}, UNKNOWN, "the program reads MODE"),
    "a file": ("b b", {"dependencies": (FILE,)}, UNKNOWN, "different results here too"),
    "a file or torch": (
        *("b b", {"dependencies": (FILE,), "settings": (TORCH,)}),
        *(UNKNOWN, "different results here too"),
    ),
    "torch": ("b b", {"settings": (TORCH,), "read": SET}, ENVIRONMENT, ""),
    "torch and code": ("c b", {"settings": (TORCH,)}, BOTH, ""),
    "untracked files and torch": (
        *("b c b", {"settings": (TORCH,), "has_untracked": True}),
        *(ENVIRONMENT, ""),
    ),
    "numpy": ("b b", {"settings": (NUMPY,)}, ENVIRONMENT, ""),
    "numpy, or a variable that is not set": (
        *("b b", {"settings": (NUMPY,), "read": NOT_SET}),
        *(ENVIRONMENT, ""),
    ),
    "numpy, or a variable that is set": (
        *("b b", {"settings": (NUMPY,), "read": SET}),
        *(UNKNOWN, "may not be the cause"),
    ),
    "a digest": ("b b", {"settings": (DIGEST,), "read": SET}, UNKNOWN, "may not be the cause"),
    "a reverted variable": ("b b - a", {"settings": (EXPORTED,)}, ENVIRONMENT, ""),
    "a reverted variable, and code": ("c b - a", {"settings": (EXPORTED,)}, BOTH, ""),
    "a reverted variable that changes nothing": (
        *("b b - b", {"settings": (EXPORTED,)}),
        *(UNKNOWN, "may not be the cause"),
    ),
    "code, and something unknown": ("c b", {}, UNKNOWN, "and your code differs from both"),
}
CELLS = (HERE, OLD, OLD_UNTRACKED, OLD_VARIABLES)


def _numbers(name):
    return Numbers({0: StepResults((), name)}, "")


@pytest.mark.parametrize("case", CASES)
def test_the_cause_follows_from_the_table(case):
    """The cause, the reason and the suspects depend on equal results and known differences only.

    Each cell is asked for in turn, and no cell that the cause does not depend on.
    """
    letters, differences, who, why = CASES[case]
    known = dict(zip(CELLS, letters.split(), strict=False))
    results = {LOCK: _numbers("a"), HERE: _numbers(known.pop(HERE))}
    table = Table(results, **differences)
    while (cell := next_cell(table)) is not None:
        results[cell] = _numbers(known.pop(cell))
    answer = cause(table)

    assert [letter for letter in known.values() if letter != "-"] == []
    assert answer.who == who
    assert why in answer.why
    assert bool(answer.why) == (who == UNKNOWN)
    suspects = (*differences.get("dependencies", ()), *differences.get("settings", ()))
    assert answer.suspects == (() if who == CODE else suspects)
