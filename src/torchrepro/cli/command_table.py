"""Every command in the order of use: the group it is shown in, and examples of it.

A new command is a row here and a function that `command` decorates.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

RUNS = "Runs"
PROFILES = "Profiles"
LOCKS = "Hold runs to a lock"
MACHINE = "This machine"


@dataclass(frozen=True, slots=True)
class Example:
    """A command line that works as it is written, and what it is for."""

    line: str
    what: str


@dataclass(frozen=True, slots=True)
class Row:
    """How the help shows one command."""

    group: str
    examples: tuple[Example, ...]
    starts_a_command: bool = False
    """Whether the words after `--` are a command that it starts."""
    knows_a_command: bool = False
    """Whether it starts one without being given it."""


ROWS: dict[str, Row] = {
    "quickstart": Row(
        RUNS,
        (
            Example("torchrepro quickstart", "into this folder"),
            Example("torchrepro quickstart first-try", "into a folder of its own"),
        ),
    ),
    "run": Row(
        RUNS,
        (
            Example("torchrepro run debug-strict -- python train.py", "a run under the profile"),
            Example(
                "torchrepro run debug-strict --record runs/a -- python train.py",
                "record what it computes, for `torchrepro compare`",
            ),
            Example(
                "torchrepro run --lock repro.lock -- python train.py",
                "start only if the lock is met",
            ),
        ),
        starts_a_command=True,
    ),
    "rerun": Row(
        RUNS,
        (
            Example("torchrepro rerun outputs/2026-11-20/10-30-00", "a Hydra job once more"),
            Example("torchrepro rerun runs/a --dry-run", "what differs from then; starts nothing"),
            Example(
                "torchrepro rerun runs/a -- python train.py --token $TOKEN",
                "with the arguments that its manifest hides",
            ),
        ),
        starts_a_command=True,
        knows_a_command=True,
    ),
    "verify": Row(
        RUNS,
        (
            Example("torchrepro verify -- python train.py", "two runs of the program as it is"),
            Example(
                "torchrepro verify debug-strict -- python train.py", "two runs under a profile"
            ),
            Example(
                "torchrepro verify debug-strict --stress --open -- python train.py",
                "perturb what must not matter, and show the page of the verdict",
            ),
        ),
        starts_a_command=True,
    ),
    "compare": Row(
        RUNS,
        (
            Example("torchrepro compare runs/a runs/b", "the first op whose results differ"),
            Example("torchrepro compare runs/a runs/b --open", "the same as a page in the browser"),
            Example(
                "torchrepro compare runs/a runs/b --rtol 1e-3 --atol 1e-5",
                "the same numbers within a tolerance: needs runs with --statistics",
            ),
        ),
    ),
    "list": Row(
        PROFILES,
        (
            Example("torchrepro list", "the profiles that can be named here"),
            Example("torchrepro list --pieces", "what can be laid on top of a profile"),
        ),
    ),
    "show": Row(
        PROFILES,
        (
            Example("torchrepro show debug-strict", "every value of the profile"),
            Example("torchrepro show debug-strict seed=7", "the same with another seed"),
            Example("torchrepro show debug-strict --origin", "the file and line of each value"),
        ),
    ),
    "plan": Row(
        PROFILES,
        (
            Example("torchrepro plan debug-strict", "what each setting would become here, and why"),
            Example("torchrepro plan train-fast seed=7 --json", "the same as one JSON document"),
        ),
    ),
    "explain": Row(
        PROFILES,
        (
            Example("torchrepro explain backends.cudnn.benchmark", "by the key in a profile"),
            Example("torchrepro explain CUBLAS_WORKSPACE_CONFIG", "by the name of a variable"),
        ),
    ),
    "env": Row(
        PROFILES,
        (
            Example('eval "$(torchrepro env debug-strict)"', "set them in this shell"),
            Example("torchrepro env debug-strict --format dotenv", "for a .env file"),
            Example(
                "torchrepro env debug-strict --format slurm", "for a job script, after #SBATCH"
            ),
        ),
    ),
    "schema": Row(
        PROFILES,
        (
            Example("torchrepro schema", "every key of a profile, and what it may be"),
            Example("torchrepro schema > profile.schema.json", "for an editor that completes keys"),
        ),
    ),
    "new-pack": Row(
        PROFILES,
        (
            Example("torchrepro new-pack acme", "a package for the profiles of a team"),
            Example("torchrepro new-pack packs/acme --json", "and its files as JSON"),
        ),
    ),
    "lock": Row(
        LOCKS,
        (
            Example("torchrepro lock debug-strict", "write repro.lock, to be committed"),
            Example("torchrepro lock debug-strict seed=7 -o gpu.lock", "another seed and file"),
        ),
    ),
    "check": Row(
        LOCKS,
        (
            Example("torchrepro check repro.lock", "exit status 1 if numbers may change here"),
            Example("torchrepro check repro.lock --strict", "forbid every other difference too"),
        ),
    ),
    "diff": Row(
        LOCKS,
        (
            Example("torchrepro diff debug-strict train-fast", "two profiles"),
            Example("torchrepro diff runs/a runs/b", "two runs"),
            Example("torchrepro diff repro.lock debug-strict", "a lock and its profile as it is"),
        ),
    ),
    "doctor": Row(
        MACHINE,
        (
            Example("torchrepro doctor", "what is in the way of debug-strict here"),
            Example("torchrepro doctor npu-align", "and of another profile"),
        ),
    ),
    "selftest": Row(
        MACHINE,
        (
            Example("torchrepro selftest", "what is held here, on each device, in half a minute"),
            Example("torchrepro selftest --json", "with the facts of the machine, to be sent"),
        ),
    ),
}

FIRST_STEPS = (
    Example("torchrepro quickstart", "write a program and a profile to try it on"),
    Example("torchrepro verify -- python train.py", "does yours compute the same twice?"),
    Example("torchrepro run debug-strict -- python train.py", "run it so that it does"),
    Example("torchrepro --help", "every command; COMMAND --help shows examples"),
)
"""What `torchrepro` alone says to do first."""


class Command(TyperCommand):
    """A command whose help names a type only where a value of that type is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command; every error shows the usage and names --help.

        The parser leaves it out of an error about an option without its value.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:
                error.__dict__.update(ctx=ctx, cmd=ctx.command)
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return _without_idle_types(super().get_params(ctx))


class StartingCommand(Command):
    """A command that starts the command after `--`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        given = "-- COMMAND..."
        known = ROWS[self.name or ""].knows_a_command
        ours = super().collect_usage_pieces(ctx)
        for param in self.get_params(ctx):
            if getattr(param, "hidden", False) and isinstance(param, TyperArgument):
                ours = [piece for piece in ours if piece not in param.get_usage_pieces(ctx)]
        return [*ours, f"[{given}]" if known else given]


class Commands(TyperGroup):
    """All commands, in the order of `ROWS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the help."""
        names = super().list_commands(ctx)
        return sorted(names, key=list(ROWS).index)

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options."""
        return _without_idle_types(super().get_params(ctx))


def _without_idle_types(params: list[Any]) -> list[Any]:
    """Take the type away from flags, which take no value, and from arguments, which have a name.

    Of an argument typer offers no setting for that. A version that asks another method than this
    shows the type again, and nothing else changes.
    """
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif isinstance(param, TyperArgument):
            param.display_type_rich = _no_type  # type: ignore[method-assign]
    return params


def _no_type(ctx: Any) -> str | None:
    return None


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the command `name`, with the group and the examples of its row."""
    row = ROWS[name]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        decorate = app.command(
            name,
            cls=StartingCommand if row.starts_a_command else Command,
            help=_paragraphs(function),
            rich_help_panel=row.group,
            # One paragraph each: versions of typer differ in whether they keep single line breaks.
            epilog="\n\n".join(
                ["Examples:", *(f"{each.line}\n    {each.what}" for each in row.examples)]
            ),
        )
        return decorate(function)

    return register


def _paragraphs(function: Callable[..., Any]) -> str:
    """Return the docstring with each paragraph on one line, to be wrapped where it is shown."""
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
