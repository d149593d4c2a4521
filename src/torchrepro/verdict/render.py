"""Renders a verdict: in sentences, and as the answer of a command in a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import takewhile
from linecache import getline
from typing import TYPE_CHECKING

from torchrepro.ground.console import Part, UnbrokenText, Verbosity, listing, verbosity
from torchrepro.ground.errors import printable, shortened, shown, size, some
from torchrepro.trace.format import UNINITIALIZED_INPUT
from torchrepro.verdict.value import (
    BOTH_CUT,
    Advice,
    Compared,
    Divergence,
    Kind,
    LineOfOrigin,
    Verdict,
)

if TYPE_CHECKING:
    Rows = list[tuple[str, str]]

_NOT_WRITTEN, NEVER_WRITTEN = UNINITIALIZED_INPUT.hex(), "(uninitialized)"
_WIDE = 72  # characters of a line of source, of shapes or of arguments
_AROUND = 16  # characters before the first difference of two long texts
_LONG = 180  # characters of a sentence
_LEAST = 20  # characters of a line of code, at least
LINE = 86  # characters of a sentence in a single line beside its label
_HEX = 8  # digits of a fingerprint
_ELEMENTS, _MODULES = 2, 4
_SETTINGS, _NOTES = 1, 2  # lines of the short answer on settings and notes
LINES = 15  # lines of the short answer

SAME_FOR_B = "the same for B, then `torchrepro compare` the two folders"
OUTSIDE = "outside of any step"  # as in programs without an optimizer
_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "data": "in the data",
    "collective": "in a collective",
}
_COPIED = ("where", "edit", "becomes", "try")


def verdict_parts(verdict: Verdict) -> tuple[Part, ...]:
    """Return the lines and tables that show a verdict. `Verbosity.VERBOSE` shows every detail."""
    if verbosity() is Verbosity.VERBOSE:
        return _in_full(verdict)
    rows = [("reaches", text)] if (text := reach(verdict)) else []
    rows += _where_in_short(verdict.first, verdict.origin) if verdict.first else []
    rows += _agreed(verdict)
    proposal = verdict.advice
    commands: list[Part] = []
    if proposal:
        rows += [("cause", explained_cause(proposal))]
        if proposal.edit:
            rows += [
                ("edit", f"{relative_location(proposal.edit.where)}   {proposal.edit.before}"),
                ("becomes", proposal.edit.after),
            ]
        if proposal.command:
            commands = ["  try", f"    {proposal.command}"]
        elif proposal.closer:
            commands = ["  look closer", f"    {proposal.closer}"]
        commands += _table([("tried", proposal.tried)] if proposal.tried else [])
    # After a controlled re-run, show no settings and notes: its result is more informative.
    many, notes = (0, 0) if proposal and proposal.tried else (_SETTINGS, _NOTES)
    return (headline(verdict), *_table(rows), *commands, *_table(_about(verdict, many, notes)))


def explained_cause(proposal: Advice) -> str:
    """Return the cause, which ends with its name for `torchrepro explain`."""
    return f"{proposal.cause} [{proposal.cause_id}]"


def _where_in_short(first: Divergence, origin: LineOfOrigin | None) -> Rows:
    if first.kind in (Kind.ENDED, Kind.INCOMPARABLE):
        return _ending(first)
    sentence = f"{first.op}: {first.kind}" if first.op else str(first.kind)
    if origin is not None:
        at = f"{sentence} at {short(first.source)}"
        return [*_beginning(origin), ("shows", shortened(at, LINE))]
    if first.what and first.what != arguments(first):
        sentence = f"{sentence}; {first.what}"
    rows = [("what", shortened(sentence, LINE))]
    if first.source:
        rows.insert(0, ("where", _with_code(first.source)))
    return rows


def _beginning(origin: LineOfOrigin) -> Rows:
    """Return rows for the line of origin: its code, its equal inputs, its differing results."""
    rows = [("where", _with_code(origin.where))]
    same = f"the same before it: {some(origin.same)}" if origin.same else ""
    changed = f"different after it: {some(origin.changed)}" if origin.changed else ""
    values = "; ".join(filter(None, (same, changed)))
    return [*rows, ("values", shortened(values, LINE))] if values else rows


def _with_code(location: str) -> str:
    line = f"{relative_location(location)}   "
    return line + shortened(source_line(location), max(LINE - len(line), _LEAST))


def _ending(first: Divergence) -> Rows:
    return [("what", shortened(first.what, LINE))] if first.what else []


def short(location: str) -> str:
    """Return ``file:line`` without folders, which may differ between runs of the same program."""
    return location.replace("\\", "/").rpartition("/")[2]


def relative_location(location: str) -> str:
    """Return ``file:line`` relative to the current folder, if the file is below it."""
    return printable(location.removeprefix(f"{os.getcwd()}/"))  # noqa: PTH109 - a text, not a path


def _in_full(verdict: Verdict) -> tuple[Part, ...]:
    first, proposal = verdict.first, verdict.advice
    origin = _beginning(verdict.origin) if verdict.origin else []
    location_rows = [*origin, *(_where(first) if first else []), *_agreed(verdict)]
    # Later differences are known only if ops were compared.
    if first and verdict.compared.ops and first.kind not in (Kind.ENDED, Kind.INCOMPARABLE):
        names = f"; by module: {modules(verdict)}" if verdict.by_module else ""
        location_rows += [("afterwards", f"{aftermath(verdict)}{names}")]
    advice_rows = [("cause", explained_cause(proposal))] if proposal else []
    if proposal and proposal.edit:
        advice_rows += [("edit", f"{proposal.edit.where}   {proposal.edit.before}")]
        advice_rows += [("becomes", proposal.edit.after)]
    if proposal:
        advice_rows += [("try", proposal.command)] if proposal.command else []
        advice_rows += [("tried", proposal.tried)] if proposal.tried else []
        advice_rows += (
            [("look closer", proposal.closer), ("", SAME_FOR_B)] if proposal.closer else []
        )
    compared = [] if verdict.same else [("compared", certainty(verdict))]
    about = [*compared, *_about(verdict, len(verdict.settings), len(verdict.notes))]
    lines = [headline(verdict)]
    lines += [f"  {nowhere}"] if (nowhere := reach(verdict)) else []
    if not verdict.same:
        # A and B are two folders. If they are long, their common parent is shown once.
        left, right = printable(verdict.left), printable(verdict.right)
        left_folder, right_folder = (text.rpartition("/")[0] for text in (left, right))
        runs = f"A = {left}, B = {right}"
        if len(runs) > _WIDE and left_folder == right_folder != "":
            left, right = (text.removeprefix(f"{left_folder}/") for text in (left, right))
            runs = f"A = {left}, B = {right}, both in {left_folder}"
        lines += [f"  {runs}"]
    # An empty line separates the groups.
    groups = [[("", ""), *group] for group in (location_rows, advice_rows, about) if group]
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
    details = "" if first.what == arguments(first) else first.what
    source = f"{first.source}   {source_line(first.source)}"
    rows = [("op", f"{first.op}: {first.kind}" if first.op else str(first.kind))]
    rows += [("what", shortened(details, _LONG))] if details else []
    rows += [("source", source.rstrip())] if first.source else []
    rows += _both_sides(first)
    for element in first.elements[:_ELEMENTS]:
        index = f"[{', '.join(map(str, element.index))}]"
        rows.append(("element", f"{element.tensor} {index}: A {element.left}, B {element.right}"))
    for distance in first.distances[:1]:
        apart = f"at most {number(distance.max_abs)} apart, relative {number(distance.max_rel)}"
        apart += "" if distance.max_ulp is None else f", {distance.max_ulp:,} ulp"
        apart += "" if distance.cosine is None else f", cosine {distance.cosine:.9g}"
        rows.append(("distance", f"{distance.tensor}: {apart}"))
    return rows


def arguments(first: Divergence) -> str:
    """Return the arguments of both runs. `Divergence.what` is not shown if it only repeats them."""
    left, right = first.left, first.right
    return f"{left.argument or 'none'} and {right.argument or 'none'}" if left and right else ""


def _both_sides(first: Divergence) -> Iterator[tuple[str, str]]:
    left, right = first.left, first.right
    if left is None or right is None:
        yield "only in", "A" if left else "B"
    present, counterpart = left or right, right or left
    if present is None or counterpart is None:
        return
    if present.outputs or counterpart.outputs:
        yield "outputs", pair(present.outputs, counterpart.outputs)
    if present.argument != counterpart.argument:
        yield "arguments", pair(present.argument, counterpart.argument)
    if left is None or right is None or first.elements:
        return  # elements are more informative than fingerprints
    for label, a, b in (
        ("read", present.input_fingerprints, counterpart.input_fingerprints),
        ("wrote", present.output_fingerprints, counterpart.output_fingerprints),
    ):
        both = enumerate(zip(fingerprints(a), fingerprints(b), strict=False))
        unequal = [(position, *texts) for position, texts in both if len(set(texts)) > 1]
        rest = f", and {len(unequal) - 1:,} more" if len(unequal) > 1 else ""
        for position, *texts in unequal[:1]:
            begins = (text if text == NEVER_WRITTEN else text[:_HEX] for text in texts)
            yield label, f"tensor {position}: {pair(*begins)}{rest}"
        if len(a) != len(b):
            yield label, f"A {counted(len(a), 'tensor')}   B {len(b):,}"


def agreement(verdict: Verdict) -> str:
    """Return in words how far two runs agree; empty if steps are compared at the recorded level."""
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
    # Omit the digest of a profile: its differing values are more informative.
    settings = [setting for setting in verdict.settings if setting.name != "digest"]
    rows: Rows = [
        ("differing", f"{setting.name}: A {left}   B {right}")
        for setting in settings[:many]
        for left, right in [
            [
                "not set" if value is None else shown(value)
                for value in (setting.left, setting.right)
            ]
        ]
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
        summary = BOTH_CUT if verdict.first.both_were_cut else Kind.ENDED
        return f"not the same: {summary}, {place(verdict.first)}"
    return f"not the same: diverged {place(verdict.first)}"


def reach(verdict: Verdict) -> str:
    """Return a sentence if the difference affects no loss or parameter, else an empty text."""
    first = verdict.first
    if first is None or verdict.reaches:
        return ""
    steps = f"all {verdict.compared.steps:,} steps" if verdict.compared.steps > 1 else "the step"
    at = f"at {printable(short(first.source))}" if first.source else place(first)
    alone = first.left is None or first.right is None
    effect = (
        "one run has an additional op"
        if alone and first.op
        else "the runs computed different values"
    )
    return f"losses and parameters of {steps} are the same; {effect} {at}"


def place(first: Divergence) -> str:
    """Return in words where the runs diverge: step, phase and module, and the rank if not 0."""
    phase = _PHASES.get(first.phase, f"in {first.phase}" if first.phase else "")
    named = first.module or first.called or first.is_at_the_latest
    if first.phase == "forward" and not named:
        phase = ""  # the program may not have built a model yet
    phase = f"at the latest {phase}" if phase and first.is_at_the_latest else phase
    module = printable(first.called or first.module)
    of = f" of {module}" if module and first.phase in _PHASES else ""
    rank = f" on rank {first.rank}" if first.rank else ""
    when = moment(first.step, after_last=first.after_last)
    if first.before_model:
        when, phase, of = "before the first step", "", ""
    return f"{', '.join(filter(None, (when, phase + of))) or OUTSIDE}{rank}"


def moment(step: int, *, after_last: bool) -> str:
    """Return the step of an event in words; empty if the program has no steps."""
    if not after_last:
        return f"at step {step}"
    return "after the last step" if step else ""


def step_name(step: int, *, after_last: bool) -> str:
    """Return the name of a step, or of the records outside of all steps."""
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
    unit = "op" if compared.level == "op" else "record"
    steps = [counted(compared.steps, "step") + modes(compared)] if compared.steps else []
    outside = "" if steps or not compared.ops else f" {OUTSIDE}"
    ops = [f"{counted(compared.ops, unit)}{outside}"] if compared.ops or not steps else []
    read = [f"{size(compared.bytes)} of tensors read"] if compared.bytes or not steps else []
    return f"{', '.join([*ranks, *steps, *ops, *read])}{level}, {exactness(verdict)}"


def modes(compared: Compared) -> str:
    """Return how many steps were compared in each mode; empty if all have the recorded level."""
    by_mode = ", ".join(f"{number:,} {words}" for words, number in compared.by)
    return "" if compared.is_at_its_level else f" ({by_mode})"


def counted(number: int, thing: str) -> str:
    """Return a number with a noun in singular or plural, as in ``1,204 ops``."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def are(number: int) -> str:
    return "is" if number == 1 else "are"


def source_line(source: str) -> str:
    """Return the text of ``file:line`` without indentation; empty if the file cannot be read."""
    file, _, number = source.rpartition(":")
    text = getline(file, int(number)) if file and number.isdecimal() else ""
    return shortened(printable(text.strip()), _WIDE)


def source_excerpt(source: str, around: int = 2) -> list[tuple[int, str]]:
    """Return numbers and texts of the lines around ``file:line``, if the file can be read."""
    if not source_line(source):
        return []
    file, _, number = source.rpartition(":")
    near = range(max(1, int(number) - around), int(number) + around + 1)
    return [(at, getline(file, at).rstrip("\n")) for at in near]


def fingerprints(texts: Sequence[str]) -> tuple[str, ...]:
    """Return fingerprints for display, with a text in place of uninitialized memory."""
    return tuple(NEVER_WRITTEN if text == _NOT_WRITTEN else text for text in texts)


def number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def pair(left: str, right: str) -> str:
    """Return the texts of both runs for one line. Equal texts appear once, empty ones as ``-``."""
    left_text, right_text = (printable(text) if text else "-" for text in (left, right))
    if left_text == right_text:
        return shortened(left_text, _WIDE)
    common = takewhile(lambda both: both[0] == both[1], zip(left_text, right_text, strict=False))
    start = max(sum(1 for _ in common) - _AROUND, 0)
    if max(len(left_text), len(right_text)) > _WIDE and start:
        left_text, right_text = f"...{left_text[start:]}", f"...{right_text[start:]}"
    return f"A {shortened(left_text, _WIDE)}   B {shortened(right_text, _WIDE)}"


def aftermath(verdict: Verdict) -> str:
    """Return a sentence on the differences after the first one."""
    if not verdict.propagated and not verdict.independent:
        return "nothing later differs"
    passes = "only propagates it" if verdict.propagated == 1 else "only propagate it"
    parts = [f"{counted(verdict.propagated, 'record')} {passes}"] * bool(verdict.propagated)
    verb = "differs on its own" if verdict.independent == 1 else "differ on their own"
    alone = f"{counted(verdict.independent, 'record')} {verb}, from equal inputs"
    return "; ".join([*parts, *([alone] if verdict.independent else [])])


def modules(verdict: Verdict) -> str:
    """Return the modules with differing records, in the order of their first difference."""
    shown = [
        f"{printable(verdict.program.name_of(name)) or '(no module)'} ({number:,})"
        for name, number in verdict.by_module[:_MODULES]
    ]
    rest = len(verdict.by_module) - _MODULES
    return ", ".join([*shown, *([f"{rest} more"] if rest > 0 else [])])
