"""What all commands share: the app, their common arguments, and how they answer."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import torchrepro
from torchrepro.cli.command_table import FIRST_STEPS, Commands
from torchrepro.console import show
from torchrepro.errors import ProfileError
from torchrepro.patching import variables_put_back
from torchrepro.verbosity import Verbosity, environment_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torchrepro.console import Part
    from torchrepro.profile.resolved import ResolvedProfile


VERBOSITY = "torchrepro.verbosity"
"""The key under which a command remembers which of `--quiet` and `--verbose` it was given."""

app = typer.Typer(
    cls=Commands,
    help="Reproducible PyTorch runs from one declared profile.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - the value of an option
    if wanted:
        sys.stdout.write(f"torchrepro {torchrepro.__version__}\n")
        raise typer.Exit


@app.callback()
def say_what_to_do_first(
    context: typer.Context,
    version: Annotated[  # noqa: FBT002 - an option of the command line
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Reproducible PyTorch runs from one declared profile."""
    if context.invoked_subcommand is None:
        width = max(len(each.line) for each in FIRST_STEPS)
        lines = [f"  {each.line:{width}}  {each.what}" for each in FIRST_STEPS]
        head = "torchrepro makes PyTorch runs repeatable. First:"
        sys.stdout.write("\n".join([head, *lines, ""]))


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


def _set_variables(context: typer.Context, variables: Mapping[str, str]) -> None:
    # Here and in children, until the command ends.
    context.with_resource(variables_put_back(variables))
    os.environ.update(variables)


def _consent(context: typer.Context, names: list[str] | None) -> None:
    if names and not context.resilient_parsing:
        from torchrepro.profile.validation import VARIABLE, allowed_by

        _set_variables(context, {VARIABLE: allowed_by(names)})


AllowEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-env",
        metavar="NAME",
        callback=_consent,
        help="Let the profile set this variable, which is not on the list of harmless ones.",
    ),
]
"""For every command that reads a profile. The callback acts; commands ignore the value."""


def _saying(wanted: Verbosity) -> Callable[[typer.Context, bool], None]:
    def say_so(context: typer.Context, given: bool) -> None:  # noqa: FBT001 - the value of an option
        if not given or context.resilient_parsing:
            return
        if context.meta.setdefault(VERBOSITY, wanted) is not wanted:
            context.close()  # takes back what the first of the two has set
            raise typer.BadParameter("--quiet and --verbose contradict each other")
        _set_variables(context, environment_for(wanted))

    return say_so


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        callback=_saying(Verbosity.VERBOSE),
        help="Show every setting at the start, as TORCHREPRO_VERBOSE=1 does.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        callback=_saying(Verbosity.QUIET),
        help="Say nothing but errors and a lowered guarantee, as TORCHREPRO_QUIET=1 does.",
    ),
]
"""Both act by their callbacks, and win over the variables."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def print_json(value: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def answer(value: Any, shown: Iterable[Part], *, as_json: bool) -> None:
    """Print the answer of a command: `value` as JSON, or `shown` as tables and lines."""
    if as_json:
        print_json(value)
    else:
        show(*shown)


def resolved_profile(profile: str, overrides: list[str] | None) -> ResolvedProfile:
    """Return a profile with its overrides; raises `ProfileError` for one that is not valid."""
    from torchrepro.profile.load import load

    if "=" in profile and not Path(profile).exists():
        todo = "name the profile"
        raise ProfileError.about("an override without a profile", found=profile, todo=todo)
    for text in overrides or ():
        if "=" not in text and not text.startswith("~"):
            both = f"defaults: [{profile}, {text}, _self_]"
            todo = f"write key=value, or a profile that inherits both: {both}"
            what = "not an override; one profile at a time"
            raise ProfileError.about(what, found=text, todo=todo)
    return load(profile, overrides or ()).resolved
