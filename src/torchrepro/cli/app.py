"""What all commands share: their table, the app, common arguments, progress, and their answers.

A new command has its examples in `HELP`, and is a function that `command` decorates.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

import torchrepro
from torchrepro.ground.console import Verbosity, environment_for, show
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.patching import variables_put_back

if TYPE_CHECKING:
    from torchrepro.ground.console import Part
    from torchrepro.profile.resolved import ResolvedProfile


HELP = """\
Runs
torchrepro quickstart  # into this folder
torchrepro quickstart first-try  # into a folder of its own
torchrepro run debug-strict -- python train.py  # a run under the profile
torchrepro run debug-strict --record runs/a -- python train.py
    # record what it computes, for `torchrepro compare`
torchrepro run --lock repro.lock -- python train.py  # start only if the lock is met
torchrepro rerun outputs/2026-11-20/10-30-00  # a Hydra job once more
torchrepro rerun runs/a --dry-run  # what differs from then; starts nothing
torchrepro rerun runs/a -- python train.py --token $TOKEN
    # with the arguments that its manifest hides
torchrepro verify -- python train.py  # two runs of the program as it is
torchrepro verify debug-strict -- python train.py  # two runs under a profile
torchrepro verify debug-strict --stress --open -- python train.py
    # perturb what must not matter, and show the page of the verdict
torchrepro compare runs/a runs/b  # the first op whose results differ
torchrepro compare runs/a runs/b --open  # the same as a page in the browser
torchrepro compare runs/a runs/b --rtol 1e-3 --atol 1e-5
    # the same numbers within a tolerance: needs runs with --statistics
Profiles
torchrepro list  # the profiles that can be named here
torchrepro list --pieces  # what can be laid on top of a profile
torchrepro show debug-strict  # every value of the profile
torchrepro show debug-strict seed=7  # the same with another seed
torchrepro show debug-strict --origin  # the file and line of each value
torchrepro plan debug-strict  # what each setting would become here, and why
torchrepro plan train-fast seed=7 --json  # the same as one JSON document
torchrepro explain backends.cudnn.benchmark  # by the key in a profile
torchrepro explain CUBLAS_WORKSPACE_CONFIG  # by the name of a variable
eval "$(torchrepro env debug-strict)"  # set them in this shell
torchrepro env debug-strict --format dotenv  # for a .env file
torchrepro env debug-strict --format slurm  # for a job script, after #SBATCH
torchrepro schema  # every key of a profile, and what it may be
torchrepro schema > profile.schema.json  # for an editor that completes keys
torchrepro new-pack acme  # a package for the profiles of a team
torchrepro new-pack packs/acme --json  # and its files as JSON
Hold runs to a lock
torchrepro lock debug-strict  # write repro.lock, to be committed
torchrepro lock debug-strict seed=7 -o gpu.lock  # another seed and file
torchrepro lock debug-strict -- python train.py  # with the numbers that it computes
torchrepro check repro.lock  # exit status 1 if numbers may change here
torchrepro check repro.lock -- python train.py  # the same numbers, or who changed them
torchrepro check repro.lock --update "addmm of torch 2.14" -- python train.py
    # write the new numbers, and why
torchrepro diff debug-strict train-fast  # two profiles
torchrepro diff runs/a runs/b  # two runs
torchrepro diff repro.lock debug-strict  # a lock and its profile as it is
This machine
torchrepro doctor  # what is in the way of debug-strict here
torchrepro doctor npu-align  # and of another profile
torchrepro selftest  # what is held here, on each device, in half a minute
torchrepro selftest --json  # with the facts of the machine, to be sent
"""
"""Every command below its group: command lines that work as they are written, and what for."""


class CommandHelp(NamedTuple):
    """How the help shows one command."""

    group: str
    examples: list[tuple[str, str]]

    @property
    def starts(self) -> str:
        """What it starts, as its usage shows it; in brackets where it knows one itself."""
        given = [" -- " in line for line, _ in self.examples]
        return "-- COMMAND..." if all(given) else "[-- COMMAND...]" * any(given)


def _rows() -> dict[str, CommandHelp]:
    group, rows = "", dict[str, CommandHelp]()
    for line in HELP.replace("\n    #", "  #").splitlines():
        example, _, what = line.partition("  # ")
        if not what:
            group = line
            continue
        name = example.partition("torchrepro ")[2].split()[0]
        rows.setdefault(name, CommandHelp(group, [])).examples.append((example, what))
    return rows


ROWS = _rows()

FIRST_STEPS = (
    ("torchrepro quickstart", "write a program and a profile to try it on"),
    ("torchrepro verify -- python train.py", "does yours compute the same twice?"),
    ("torchrepro run debug-strict -- python train.py", "run it so that it does"),
    ("torchrepro --help", "every command; COMMAND --help shows examples"),
)
"""What `torchrepro` alone says to do first."""


class Command(TyperCommand):
    """A command whose help names a type only where a value of that type is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command; every error shows the usage and names --help."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The parser leaves it out of an error about an option without its value.
            if getattr(error, "ctx", ctx) is None:
                error.__dict__.update(ctx=ctx, cmd=ctx.command)
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_idle_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        ours = super().collect_usage_pieces(ctx)
        starts = ROWS[self.name or ""].starts
        if not starts:
            return ours
        for param in self.get_params(ctx):
            if getattr(param, "hidden", False) and isinstance(param, TyperArgument):
                ours = [piece for piece in ours if piece not in param.get_usage_pieces(ctx)]
        return [*ours, starts]


class Commands(TyperGroup):
    """All commands, in the order of `ROWS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=list(ROWS).index)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_idle_types(super().get_params(ctx))


def _without_idle_types(params: list[Any]) -> list[Any]:
    """Take the type away from flags, which take no value, and from arguments, which have a name."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif isinstance(param, TyperArgument):
            # typer has no setting for it. One that asks another method shows the type again.
            param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
    return params


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
        width = max(len(line) for line, _ in FIRST_STEPS)
        lines = [f"  {line:{width}}  {what}" for line, what in FIRST_STEPS]
        head = "torchrepro makes PyTorch runs repeatable. First:"
        sys.stdout.write("\n".join([head, *lines, ""]))


def command(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the command `name`, with the group and the examples of its row."""
    row = ROWS[name]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        # Each paragraph is one line: versions of typer differ in whether they keep line breaks.
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        examples = (f"{line}\n    {what}" for line, what in row.examples)
        decorate = app.command(
            name,
            cls=Command,
            help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
            rich_help_panel=row.group,
            epilog="\n\n".join(["Examples:", *examples]),
        )
        return decorate(function)

    return register


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
        from torchrepro.profile.schema import VARIABLE, allowed_by

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


IMPORTING = "importing torch"


class Progress:
    """Lines that stay, and on a terminal also what is true for the moment and then erased."""

    def __init__(self) -> None:
        self._for_now = ""
        self.is_watched = sys.stderr is not None and sys.stderr.isatty()
        """Whether anybody sees what is true for the moment."""

    def say(self, text: str) -> None:
        """Write text that stays, at once, also within a line."""
        self.erase()
        _write(text)

    def for_now(self, text: str) -> None:
        """Show text until the next one."""
        if self.is_watched:
            self.erase()
            self._for_now = text
            _write(text)

    def erase(self) -> None:
        """Take away what was true for the moment."""
        back = "\b" * len(self._for_now)
        if back:
            _write(f"{back}{' ' * len(back)}{back}")
        self._for_now = ""


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show on a terminal what the block does, for as long as it takes."""
    progress = Progress()
    progress.for_now(f"{what} ...")
    try:
        yield
    finally:
        progress.erase()


def _write(text: str) -> None:
    if sys.stderr is not None:  # closed, as in some services
        sys.stderr.write(text)
        sys.stderr.flush()
