"""The verdict as one HTML file that needs nothing else: no network, no fonts, no other files."""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.messages import printable
from torchrepro.verdict import render
from torchrepro.verdict.agreement import agreement_map
from torchrepro.verdict.chart import chart
from torchrepro.verdict.value import Kind

if TYPE_CHECKING:
    from jinja2 import Template

    from torchrepro.verdict.chart import Chart
    from torchrepro.verdict.diagnosis import EscalationLevel
    from torchrepro.verdict.value import Verdict

_FOLDER = Path(__file__).with_name("page_template")
_CURVES, _DIFFERENCE = 220.0, 90.0  # heights of the two charts
_MODULES = 16


def page(verdict: Verdict, title: str = "torchrepro", level: EscalationLevel | None = None) -> str:
    """Return the page of `verdict`; `level` is what to try next, if known."""
    curves, difference = _charts(verdict)
    return _template().render(
        verdict=verdict,
        first=verdict.first,
        ended=verdict.first is not None and verdict.first.kind is Kind.ENDED,
        title=title,
        level=level,
        words=render,
        map=agreement_map(verdict.map, verdict.first, after_last=verdict.compared.after_last),
        curves=curves,
        difference=difference,
        losses_agree=all(_alike(left, right) for _, left, right in verdict.losses),
        by_module=verdict.by_module[:_MODULES],
        more_modules=max(0, len(verdict.by_module) - _MODULES),
        most=max((number for _, number in verdict.by_module), default=1) or 1,
    )


def _charts(verdict: Verdict) -> tuple[Chart | None, Chart | None]:
    """Return the curves of both runs' losses, and of what lies between them if anything does."""
    step = verdict.first.step if verdict.first else None
    left = [(float(at), loss) for at, loss, _ in verdict.losses]
    right = [(float(at), loss) for at, _, loss in verdict.losses]
    apart = [
        (float(at), None if one is None or two is None else two - one)
        for at, one, two in verdict.losses
    ]
    return (
        chart((left, right), _CURVES, step),
        chart((apart,), _DIFFERENCE, step) if any(gap for _, gap in apart) else None,
    )


def _alike(left: float | None, right: float | None) -> bool:
    """Whether two losses are equal, as the same NaN is."""
    return left == right or str(left) == str(right)


@cache
def _template() -> Template:
    """Return the template, with style and script in it and the policy that allows only those.

    Every value that is put in is escaped, and what steers a terminal or the direction of text is
    written out, as names and source lines are the work of others
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
    style, script = (
        (_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    environment.globals.update(
        style=Markup(style),  # noqa: S704 - a file of this package, not data
        script=Markup(script),  # noqa: S704
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    return environment.get_template("page.html")


def _hash(text: str) -> str:
    """Return `text` as a content security policy names it (https://www.w3.org/TR/CSP3/)."""
    return "sha256-" + b64encode(sha256(text.encode()).digest()).decode()
