"""Every command in the order of use: the group it is shown in, and examples of it.

A new command is a row here and a function that `command` decorates.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from typer.core import TyperArgument, TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

RUNS = "Runs"
PROFILES = "Profiles"
LOCKS = "Hold runs to a lock"
MACHINE = "This machine"


class Example(NamedTuple):
    """A command line that works as it is written, and what it is for."""

    line: str
    what: str


class Row(NamedTuple):
    """How the help shows one command."""

    group: str
    examples: tuple[Example, ...]
    starts: str = ""
    """The command that it starts, as its usage shows it; in brackets where it knows one itself."""


def _row(group: str, *examples: tuple[str, str], starts: str = "") -> Row:
    return Row(group, tuple(map(Example._make, examples)), starts)


ROWS: dict[str, Row] = {
    "quickstart": _row(
        RUNS,
        ("torchrepro quickstart", "into this folder"),
        ("torchrepro quickstart first-try", "into a folder of its own"),
    ),
    "run": _row(
        RUNS,
        ("torchrepro run debug-strict -- python train.py", "a run under the profile"),
        (
            "torchrepro run debug-strict --record runs/a -- python train.py",
            "record what it computes, for `torchrepro compare`",
        ),
        ("torchrepro run --lock repro.lock -- python train.py", "start only if the lock is met"),
        starts="-- COMMAND...",
    ),
    "rerun": _row(
        RUNS,
        ("torchrepro rerun outputs/2026-11-20/10-30-00", "a Hydra job once more"),
        ("torchrepro rerun runs/a --dry-run", "what differs from then; starts nothing"),
        (
            "torchrepro rerun runs/a -- python train.py --token $TOKEN",
            "with the arguments that its manifest hides",
        ),
        starts="[-- COMMAND...]",
    ),
    "verify": _row(
        RUNS,
        ("torchrepro verify -- python train.py", "two runs of the program as it is"),
        ("torchrepro verify debug-strict -- python train.py", "two runs under a profile"),
        (
            "torchrepro verify debug-strict --stress --open -- python train.py",
            "perturb what must not matter, and show the page of the verdict",
        ),
        starts="-- COMMAND...",
    ),
    "compare": _row(
        RUNS,
        ("torchrepro compare runs/a runs/b", "the first op whose results differ"),
        ("torchrepro compare runs/a runs/b --open", "the same as a page in the browser"),
        (
            "torchrepro compare runs/a runs/b --rtol 1e-3 --atol 1e-5",
            "the same numbers within a tolerance: needs runs with --statistics",
        ),
    ),
    "list": _row(
        PROFILES,
        ("torchrepro list", "the profiles that can be named here"),
        ("torchrepro list --pieces", "what can be laid on top of a profile"),
    ),
    "show": _row(
        PROFILES,
        ("torchrepro show debug-strict", "every value of the profile"),
        ("torchrepro show debug-strict seed=7", "the same with another seed"),
        ("torchrepro show debug-strict --origin", "the file and line of each value"),
    ),
    "plan": _row(
        PROFILES,
        ("torchrepro plan debug-strict", "what each setting would become here, and why"),
        ("torchrepro plan train-fast seed=7 --json", "the same as one JSON document"),
    ),
    "explain": _row(
        PROFILES,
        ("torchrepro explain backends.cudnn.benchmark", "by the key in a profile"),
        ("torchrepro explain CUBLAS_WORKSPACE_CONFIG", "by the name of a variable"),
    ),
    "env": _row(
        PROFILES,
        ('eval "$(torchrepro env debug-strict)"', "set them in this shell"),
        ("torchrepro env debug-strict --format dotenv", "for a .env file"),
        ("torchrepro env debug-strict --format slurm", "for a job script, after #SBATCH"),
    ),
    "schema": _row(
        PROFILES,
        ("torchrepro schema", "every key of a profile, and what it may be"),
        ("torchrepro schema > profile.schema.json", "for an editor that completes keys"),
    ),
    "new-pack": _row(
        PROFILES,
        ("torchrepro new-pack acme", "a package for the profiles of a team"),
        ("torchrepro new-pack packs/acme --json", "and its files as JSON"),
    ),
    "lock": _row(
        LOCKS,
        ("torchrepro lock debug-strict", "write repro.lock, to be committed"),
        ("torchrepro lock debug-strict seed=7 -o gpu.lock", "another seed and file"),
    ),
    "check": _row(
        LOCKS,
        ("torchrepro check repro.lock", "exit status 1 if numbers may change here"),
        ("torchrepro check repro.lock --strict", "forbid every other difference too"),
    ),
    "diff": _row(
        LOCKS,
        ("torchrepro diff debug-strict train-fast", "two profiles"),
        ("torchrepro diff runs/a runs/b", "two runs"),
        ("torchrepro diff repro.lock debug-strict", "a lock and its profile as it is"),
    ),
    "doctor": _row(
        MACHINE,
        ("torchrepro doctor", "what is in the way of debug-strict here"),
        ("torchrepro doctor npu-align", "and of another profile"),
    ),
    "selftest": _row(
        MACHINE,
        ("torchrepro selftest", "what is held here, on each device, in half a minute"),
        ("torchrepro selftest --json", "with the facts of the machine, to be sent"),
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


def command(app: typer.Typer, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the command `name`, with the group and the examples of its row."""
    row = ROWS[name]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        # Each paragraph is one line: versions of typer differ in whether they keep line breaks.
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        examples = (f"{each.line}\n    {each.what}" for each in row.examples)
        decorate = app.command(
            name,
            cls=Command,
            help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
            rich_help_panel=row.group,
            epilog="\n\n".join(["Examples:", *examples]),
        )
        return decorate(function)

    return register
