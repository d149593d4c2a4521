"""What a difference says of what the program's functions returned while they loaded a batch."""

from __future__ import annotations

from torchrepro.trace.format import BETWEEN, RETURNED, SAMPLE
from torchrepro.verdict.value import Kind


def is_returned(op: str) -> bool:
    """Whether the record of `op` is of what a function of the program returned."""
    return op.endswith(RETURNED)


def explain_returned(op: str, left: str, right: str) -> tuple[Kind, str]:
    """Return how two records of one function differ, from what is known of both calls."""
    (sample, numbers), (other, others) = _call(left), _call(right)
    if sample != other:
        return Kind.DATA, f"another sample: index {sample or 'unknown'} and {other or 'unknown'}"
    same = f" for the same sample {sample}" if sample else ""
    if numbers != others:
        given = f"{numbers or 'none'} and {others or 'none'}"
        return Kind.DATA, f"{op} was given other numbers{same}: {given}"
    return Kind.DATA, f"{op} returned other values{same}"


def _call(argument: str) -> tuple[str, str]:
    """Return the sample that a call was made for and the numbers that it was given."""
    if not argument.startswith(SAMPLE):
        return "", argument
    sample, _, numbers = argument.removeprefix(SAMPLE).partition(BETWEEN)
    return sample, numbers
