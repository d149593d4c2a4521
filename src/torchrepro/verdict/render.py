"""Renders a verdict: its sentences, the answer in a terminal, and JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import takewhile
from linecache import getline
from typing import TYPE_CHECKING

from torchrepro.ground.console import Part, UnbrokenText, Verbosity, listing, verbosity
from torchrepro.ground.messages import printable, shortened, shown, size, some
from torchrepro.trace.format import UNINITIALISED
from torchrepro.verdict.value import BOTH_CUT, Compared, Divergence, Kind, LineOfOrigin, Verdict

if TYPE_CHECKING:
    Rows = list[tuple[str, str]]

_NOT_WRITTEN, NEVER_WRITTEN = UNINITIALISED.hex(), "(never written)"
_WIDE = 72  # characters of a line of source, of shapes or arguments that are shown
_AROUND = 16  # characters before the first one in which two long texts differ
_LONG = 180  # characters of a sentence that are shown
_LEAST = 20  # characters of a line of code
LINE = 86  # and where it has one line beside its label
_HEX = 8  # digits of a fingerprint that are shown
_ELEMENTS, _MODULES = 2, 4  # how many of each are shown
_SETTINGS, _NOTES = 1, 2  # and in a few lines
LINES = 15  # the lines that an answer takes at most, unless it is asked for in full

SAME_FOR_B = "the same for B, then `torchrepro compare` the two folders"
OUTSIDE = "outside of any step"  # where all is that a program without an optimizer does
_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "data": "in the data",
    "collective": "in a collective",
}
_COPIED = ("where", "edit", "becomes", "try")


def verdict_parts(verdict: Verdict) -> tuple[Part, ...]:
    """Return the lines and tables that show a verdict: in a few lines, or all of it if verbose."""
    if verbosity() is Verbosity.VERBOSE:
        return _in_full(verdict)
    rows = [("reaches", text)] if (text := reach(verdict)) else []
    rows += _where_in_short(verdict.first, verdict.origin) if verdict.first else []
    rows += _agreed(verdict)
    found = verdict.advice
    commands: list[Part] = []
    if found:
        rows += [("cause", found.cause)]
        if found.edit:
            rows += [
                ("edit", f"{from_here(found.edit.where)}   {found.edit.before}"),
                ("becomes", found.edit.after),
            ]
        if found.command:
            commands = ["  try", f"    {found.command}"]
        elif found.closer:
            commands = ["  look closer", f"    {found.closer}"]
        commands += _table([("tried", found.tried)] if found.tried else [])
    # What was tried says more than what merely differs.
    many, notes = (0, 0) if found and found.tried else (_SETTINGS, _NOTES)
    return (headline(verdict), *_table(rows), *commands, *_table(_about(verdict, many, notes)))


def _where_in_short(first: Divergence, origin: LineOfOrigin | None) -> Rows:
    if first.kind in (Kind.ENDED, Kind.INCOMPARABLE):
        return _ending(first)
    what = f"{first.op}: {first.kind}" if first.op else str(first.kind)
    if origin is not None:
        at = f"{what} at {short(first.source)}"
        return [*_beginning(origin), ("shows", shortened(at, LINE))]
    if first.what and first.what != arguments(first):
        what = f"{what}; {first.what}"
    rows = [("what", shortened(what, LINE))]
    if first.source:
        rows.insert(0, ("where", _with_code(first.source)))
    return rows


def _beginning(origin: LineOfOrigin) -> Rows:
    """Return the line at which a divergence began, what it changed, and what was the same."""
    rows = [("where", _with_code(origin.where))]
    same = f"the same before it: {some(origin.same)}" if origin.same else ""
    changed = f"not the same after it: {some(origin.changed)}" if origin.changed else ""
    values = "; ".join(filter(None, (same, changed)))
    return [*rows, ("values", shortened(values, LINE))] if values else rows


def _with_code(where: str) -> str:
    line = f"{from_here(where)}   "
    return line + shortened(source_line(where), max(LINE - len(line), _LEAST))


def _ending(first: Divergence) -> Rows:
    return [("what", shortened(first.what, LINE))] if first.what else []


def short(where: str) -> str:
    """Return ``file:line`` without the folders: the same program may run in another one."""
    return where.replace("\\", "/").rpartition("/")[2]


def from_here(where: str) -> str:
    """Return ``file:line`` as it is seen from the present folder, if the file is below it."""
    return printable(where.removeprefix(f"{os.getcwd()}/"))  # noqa: PTH109 - a text, not a path


def _in_full(verdict: Verdict) -> tuple[Part, ...]:
    first, found = verdict.first, verdict.advice
    origin = _beginning(verdict.origin) if verdict.origin else []
    where = [*origin, *(_where(first) if first else []), *_agreed(verdict)]
    # Without ops that were compared nothing is known of what differs later.
    if first and verdict.compared.ops and first.kind not in (Kind.ENDED, Kind.INCOMPARABLE):
        names = f"; by module: {modules(verdict)}" if verdict.by_module else ""
        where += [("afterwards", f"{aftermath(verdict)}{names}")]
    advice = [("cause", found.cause)] if found else []
    if found and found.edit:
        advice += [("edit", f"{found.edit.where}   {found.edit.before}")]
        advice += [("becomes", found.edit.after)]
    if found:
        advice += [("try", found.command)] if found.command else []
        advice += [("tried", found.tried)] if found.tried else []
        advice += [("look closer", found.closer), ("", SAME_FOR_B)] if found.closer else []
    compared = [] if verdict.same else [("compared", certainty(verdict))]
    about = [*compared, *_about(verdict, len(verdict.settings), len(verdict.notes))]
    lines = [headline(verdict)]
    lines += [f"  {nowhere}"] if (nowhere := reach(verdict)) else []
    if not verdict.same:
        # A and B stand for two folders: the one that both are in is named once if it is long.
        left, right = printable(verdict.left), printable(verdict.right)
        folder, other = (text.rpartition("/")[0] for text in (left, right))
        runs = f"A = {left}, B = {right}"
        if len(runs) > _WIDE and folder == other != "":
            one, two = (text.removeprefix(f"{folder}/") for text in (left, right))
            runs = f"A = {one}, B = {two}, both in {folder}"
        lines += [f"  {runs}"]
    # A line without anything parts the groups.
    groups = [[("", ""), *group] for group in (where, advice, about) if group]
    return ("\n".join(lines), *_table([row for group in groups for row in group][verdict.same :]))


def _table(rows: Rows) -> list[Part]:
    cells = [
        (f"  {label:<10}", (UnbrokenText if label in _COPIED else str)(printable(content)))
        for label, content in rows
    ]
    return [listing(cells, style="bold")] if rows else []


def _where(first: Divergence) -> Rows:
    if first.kind in (Kind.ENDED, Kind.INCOMPARABLE):
        return _ending(first)
    what = "" if first.what == arguments(first) else first.what
    source = f"{first.source}   {source_line(first.source)}"
    rows = [("op", f"{first.op}: {first.kind}" if first.op else str(first.kind))]
    rows += [("what", shortened(what, _LONG))] if what else []
    rows += [("source", source.rstrip())] if first.source else []
    rows += _both_sides(first)
    for each in first.elements[:_ELEMENTS]:
        index = f"[{', '.join(map(str, each.index))}]"
        rows.append(("element", f"{each.tensor} {index}: A {each.left}, B {each.right}"))
    for its in first.distances[:1]:
        apart = f"at most {number(its.max_abs)} apart, relative {number(its.max_rel)}"
        apart += "" if its.max_ulp is None else f", {its.max_ulp:,} ulp"
        apart += "" if its.cosine is None else f", cosine {its.cosine:.9g}"
        rows.append(("distance", f"{its.tensor}: {apart}"))
    return rows


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
            begins = (text if text == NEVER_WRITTEN else text[:_HEX] for text in texts)
            yield label, f"tensor {position}: {pair(*begins)}{more}"
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


def _agreed(verdict: Verdict) -> Rows:
    return [("agreed", text)] if (text := agreement(verdict)) else []


def _about(verdict: Verdict, many: int, notes: int) -> Rows:
    # The digest of a profile differs where any of its values does: the values say more.
    settings = [each for each in verdict.settings if each.name != "digest"]
    rows: Rows = [
        ("differing", f"{each.name}: A {left}   B {right}")
        for each in settings[:many]
        for left, right in [["not set" if x is None else shown(x) for x in (each.left, each.right)]]
    ]
    rest = len(settings) - many
    if rows and rest > 0:
        rows[-1] = ("differing", f"{rows[-1][1]}; {counted(rest, 'more setting')}")
    return rows + [
        ("note", shortened(text, _LONG))
        for text in (*verdict.across_ranks[: max(notes, 1)], *verdict.notes[:notes])
    ]


def headline(verdict: Verdict) -> str:
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


def reach(verdict: Verdict) -> str:
    """Return what a difference does not reach; nothing if it does, or may."""
    first = verdict.first
    if first is None or verdict.reaches:
        return ""
    steps = f"all {verdict.compared.steps:,} steps" if verdict.compared.steps > 1 else "the step"
    at = f"at {printable(short(first.source))}" if first.source else place(first)
    alone = first.left is None or first.right is None
    what = "one run did an op more" if alone and first.op else "the runs computed other values"
    return f"losses and parameters of {steps} are the same; {what} {at}"


def place(first: Divergence) -> str:
    """Return where the runs diverge: step, phase, module, and the rank unless it is the first."""
    phase = _PHASES.get(first.phase, f"in {first.phase}" if first.phase else "")
    named = first.module or first.called or first.is_at_the_latest
    if first.phase == "forward" and not named:
        phase = ""  # it may be before any model is there
    phase = f"at the latest {phase}" if phase and first.is_at_the_latest else phase
    module = printable(first.called or first.module)
    of = f" of {module}" if module and first.phase in _PHASES else ""
    rank = f" on rank {first.rank}" if first.rank else ""
    when = moment(first.step, after_last=first.after_last)
    if first.before_model:
        when, phase, of = "before the first step", "", ""
    return f"{', '.join(filter(None, (when, phase + of))) or OUTSIDE}{rank}"


def moment(step: int, *, after_last: bool) -> str:
    """Return when something happened; empty where a program has no steps."""
    if not after_last:
        return f"at step {step}"
    return "after the last step" if step else ""


def step_name(step: int, *, after_last: bool) -> str:
    """Return what a part of a run is called: a step, or what lies outside of all."""
    return (moment(step, after_last=after_last) or OUTSIDE).removeprefix("at ")


def exactness(verdict: Verdict) -> str:
    if verdict.tolerance is None:
        return "bit for bit"
    rtol, atol = verdict.tolerance
    return f"within rtol={rtol:g}, atol={atol:g} by mean, norm and range of each tensor"


def certainty(verdict: Verdict) -> str:
    compared = verdict.compared
    ranks = [counted(compared.ranks, "rank")] if compared.ranks != 1 else []
    level = "" if compared.level == "op" else f" (recorded at level {compared.level})"
    what = "op" if compared.level == "op" else "record"
    steps = [counted(compared.steps, "step") + modes(compared)] if compared.steps else []
    where = "" if steps or not compared.ops else f" {OUTSIDE}"
    ops = [f"{counted(compared.ops, what)}{where}"] if compared.ops or not steps else []
    read = [f"{size(compared.bytes)} of tensors read"] if compared.bytes or not steps else []
    return f"{', '.join([*ranks, *steps, *ops, *read])}{level}, {exactness(verdict)}"


def modes(compared: Compared) -> str:
    """Return how many steps were compared in which mode; nothing where all are at their level."""
    found = ", ".join(f"{number:,} {words}" for words, number in compared.by)
    return "" if compared.is_at_its_level else f" ({found})"


def counted(number: int, thing: str) -> str:
    """Return a number and what is counted, as in ``1,204 ops``."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def are(number: int) -> str:
    return "is" if number == 1 else "are"


def source_line(source: str) -> str:
    """Return the text of the line ``file:line`` without its indentation, if it can be read."""
    file, _, number = source.rpartition(":")
    text = getline(file, int(number)) if file and number.isdecimal() else ""
    return shortened(printable(text.strip()), _WIDE)


def source_excerpt(source: str, around: int = 2) -> list[tuple[int, str]]:
    """Return the lines around ``file:line`` with their numbers, if they can be read."""
    if not source_line(source):
        return []
    file, _, number = source.rpartition(":")
    near = range(max(1, int(number) - around), int(number) + around + 1)
    return [(at, getline(file, at).rstrip("\n")) for at in near]


def fingerprints(texts: Sequence[str]) -> tuple[str, ...]:
    """Return fingerprints as they are shown: unwritten memory has none."""
    return tuple(NEVER_WRITTEN if text == _NOT_WRITTEN else text for text in texts)


def number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def pair(left: str, right: str) -> str:
    """Return what both runs have, once if it is equal; ``-`` for a run that lacks it."""
    one, two = (printable(text) if text else "-" for text in (left, right))
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
