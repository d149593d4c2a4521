"""Renders a verdict: its sentences, the answer in a terminal, and JSON."""

from __future__ import annotations

from itertools import takewhile
from linecache import getline
from shlex import quote
from typing import TYPE_CHECKING, Any

from torchrepro.console import height, listing
from torchrepro.messages import printable, shortened, shown, size
from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.value import BOTH_CUT, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchrepro.console import Part
    from torchrepro.verdict.diagnosis import EscalationLevel
    from torchrepro.verdict.value import Compared, Divergence, Element, Verdict

_NOT_WRITTEN, NEVER_WRITTEN = UNINITIALISED.hex(), "(never written)"
_WIDE = 72  # characters of a line of source, of shapes or arguments that are shown
_AROUND = 16  # characters before the first one in which two long texts differ
_LONG, _OVERRIDES = 180, 90  # characters of a sentence, and of overrides, that are shown
_HEX = 8  # digits of a fingerprint that are shown
SAME_FOR_B = "the same for B, then `torchrepro compare` the two folders"

OUTSIDE = "outside of any step"
"""Where all is that a program without an optimizer does."""

_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "data": "in the data",
    "collective": "in a collective",
}

_ELEMENTS, _SETTINGS, _NOTES, _MODULES = 2, 3, 3, 4  # how many of each a terminal shows

COLUMNS, LINES = 80, 25
"""The terminal on which an answer fits."""

Rows = list[tuple[str, str]]

_GAP = ("", "")
_LEAST_NEEDED = (
    *("element", "outputs", "distance", "note", "note", "differing", "differing"),
    *("", "read", "promised", "afterwards", "differing", "next level", "wrote", "element"),
    *("compared", "note", "look closer", "arguments", "what", "differing", "try"),
)
"""Rows that are left out, the first ones first, where an answer is too long for a terminal.

The last row with the label goes; an empty label stands for the gaps between groups.
"""


def verdict_parts(
    verdict: Verdict, level: EscalationLevel | None = None, *, below: str = ""
) -> tuple[Part, ...]:
    """Return the lines and tables that show a verdict; `level` is what to try next, if known.

    They fit on a terminal together with the text that is shown `below` them.
    """
    first = verdict.first
    where = _where(first) if first else []
    where += [("agreed", text)] if (text := agreement(verdict)) else []
    if first and first.kind not in (Kind.ENDED, Kind.INCOMPARABLE):
        names = f"; by module: {modules(verdict)}" if verdict.by_module else ""
        where += [("afterwards", f"{aftermath(verdict)}{names}")]
    groups = where, _advice(verdict, level), _about(verdict)
    text = headline(verdict)
    if not verdict.same:
        text += f"\n  {_runs(verdict)}"
    rows = [row for group in groups if group for row in (_GAP, *group)][verdict.same :]
    around = height(COLUMNS, text, *([below] if below else []))
    return (text, *_table(_fitted(rows, LINES - around)))


def _table(rows: Rows) -> list[Part]:
    cells = [(f"  {label}", printable(content)) for label, content in rows]
    return [listing(cells, style="bold")] if rows else []


def _fitted(rows: Rows, lines: int) -> Rows:
    kept, left_out = rows, 0
    for label in _LEAST_NEEDED:
        if height(COLUMNS, *_table(shown := kept + _word_on(left_out))) <= lines:
            return shown
        less = [row for row in kept if row != _GAP]
        if label:  # with what goes on below the row
            start = max((at for at, row in enumerate(kept) if row[0] == label), default=len(kept))
            end = start + 1
            while end < len(kept) and not kept[end][0] and kept[end] != _GAP:
                end += 1
            less = kept[:start] + kept[end:]
        left_out += bool(label) and less != kept
        kept = less
    return kept + _word_on(left_out)


def _word_on(left_out: int) -> Rows:
    return [("left out", f"{counted(left_out, 'row')}: --json has all")] if left_out else []


def _runs(verdict: Verdict) -> str:
    # What A and B stand for: two folders, with the one that both are in named once if it is long.
    left, right = printable(verdict.left), printable(verdict.right)
    line = f"A = {left}, B = {right}"
    place, other = (text.rpartition("/")[0] for text in (left, right))
    if len(line) <= COLUMNS - 2 or not place or place != other:
        return line
    names = (text.removeprefix(f"{place}/") for text in (left, right))
    return "A = {}, B = {}".format(*names) + f", both in {place}"


def verdict_json(verdict: Verdict, level: EscalationLevel | None = None) -> dict[str, Any]:
    """Return a verdict as plain JSON values, with what to try next, if that is known."""
    return {**verdict.to_json(), "next_level": level and level_json(level)}


def level_json(level: EscalationLevel) -> dict[str, Any]:
    """Return a level of escalation as plain JSON values."""
    return {"name": level.name, "overrides": list(level.overrides), "why": level.why}


def _where(first: Divergence) -> Rows:
    if first.kind in (Kind.ENDED, Kind.INCOMPARABLE):
        return [("what", first.what)] if first.what else []
    what = "" if first.what == arguments(first) else first.what
    source = f"{first.source}   {source_line(first.source)}"
    return [
        ("op", f"{first.op}: {first.kind}" if first.op else str(first.kind)),
        *([("what", shortened(what, _LONG))] if what else []),
        *([("source", source.rstrip())] if first.source else []),
        *_both_sides(first),
        *[("element", element(each)) for each in first.elements[:_ELEMENTS]],
        *[("distance", text) for text in distances(first)[:1]],
    ]


def arguments(first: Divergence) -> str:
    """Return both arguments as a sentence has them: rows of their own show them better."""
    left, right = first.left, first.right
    return f"{left.argument or 'none'} and {right.argument or 'none'}" if left and right else ""


def _both_sides(first: Divergence) -> Iterator[tuple[str, str]]:
    left, right = first.left, first.right
    if left is None or right is None:
        yield "only in", "A" if left else "B"
    one, two = left or right, right or left
    if one is None or two is None:
        return
    if one.outputs or two.outputs:
        yield "outputs", pair(one.outputs, two.outputs)
    if one.argument != two.argument:
        yield "arguments", pair(one.argument, two.argument)
    if left is None or right is None or first.elements:
        return  # elements say more than fingerprints do
    for label, a, b in (
        ("read", one.input_fingerprints, two.input_fingerprints),
        ("wrote", one.output_fingerprints, two.output_fingerprints),
    ):
        both = enumerate(zip(fingerprints(a), fingerprints(b), strict=False))
        unequal = [(position, *texts) for position, texts in both if len(set(texts)) > 1]
        more = f", and {len(unequal) - 1:,} more" if len(unequal) > 1 else ""
        for position, *texts in unequal[:1]:
            short = (text if text == NEVER_WRITTEN else text[:_HEX] for text in texts)
            yield label, f"tensor {position}: {pair(*short)}{more}"
        if len(a) != len(b):
            yield label, f"A {counted(len(a), 'tensor')}   B {len(b):,}"


def agreement(verdict: Verdict) -> str:
    """Return up to which step two runs agree; nothing where all were compared at their level."""
    agreed = verdict.agreed
    if agreed is None or verdict.compared.is_at_its_level:
        return ""
    text = f"up to step {agreed.step} {agreed.by}"
    if agreed.in_full in {None, agreed.step}:
        return text
    return f"{text}; step {agreed.in_full} is the last one compared in full"


def _advice(verdict: Verdict, level: EscalationLevel | None) -> Rows:
    rows: Rows = []
    found = verdict.advice
    if found:
        rows += [("likely cause", found.cause)]
        rows += [("promised", found.promise)] if found.promise else []
        if found.setting:
            explain = f"torchrepro explain {quote(found.knob)}"
            rows += [("try", f"{quote(found.setting)}   ({explain})")]
        rows += [("edit", found.edit)] if found.edit else []
    if level and is_more_than_advised(level, verdict):
        texts = [quote(text) for text in level.overrides]
        count = len(texts)
        while count > 1 and len(" ".join(texts[:count])) > _OVERRIDES:
            count -= 1
        more = f" and {len(texts) - count} more (`verify --escalate` tries them)"
        more = more if count < len(texts) else ""
        rows += [("next level", f"{level.name}: {' '.join(texts[:count])}{more}")]
    if found and found.closer:
        rows += [("look closer", found.closer), ("", SAME_FOR_B)]
    return rows


def is_more_than_advised(level: EscalationLevel, verdict: Verdict) -> bool:
    """Whether a level has more settings than the advice of a verdict."""
    return verdict.advice is None or level.overrides != (verdict.advice.setting,)


def _about(verdict: Verdict) -> Rows:
    # The digest of a profile differs where any of its values does: the values say more.
    settings = [each for each in verdict.settings if each.name != "digest"]
    rows: Rows = [] if verdict.same else [("compared", certainty(verdict))]
    rows += [
        ("differing", f"{each.name}: A {left}   B {right}")
        for each in settings[:_SETTINGS]
        for left, right in [["not set" if x is None else shown(x) for x in (each.left, each.right)]]
    ]
    rest = len(settings) - _SETTINGS
    rows += [("differing", counted(rest, "more setting"))] if rest > 0 else []
    return rows + [
        ("note", shortened(text, _LONG))
        for text in (*verdict.across_ranks, *verdict.notes)[:_NOTES]
    ]


def headline(verdict: Verdict) -> str:
    """Return the answer in one line."""
    if verdict.same:
        return f"the same: {certainty(verdict)}"
    if verdict.first is None:
        return "not the same"
    if verdict.first.kind is Kind.INCOMPARABLE:
        return f"not known to be the same: {Kind.INCOMPARABLE}"
    if verdict.first.kind is Kind.ENDED:
        what = BOTH_CUT if verdict.first.both_were_cut else Kind.ENDED
        return f"not the same: {what}, {place(verdict.first)}"
    return f"not the same: diverged {place(verdict.first)}"


def place(first: Divergence) -> str:
    """Return where the runs diverge: step, phase, module, and the rank unless it is the first."""
    phase = _PHASES.get(first.phase, f"in {first.phase}" if first.phase else "")
    phase = f"at the latest {phase}" if phase and first.is_at_the_latest else phase
    module = printable(first.called or first.module)
    of = f" of {module}" if module and first.phase in _PHASES else ""
    rank = f" on rank {first.rank}" if first.rank else ""
    when = moment(first.step, after_last=first.after_last)
    return f"{', '.join(filter(None, (when, phase + of))) or OUTSIDE}{rank}"


def moment(step: int, *, after_last: bool) -> str:
    """Return when something happened; empty where a program has no steps."""
    if not after_last:
        return f"at step {step}"
    return "after the last step" if step else ""


def step_name(step: int, *, after_last: bool) -> str:
    """Return what a part of a run is called: a step, or what lies outside of all."""
    return (moment(step, after_last=after_last) or OUTSIDE).removeprefix("at ")


def certainty(verdict: Verdict) -> str:
    """Return how much was compared, and how exactly."""
    return f"{amount(verdict.compared)}, {exactness(verdict)}"


def exactness(verdict: Verdict) -> str:
    """Return how exactly the runs were compared."""
    if verdict.tolerance is None:
        return "bit for bit"
    rtol, atol = verdict.tolerance
    return f"within rtol={rtol:g}, atol={atol:g} by mean, norm and range of each tensor"


def amount(compared: Compared) -> str:
    """Return how much was compared."""
    ranks = [counted(compared.ranks, "rank")] if compared.ranks != 1 else []
    level = "" if compared.level == "op" else f" (recorded at level {compared.level})"
    what = "op" if compared.level == "op" else "record"
    steps = [counted(compared.steps, "step") + modes(compared)] if compared.steps else []
    where = "" if steps or not compared.ops else f" {OUTSIDE}"
    ops = [f"{counted(compared.ops, what)}{where}"] if compared.ops or not steps else []
    read = [f"{size(compared.bytes)} of tensors read"] if compared.bytes or not steps else []
    return ", ".join([*ranks, *steps, *ops, *read]) + level


def modes(compared: Compared) -> str:
    """Return how many steps were compared in which mode; nothing where all are at their level."""
    found = ", ".join(f"{number:,} {words}" for words, number in compared.by)
    return "" if compared.is_at_its_level else f" ({found})"


def counted(number: int, thing: str) -> str:
    """Return a number and what is counted, as in ``1,204 ops``."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def are(number: int) -> str:
    """Return the verb for a number of things."""
    return "is" if number == 1 else "are"


def source_line(source: str) -> str:
    """Return the text of the line ``file:line`` without its indentation, if it can be read."""
    file, _, number = source.rpartition(":")
    text = getline(file, int(number)) if file and number.isdecimal() else ""
    return shortened(printable(text.strip()), _WIDE)


def source_excerpt(source: str, around: int = 2) -> list[tuple[int, str]]:
    """Return the lines around ``file:line`` with their numbers, if they can be read."""
    file, _, number = source.rpartition(":")
    if not file or not number.isdecimal():
        return []
    near = range(max(1, int(number) - around), int(number) + around + 1)
    lines = [(at, getline(file, at).rstrip("\n")) for at in near]
    return lines if source_line(source) else []


def fingerprints(texts: Sequence[str]) -> tuple[str, ...]:
    """Return fingerprints as they are shown: unwritten memory has none."""
    return tuple(NEVER_WRITTEN if text == _NOT_WRITTEN else text for text in texts)


def element(each: Element) -> str:
    """Return an element that differs."""
    index = f"[{', '.join(map(str, each.index))}]"
    return f"{each.tensor} {index}: A {each.left}, B {each.right}"


def distances(first: Divergence) -> list[str]:
    """Return one sentence on the distance of each tensor."""
    return [
        f"{each.tensor}: at most {number(each.max_abs)} apart, relative {number(each.max_rel)}"
        + (f", {each.max_ulp:,} ulp" if each.max_ulp is not None else "")
        + (f", cosine {each.cosine:.9g}" if each.cosine is not None else "")
        for each in first.distances
    ]


def number(value: float | None) -> str:
    """Return a distance as it is shown."""
    return "unknown" if value is None else f"{value:.3g}"


def pair(left: Sequence[str] | str | None, right: Sequence[str] | str | None) -> str:
    """Return what both runs have, once if it is equal; ``-`` for a run that lacks it."""
    joined = (text if isinstance(text, str) else " ".join(text or ()) for text in (left, right))
    one, two = (printable(text) if text else "-" for text in joined)
    if one == two:
        return shortened(one, _WIDE)
    alike = takewhile(lambda both: both[0] == both[1], zip(one, two, strict=False))
    start = max(sum(1 for _ in alike) - _AROUND, 0)
    if max(len(one), len(two)) > _WIDE and start:
        one, two = f"...{one[start:]}", f"...{two[start:]}"
    return f"A {shortened(one, _WIDE)}   B {shortened(two, _WIDE)}"


def aftermath(verdict: Verdict) -> str:
    """Return how the difference spread."""
    if not verdict.propagated and not verdict.independent:
        return "nothing later differs"
    passes = "only passes it on" if verdict.propagated == 1 else "only pass it on"
    parts = [f"{counted(verdict.propagated, 'record')} {passes}"] * bool(verdict.propagated)
    own = "differs on its own" if verdict.independent == 1 else "differ on their own"
    alone = f"{counted(verdict.independent, 'record')} {own}, from equal inputs"
    return "; ".join([*parts, *([alone] if verdict.independent else [])])


def modules(verdict: Verdict) -> str:
    """Return the modules whose records differ, in the order in which they first differ."""
    shown = [
        f"{printable(verdict.program.name_of(name)) or '(no module)'} ({number:,})"
        for name, number in verdict.by_module[:_MODULES]
    ]
    rest = len(verdict.by_module) - _MODULES
    return ", ".join([*shown, *([f"{rest} more"] if rest > 0 else [])])
