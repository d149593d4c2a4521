"""How the commands that compare runs answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from torchrepro.errors import TraceError
from torchrepro.messages import Problem

if TYPE_CHECKING:
    from torchrepro.verdict.ladder import Rung
    from torchrepro.verdict.value import Verdict

Report = Annotated[
    str, typer.Option(metavar="FILE.html", help="Write the answer as one self-contained page.")
]


def check_page(report: str) -> None:
    """Raise `TraceError` if a page cannot be written, before hours are spent on what is in it."""
    place = Path(report)
    if report and (place.is_dir() or not place.absolute().parent.is_dir()):
        raise TraceError(Problem("the page cannot be written there", found=report))


def write_page(verdict: Verdict, rung: Rung | None, report: str) -> None:
    """Write the page of a verdict where one is asked for, and say so."""
    if not report:
        return
    from torchrepro.verdict.page import page

    title = f"{Path(verdict.left).name} and {Path(verdict.right).name}"
    try:
        Path(report).write_text(page(verdict, title, rung), encoding="utf-8")
    except OSError as error:
        raise TraceError(
            Problem(f"the page cannot be written: {error.strerror}", found=report)
        ) from None
    tell(f"torchrepro: the page is in {report}\n")


def tell(text: str) -> None:
    """Say something that is no part of the answer, at once, where there is a standard error."""
    if sys.stderr is not None:
        sys.stderr.write(text)
        sys.stderr.flush()


def leave(*, same: bool) -> NoReturn:
    """Exit as the answer says: 0 for yes, 1 for no."""
    raise typer.Exit(0 if same else 1)
