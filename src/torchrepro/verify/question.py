"""What is asked of the runs of a command: the same bits, or the same numbers within a tolerance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrepro.verdict.asked import ALIGNED
from torchrepro.verdict.comparing import answer, tolerance_of

if TYPE_CHECKING:
    from torchrepro.verdict.value import Verdict


@dataclass(frozen=True, slots=True)
class Question:
    """Whether two runs are the same."""

    tolerance: tuple[float, float] | None = None
    """rtol and atol; None asks for the same bits."""

    @property
    def name(self) -> str:
        """``bits`` or ``tolerance``."""
        return "bits" if self.tolerance is None else "tolerance"

    @property
    def statistics(self) -> bool:
        """Whether the runs have to be recorded with statistics."""
        return self.tolerance is not None

    def ask(self, left: str, right: str) -> Verdict:
        """Compare two runs of the command."""
        return answer(left, right, self.tolerance, one_program=True)


def question_of(guarantee: str, rtol: float | None = None, atol: float | None = None) -> Question:
    """Return what is asked under a guarantee, which is empty without a profile.

    Only `aligned` asks for a tolerance; one that is given comes first.
    """
    given = tolerance_of(rtol, atol)
    return Question(ALIGNED if given is None and guarantee == "aligned" else given)
