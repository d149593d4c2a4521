"""Renders a verdict as one HTML file that works offline and loads no other file.

The page has curves of the losses over the steps, and a map of the agreement of modules by step.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.ground.console import as_text, parts
from torchrepro.ground.errors import printable, size
from torchrepro.verdict import render
from torchrepro.verdict.value import Cell, Divergence, Kind, RunFacts, Verdict

if TYPE_CHECKING:
    from jinja2 import Template

    Curve = list[tuple[float, float | None]]
    Tick = tuple[float, str]  # the position of a mark on an axis, and its text
    LossRow = tuple[int, float | None, float | None, float | None]
    """A step, the loss of A and of B, and their difference."""

_FOLDER = Path(__file__).with_name("page_template")
_CURVES, _DIFFERENCE = 250.0, 130.0  # heights of the two charts
_MODULES, _TOTALS = 16, 200  # the most modules to list if some differ, and if none differs
_OF_EACH = ("Answer", "Recording", "Date")  # columns that stay even if all runs have one value

WIDTH = 720.0
POINTS = 720
"""The most points of a curve. A longer curve has the lowest and highest of each group."""

APART = 45.0  # approximate distance between marks of the upward axis
COLUMNS, ROWS = 240, 64  # cells of a map at most
SHADES = 5  # 0 for the same; the others for a growing share of differing records

_LARGEST, _SMALLEST = 1e300, 1e-300  # limits against overflow and underflow of ranges


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run, as a row in the table of the page."""

    name: str
    facts: Mapping[str, str]  # column -> text
    link: str = ""  # the anchor of its comparison
    kind: str = ""  # the CSS class, ``a`` or ``b``, if it is A or B of the comparison


@dataclass(frozen=True, slots=True)
class PageSection:
    """A verdict on the page. It has a title and an anchor if the page has several verdicts."""

    verdict: Verdict
    title: str = ""
    anchor: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The content of a page: the answer, the runs, and the verdicts that compare them."""

    same: bool
    headline: str
    lines: Sequence[str]  # sentences below the headline
    runs: Sequence[RunRow]
    comparisons: Sequence[PageSection]
    more: str = ""  # a sentence on omitted comparisons
    text: Sequence[str] = ()  # the lines that a terminal shows, if no verdict shows more


def page(verdict: Verdict) -> str:
    about = verdict.about or (None, None)
    runs = [
        RunRow(name, {"Recording": folder, **facts_of(facts)}, kind=name.lower())
        for name, folder, facts in zip("AB", (verdict.left, verdict.right), about, strict=True)
    ]
    headline = render.headline(verdict)
    return page_of(Answer(verdict.same, headline, (), runs, [PageSection(verdict)]))


def text_page(answer: Any, *, same: bool) -> str:
    """Return a page with the text of an answer; the first sentence of it is the headline."""
    headline = next(part for part in parts(answer) if isinstance(part, str))
    lines = as_text(*parts(answer)).splitlines()
    return page_of(Answer(same, headline, (), (), (), text=lines))


def page_of(answer: Answer) -> str:
    # Facts that all runs have in common are shown once, above the table of runs.
    names = dict.fromkeys(chain.from_iterable(run.facts for run in answer.runs))
    values = {name: {run.facts.get(name, "") for run in answer.runs} for name in names}
    columns = [name for name, texts in values.items() if len(texts) > 1 or name in _OF_EACH]
    common = [(name, *texts) for name, texts in values.items() if name not in columns]
    common = [(name, text) for name, text in common if text]
    return _template().render(
        answer=answer,
        runs={"common": common, "columns": columns, "rows": answer.runs},
        comparisons=[_contents(section) for section in answer.comparisons],
        words=render,
    )


def facts_of(facts: RunFacts | None) -> dict[str, str]:
    """Return the facts of a recording: label on the page -> text."""
    if facts is None:
        return {}
    return {
        "Date": facts.date.replace("T", " ").replace("+00:00", " UTC"),
        "Host": facts.host,
        "torch": facts.torch,
        "Commit": facts.commit,
        "Profile": facts.profile,
    }


def _contents(comparison: PageSection) -> dict[str, Any]:
    verdict = comparison.verdict
    first = verdict.first
    if first is not None and first.called:
        first = replace(first, module=first.called)
    ended = first is not None and first.kind is Kind.ENDED
    cells: Sequence[Cell] = verdict.map
    if verdict.program.models:
        cells = [replace(cell, module=verdict.program.name_of(cell.module)) for cell in cells]
    totals = Counter[str]()
    for cell in cells:
        totals[cell.module] += cell.same + cell.differing
    shown = None  # a map without differences is omitted
    if any(cell.differing for cell in cells):
        shown = agreement_map(cells, first, after_last=verdict.compared.after_last)
    return {
        "verdict": verdict,
        "title": comparison.title,
        "anchor": comparison.anchor,
        "prefix": f"{comparison.anchor}-" if comparison.title else "",
        "ended": ended,
        "in_ulp": first and any(distance.max_ulp is not None for distance in first.distances),
        "map": shown,
        "modules": _modules(verdict, cells),
        "more_modules": max(0, len(verdict.by_module) - _MODULES),
        "compared": _compared(verdict, len(totals)),
        "totals": list(totals.items())[:_TOTALS],
        "more_totals": max(0, len(totals) - _TOTALS),
        **_losses(verdict, ended=ended),
    }


def _modules(verdict: Verdict, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    since: dict[str, int] = {}
    for cell in cells:
        if cell.differing:
            since[cell.module] = min(cell.step, since.get(cell.module, cell.step))
    last = max((cell.step for cell in cells), default=0)
    most = max((number for _, number in verdict.by_module), default=1) or 1
    rows = []
    for recorded, number in verdict.by_module[:_MODULES]:
        name = verdict.program.name_of(recorded)
        step = since.get(name)
        after = verdict.compared.after_last and step == last
        when = "" if step is None else render.step_name(step, after_last=after)
        share = 100 * number / most
        rows.append({"name": name, "differing": number, "since": when, "share": share})
    return rows


def _compared(verdict: Verdict, modules: int) -> list[tuple[str, str]]:
    compared = verdict.compared
    ops = "Ops" if compared.level == "op" else "Records"
    rows = [
        ("Ranks", f"{compared.ranks:,}" if compared.ranks != 1 else ""),
        (
            "Steps",
            f"{compared.steps:,}{render.modes(compared)}" if compared.steps else render.OUTSIDE,
        ),
        (ops, f"{compared.ops:,}" if compared.ops or not compared.steps else ""),
        ("Modules", f"{modules:,}" if modules else ""),
        ("Tensors read", size(compared.bytes) if compared.bytes or not compared.steps else ""),
        ("Level", "" if compared.level == "op" else compared.level),
        ("Compared", render.exactness(verdict)),
        ("Agreed", render.agreement(verdict)),
    ]
    return [(label, text) for label, text in rows if text]


def _losses(verdict: Verdict, *, ended: bool) -> dict[str, Any]:
    losses: list[LossRow] = [
        (at, left, right, None if left is None or right is None else right - left)
        for at, left, right in verdict.losses
    ]
    step = verdict.first.step if verdict.first else None
    columns: list[Curve] = [[(float(row[0]), row[n]) for row in losses] for n in (1, 2, 3)]
    curves = chart(columns[:2], _CURVES, step)
    if curves is None:
        return {"curves": None}
    shared = len(losses)
    if ended:
        has = [[n for n, row in enumerate(losses, 1) if row[at] is not None] for at in (1, 2)]
        shared = min(max(places, default=0) for places in has)
    gaps = any(row[3] for row in losses)
    stride = -(-len(losses) // POINTS)
    read = [row for n, row in enumerate(losses) if n % stride == 0 or row[0] == step]
    return {
        "curves": curves,
        "difference": chart(columns[2:], _DIFFERENCE, step) if gaps else None,
        "losses_in_words": _losses_in_words(losses, shared),
        "readings": {
            "at": [round(curves.place_of(row[0]), 1) for row in read],
            "said": [_reading(*row) for row in read],
            "marked": next((n for n, row in enumerate(read) if row[0] == step), 0),
        },
    }


def _reading(step: int, left: float | None, right: float | None, apart: float | None) -> str:
    if _alike(left, right):
        return f"step {step}: A and B {_loss(left)}"
    between = "" if apart is None else f", B - A {_loss(apart)}"
    return f"step {step}: A {_loss(left)}, B {_loss(right)}{between}"


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.9g}"


def _losses_in_words(losses: Sequence[LossRow], count: int) -> str:
    shared = losses[:count]
    differing = [row for row in shared if not _alike(row[1], row[2])]
    if not differing:
        steps = render.counted(len(shared), "step")
        only = " that both have" if len(shared) < len(losses) else ""
        return f"Both runs have the same loss in {'the ' * bool(only)}{steps}{only}."
    step, left, right, _ = differing[0]
    agree = "" if step == losses[0][0] else f"The losses agree before step {step}. "
    text = f"{agree}At step {step} A has {_loss(left)} and B {_loss(right)}."
    largest = max(differing, key=lambda row: abs(row[3] or 0.0))
    if largest[3] is None or largest[0] == step:
        return text
    return f"{text} They are furthest apart at step {largest[0]}, by {abs(largest[3]):.3g}."


def _alike(left: float | None, right: float | None) -> bool:
    return left == right or str(left) == str(right)


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps as SVG paths, with the ticks of both axes."""

    height: float
    paths: Sequence[str]
    across: Sequence[Tick]
    upward: Sequence[Tick]
    marked: float | None  # position of the first divergence
    place_of: Callable[[float], float]  # step -> position


def chart(curves: Sequence[Curve], height: float, step: int | None = None) -> Chart | None:
    """Return a chart of `curves` in which `step` is marked; None if no value can be drawn."""
    drawable: list[Curve] = [
        [(x, y if y is not None and abs(y) < _LARGEST else None) for x, y in curve]
        for curve in curves
    ]
    values = [y for curve in drawable for _, y in curve if y is not None]
    if not values:
        return None
    low_x, high_x = _range_of([x for curve in curves for x, _ in curve])
    low_y, high_y = _range_of(values)

    def across(x: float) -> float:
        return WIDTH * (x - low_x) / (high_x - low_x)

    def upward(y: float) -> float:
        return height * (1 - (y - low_y) / (high_y - low_y))

    paths = []
    for curve in drawable:
        path, drawing = "", False
        for x, y in _thinned(curve):
            if y is not None:
                at = f"{across(x):.1f},{upward(y):.1f}"
                # A stroke of length 0 draws a single point as a dot.
                path += f"L{at}" if drawing else f"M{at}h0"
            drawing = y is not None
        paths.append(path)
    return Chart(
        height,
        paths,
        [(across(at), text) for at, text in ticks(low_x, high_x) if at == int(at)],
        [(upward(at), text) for at, text in ticks(low_y, high_y, height / APART)],
        across(step) if step is not None and low_x <= step <= high_x else None,
        across,
    )


def ticks(low: float, high: float, about: float = 5) -> list[Tick]:
    """Return the ticks of an axis: about `about` round numbers between `low` and `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    numbers = range(math.ceil(low / step), math.floor(high / step) + 1)
    return [(number * step, f"{number * step:.6g}") for number in numbers]


def _range_of(numbers: Sequence[float]) -> tuple[float, float]:
    low, high = min(numbers), max(numbers)
    room = 0.0 if high - low > _SMALLEST else abs(low) * 0.1 or 1.0
    return low - room, high + room


def _thinned(curve: Curve) -> Curve:
    if len(curve) <= POINTS:
        return curve
    stride = -(-2 * len(curve) // POINTS)
    kept: Curve = []
    for at in range(0, len(curve), stride):
        group = [(y, x) for x, y in curve[at : at + stride] if y is not None]
        ends = {min(group), max(group)} if group else {(None, curve[at][0])}
        kept += sorted((x, y) for y, x in ends)
    return kept


@dataclass(frozen=True, slots=True)
class AgreementMap:
    """Counts of equal and differing records, by groups of steps (columns) and modules (rows)."""

    columns: Sequence[tuple[int, int]]  # first and last step of each column
    ends: tuple[str, str]  # names of the first and last step; the last is empty if it is the first
    rows: Sequence[str]  # modules, in the order of their first record; ``layers.*`` is a group
    counts: Sequence[Sequence[Sequence[int]]]  # [row][column] -> equal and differing records
    marked: tuple[int, int] | None  # column and row of the first divergence
    after: int | None  # the number that represents records after the last step, if there are any

    def outlines(self) -> list[list[tuple[int, str]]]:
        """Return for each row its shades, each with the SVG path of its cells. A cell is 1 by 1."""
        outlines = []
        for row in self.counts:
            paths: dict[int, str] = defaultdict(str)
            start = 0
            for shade, run in groupby(_shade(same, differing) for same, differing in row):
                length = len(list(run))
                if shade is not None:
                    paths[shade] += f"M{start},0h{length}v1h-{length}z"
                start += length
            outlines.append(sorted(paths.items()))
        return outlines

    def flat_counts(self) -> list[int]:
        return [number for row in self.counts for cell in row for number in cell]


def agreement_map(
    cells: Sequence[Cell], first: Divergence | None = None, *, after_last: bool = False
) -> AgreementMap:
    """Return the map of `cells`, which must not be empty.

    With `after_last`, the last column shows the ops that ran after the last step.
    """
    groups = _grouped(list(dict.fromkeys(cell.module for cell in cells)))
    steps = sorted({cell.step for cell in cells})
    stride = -(-len(steps) // COLUMNS)
    columns = [steps[at : at + stride] for at in range(0, len(steps), stride)]
    column_of = {step: number for number, group in enumerate(columns) for step in group}
    rows = list(dict.fromkeys(groups.values()))
    row_of = {name: rows.index(row) for name, row in groups.items()}
    counts = [[[0, 0] for _ in columns] for _ in rows]
    for cell in cells:
        sums = counts[row_of[cell.module]][column_of[cell.step]]
        sums[0] += cell.same
        sums[1] += cell.differing
    marked = None
    if first and first.step in column_of and first.module in row_of:
        marked = column_of[first.step], row_of[first.module]
    after = steps[-1] if after_last else None
    begins, ends = (render.step_name(at, after_last=at == after) for at in (steps[0], steps[-1]))
    return AgreementMap(
        [(group[0], group[-1]) for group in columns],
        (begins, ends if steps[1:] else ""),
        *(rows, counts, marked, after),
    )


def _shade(same: int, differing: int) -> int | None:
    if not differing:
        return 0 if same else None
    return 1 + min(SHADES - 2, (SHADES - 1) * differing // (same + differing))


def _grouped(names: Sequence[str]) -> dict[str, str]:
    rows = {name: name for name in names}
    deepest = max(name.count(".") for name in names)
    for depth in range(deepest, 0, -1):
        if len(set(rows.values())) <= ROWS:
            return rows
        rows = {
            name: f"{'.'.join(name.split('.')[:depth])}.*" if name.count(".") >= depth else name
            for name in names
        }
    distinct = list(dict.fromkeys(rows.values()))
    kept = distinct if len(distinct) <= ROWS else distinct[: ROWS - 1]
    return {name: row if row in kept else "(other modules)" for name, row in rows.items()}


@cache
def _template() -> Template:
    """Return the template of the page. Its security policy allows only its own style and script.

    Names and source lines are untrusted. So every value is escaped, and characters that control a
    terminal or the direction of text become visible
    (https://jinja.palletsprojects.com/en/stable/api/#autoescaping).
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        is_text = isinstance(value, str) and not isinstance(value, Markup)
        return printable(value) if is_text else value

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name, file in (("style", "page.css"), ("script", "page.js")):
        text = (_FOLDER / file).read_text(encoding="utf-8")
        # The hash for the content security policy: https://www.w3.org/TR/CSP3/
        digest = f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
        environment.globals[f"{name}_hash"] = digest
        environment.globals[name] = Markup(text)  # noqa: S704 - a file of this package, not data
    return environment.get_template("page.html")
