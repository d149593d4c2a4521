"""The verdict as a terminal shows it and as JSON."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

from torchrepro.console import listing
from torchrepro.messages import printable, shown
from torchrepro.verdict import wording
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torchrepro.console import Part, Table
    from torchrepro.verdict.diagnosis import EscalationLevel
    from torchrepro.verdict.value import Advice, Divergence, Verdict


_ELEMENTS = 3
_FINGERPRINTS = 2
_SETTINGS = 3
_NOTES = 3

Rows = list[tuple[str, str]]


def verdict_parts(verdict: Verdict, rung: EscalationLevel | None = None) -> tuple[Part, ...]:
    """Return the lines and tables that tell a verdict; `rung` is what to try next, if known."""
    groups = (
        _where(verdict.first) if verdict.first else [],
        _after(verdict),
        _advice(verdict, rung),
        _about(verdict),
    )
    said = [wording.headline(verdict)]
    said += (
        [] if verdict.same else [f"  A = {printable(verdict.left)}, B = {printable(verdict.right)}"]
    )
    rows = [row for group in groups if group for row in (("", ""), *group)]
    return ("\n".join(said), *([_grid(rows[verdict.same :])] if rows else []))


def _grid(rows: Rows) -> Table:
    return listing([(f"  {label}", printable(text)) for label, text in rows], style="bold")


def _where(first: Divergence) -> Rows:
    if first.kind in (Kind.ENDED, Kind.INCOMPARABLE):
        return [("what", first.what)] if first.what else []
    return [
        ("op", f"{first.op}: {first.kind}" if first.op else str(first.kind)),
        *([("what", first.what)] if first.what else []),
        *_source(first),
        *_both_sides(first),
        *[("element", wording.element(each)) for each in first.elements[:_ELEMENTS]],
        *[("distance", text) for text in wording.distances(first)],
    ]


def _source(first: Divergence) -> Iterator[tuple[str, str]]:
    if first.source:
        text = wording.source_line(first.source)
        yield "source", f"{first.source}   {text}".rstrip()


def _both_sides(first: Divergence) -> Iterator[tuple[str, str]]:
    left, right = first.left, first.right
    if left is None or right is None:
        yield "only in", "A" if left else "B"
    one, two = left or right, right or left
    if one is None or two is None:
        return
    yield "outputs", wording.pair(one.outputs, two.outputs)
    if one.argument or two.argument:
        yield "arguments", wording.pair(one.argument, two.argument)
    if left is None or right is None:
        return
    for label, a, b in (
        ("read", one.input_fingerprints, two.input_fingerprints),
        ("wrote", one.output_fingerprints, two.output_fingerprints),
    ):
        yield from _fingerprints(label, a, b)


def _fingerprints(
    label: str, left: tuple[str, ...], right: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield the fingerprints that differ; of those that agree only how many there are."""
    if left == right:
        if left:
            yield label, f"{wording.counted(len(left), 'tensor')}, equal"
        return
    numbered = [
        (position, a, b)
        for position, (a, b) in enumerate(
            zip(wording.fingerprints(left), wording.fingerprints(right), strict=False)
        )
        if a != b
    ]
    yield from (
        (label, f"tensor {position}: {wording.pair(a, b)}")
        for position, a, b in numbered[:_ELEMENTS]
    )
    if len(left) != len(right):
        yield label, f"A {wording.counted(len(left), 'tensor')}   B {len(right):,}"


def _after(verdict: Verdict) -> Rows:
    if (
        verdict.same
        or verdict.first is None
        or verdict.first.kind
        in (
            Kind.ENDED,
            Kind.INCOMPARABLE,
        )
    ):
        return []
    rows = [("afterwards", wording.aftermath(verdict))]
    return rows + ([("modules", wording.modules(verdict))] if verdict.by_module else [])


def _advice(verdict: Verdict, rung: EscalationLevel | None) -> Rows:
    rows: Rows = []
    found = verdict.advice
    if found:
        rows += [("likely cause", found.cause)]
        rows += [("promised", found.promise)] if found.promise else []
        rows += [("try", _explained(found))] if found.setting else []
    if rung:
        overrides = " ".join(map(quote, rung.overrides))
        rows += [("next rung", f"{rung.name}: {overrides}")]
    if found and found.closer:
        rows += [("look closer", found.closer), ("", wording.SAME_FOR_B)]
    return rows


def _explained(found: Advice) -> str:
    return f"{quote(found.setting)}   (torchrepro explain {quote(found.knob)})"


def _about(verdict: Verdict) -> Rows:
    # The digest of a profile differs where any of its values does: the values say more.
    settings = [each for each in verdict.settings if each.name != "digest"]
    rows: Rows = [] if verdict.same else [("compared", wording.certainty(verdict))]
    rows += [
        ("differing", f"{each.name}: A {_value(each.left)}   B {_value(each.right)}")
        for each in settings[:_SETTINGS]
    ]
    rest = len(settings) - _SETTINGS
    rows += [("", f"and {wording.counted(rest, 'more setting')}")] if rest > 0 else []
    return rows + [("note", text) for text in (*verdict.across_ranks, *verdict.notes)[:_NOTES]]


def _value(value: str | None) -> str:
    return "not set" if value is None else shown(value)


def verdict_json(verdict: Verdict, rung: EscalationLevel | None = None) -> dict[str, Any]:
    """Return a verdict as plain JSON values, with what to try next, if that is known."""
    return {**verdict.to_json(), "next_rung": _of_rung(rung)}


def _of_rung(rung: EscalationLevel | None) -> dict[str, Any] | None:
    if rung is None:
        return None
    return {"name": rung.name, "overrides": list(rung.overrides), "why": rung.why}
