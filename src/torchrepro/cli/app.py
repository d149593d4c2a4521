"""What all commands share: the app, their common arguments, how they answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from torchrepro.errors import ProfileError, TraceError
from torchrepro.messages import Problem

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved
    from torchrepro.verdict.diagnosis import EscalationLevel
    from torchrepro.verdict.value import Verdict


app = typer.Typer(
    help="Reproducible PyTorch runs from one declared profile.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _complete(incomplete: str) -> list[str]:
    from torchrepro.profile.search_path import search_path

    names = {name for folder in search_path() for name in folder.names()}
    return sorted(name for name in names if name.startswith(incomplete))


ProfileName = Annotated[
    str,
    typer.Argument(
        metavar="PROFILE",
        help="A name on the search path, a path to a YAML file, or pkg://package.path/name.",
        autocompletion=_complete,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="OVERRIDE", help="As in seed=7 or backends.cudnn.benchmark=false."),
]


def _consent(context: typer.Context, names: list[str] | None) -> None:
    """Consent to `names` in this process and those that it starts, until the command has ended."""
    if not names or context.resilient_parsing:
        return
    from torchrepro.profile.consent import VARIABLE, allowed_by

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = allowed_by(names)

    @context.call_on_close
    def take_back() -> None:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


AllowEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-env",
        metavar="NAME",
        callback=_consent,
        help="Let the profile set this variable, which is not on the list of harmless ones.",
    ),
]
"""For every command that reads a profile; its callback is all that happens."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def resolved_profile(profile: str, overrides: list[str] | None) -> Resolved:
    from torchrepro.profile.load import load

    if "=" in profile and not Path(profile).exists():
        raise ProfileError(
            Problem("an override, and no profile before it", found=profile, todo="name the profile")
        )
    for text in overrides or ():
        if "=" not in text and not text.startswith("~"):
            raise ProfileError(
                Problem(
                    "not an override; one profile at a time",
                    found=text,
                    todo="write key=value, or a profile that inherits both: "
                    f"defaults: [{profile}, {text}, _self_]",
                )
            )
    return load(profile, overrides or ()).resolved


Report = Annotated[
    str, typer.Option(metavar="FILE.html", help="Write the answer as one self-contained page.")
]


def check_page(report: str) -> None:
    """Raise `TraceError` if a page cannot be written, before hours are spent on what is in it."""
    place = Path(report)
    if report and (place.is_dir() or not place.absolute().parent.is_dir()):
        raise TraceError(Problem("the page cannot be written there", found=report))


def write_page(verdict: Verdict, rung: EscalationLevel | None, report: str) -> None:
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
