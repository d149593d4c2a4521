"""The sentences of a verdict, in a terminal and on a page alike."""

from __future__ import annotations

from linecache import getline
from typing import TYPE_CHECKING

from torchrepro.messages import printable
from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrepro.verdict.value import Compared, Divergence, Element, Verdict

_NOT_WRITTEN = UNINITIALISED.hex()
MANY = 4
_WIDE = 96  # characters of a line of source that are shown
SAME_FOR_B = "then the same for B into a folder of its own, and `torchrepro compare` the two"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "data": "in the data",
    "collective": "in a collective",
}


def headline(verdict: Verdict) -> str:
    """Return the answer in one line."""
    if verdict.same:
        return f"the same: {certainty(verdict)}"
    if verdict.first is None:
        return "not the same"
    if verdict.first.kind is Kind.INCOMPARABLE:
        return f"not known to be the same: {Kind.INCOMPARABLE}"
    if verdict.first.kind is Kind.ENDED:
        return f"not the same: {Kind.ENDED}, {place(verdict.first)}"
    return f"not the same: they part {place(verdict.first)}"


def runs(verdict: Verdict) -> str:
    """Return which run is called A and which B."""
    return f"A = {printable(verdict.left)}, B = {printable(verdict.right)}"


def place(first: Divergence) -> str:
    """Return where the runs part: step, phase, module; the rank if it is not the only one."""
    phase = _PHASES.get(first.phase, f"in {first.phase}" if first.phase else "")
    of = f" of {printable(first.module)}" if first.module and first.phase in _PHASES else ""
    rank = f" on rank {first.rank}" if first.rank else ""
    return f"at step {first.step}{', ' * bool(phase)}{phase}{of}{rank}"


def certainty(verdict: Verdict) -> str:
    """Return how much was compared, and how closely."""
    how = "bit for bit"
    if verdict.tolerance is not None:
        rtol, atol = verdict.tolerance
        how = f"within rtol={rtol:g}, atol={atol:g} by mean, norm and range of each tensor"
    return f"{amount(verdict.compared)}, {how}"


def amount(compared: Compared) -> str:
    """Return how much was compared."""
    ranks = [counted(compared.ranks, "rank")] if compared.ranks != 1 else []
    level = "" if compared.level == "op" else f" (recorded at level {compared.level})"
    what = "op" if compared.level == "op" else "record"
    parts = [*ranks, counted(compared.steps, "step"), counted(compared.ops, what)]
    return ", ".join([*parts, size(compared.bytes)]) + level


def counted(number: int, thing: str) -> str:
    """Return a number and what is counted, as in ``1,204 ops``."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def are(number: int) -> str:
    """Return the verb for so many things."""
    return "is" if number == 1 else "are"


def size(number: float) -> str:
    """Return a number of bytes as one reads it."""
    for unit in _UNITS:
        if number < 1000 or unit == _UNITS[-1]:  # noqa: PLR2004 - the step from unit to unit
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.3g} {unit}"


def source_line(source: str) -> str:
    """Return the text of the line ``file:line`` without its indentation, if it can be read."""
    file, _, number = source.rpartition(":")
    text = getline(file, int(number)) if file and number.isdecimal() else ""
    return _cut(printable(text.strip()))


def source_excerpt(source: str, around: int = 2) -> list[tuple[int, str]]:
    """Return the lines around ``file:line`` with their numbers, if they can be read."""
    file, _, number = source.rpartition(":")
    if not file or not number.isdecimal():
        return []
    near = range(max(1, int(number) - around), int(number) + around + 1)
    lines = [(at, getline(file, at).rstrip("\n")) for at in near]
    return lines if source_line(source) else []


def _cut(text: str) -> str:
    return text if len(text) <= _WIDE else text[: _WIDE - 3] + "..."


def fingerprints(texts: Sequence[str]) -> tuple[str, ...]:
    """Return fingerprints as they are shown: memory that nothing wrote has none."""
    return tuple("(never written)" if text == _NOT_WRITTEN else text for text in texts)


def element(each: Element) -> str:
    """Return one wrong element."""
    index = f"[{', '.join(map(str, each.index))}]"
    return f"{each.tensor} {index}: A {each.left}, B {each.right}"


def distances(first: Divergence) -> list[str]:
    """Return how far apart the tensors are, one sentence each."""
    return [
        f"{each.tensor}: at most {_number(each.max_abs)} apart, relative {_number(each.max_rel)}"
        + (f", cosine {each.cosine:.9g}" if each.cosine is not None else "")
        for each in first.distances
    ]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def pair(left: Sequence[str] | str | None, right: Sequence[str] | str | None) -> str:
    """Return what both runs have, once if it is the same; ``-`` for a run that lacks it."""
    one, two = _one_text(left), _one_text(right)
    return one if one == two else f"A {one}   B {two}"


def _one_text(text: Sequence[str] | str | None) -> str:
    joined = text if isinstance(text, str) or text is None else " ".join(text)
    return _cut(printable(joined)) if joined else "-"


def aftermath(verdict: Verdict) -> str:
    """Return what became of the difference."""
    if not verdict.propagated and not verdict.independent:
        return "nothing later differs"
    parts = [f"{counted(verdict.propagated, 'record')} only pass it on"] * bool(verdict.propagated)
    alone = f"{counted(verdict.independent, 'record')} part on their own, from equal inputs"
    return "; ".join([*parts, *([alone] if verdict.independent else [])])


def modules(verdict: Verdict) -> str:
    """Return the modules in which records differ, in the order in which they first do."""
    shown = [
        f"{printable(name) or '(no module)'} ({number:,})"
        for name, number in verdict.by_module[:MANY]
    ]
    rest = len(verdict.by_module) - MANY
    return ", ".join([*shown, *([f"{rest} more"] if rest > 0 else [])])
