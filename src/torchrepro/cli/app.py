"""The basis of all commands: table of examples, app, shared arguments, progress and output.

To add a command, add its examples to `HELP` and decorate a function with `command`.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar, get_origin, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

import torchrepro
from torchrepro.ground.console import Verbosity, environment_for, show
from torchrepro.ground.errors import ProfileError
from torchrepro.ground.patching import variables_restored

if TYPE_CHECKING:
    from torchrepro.ground.console import Part
    from torchrepro.profile.resolved import ResolvedProfile


Options = TypeVar("Options")
"""A dataclass with the options of a command."""

_BY_NAME = inspect.Parameter.KEYWORD_ONLY

HELP = """\
Runs
torchrepro quickstart  # write into the current folder
torchrepro quickstart first-try  # write into the new folder first-try
torchrepro run debug-strict -- python train.py  # run under the profile
torchrepro run debug-strict --record runs/a -- python train.py
    # record the results of every op, for `torchrepro compare`
torchrepro run --lock repro.lock -- python train.py  # start only if the lock is met
torchrepro rerun outputs/2026-11-20/10-30-00  # run a Hydra job again
torchrepro rerun runs/a --dry-run  # show what differs from that run; start nothing
torchrepro rerun runs/a -- python train.py --token $TOKEN
    # pass the arguments that the manifest hides
torchrepro verify -- python train.py  # two runs of the unchanged program
torchrepro verify debug-strict -- python train.py  # two runs under a profile
torchrepro verify debug-strict --stress --open -- python train.py
    # perturb what must not affect results, and open the verdict in the browser
torchrepro compare runs/a runs/b  # find the first op whose results differ
torchrepro compare runs/a runs/b --open  # show the answer as a page in the browser
torchrepro compare runs/a runs/b --rtol 1e-3 --atol 1e-5
    # equal within a tolerance: needs runs recorded with --statistics
Profiles
torchrepro list  # the profiles that you can use here
torchrepro list --pieces  # the pieces that you can add to a profile
torchrepro show debug-strict  # every value of the profile
torchrepro show debug-strict seed=7  # with another seed
torchrepro show debug-strict --origin  # the file and line of each value
torchrepro plan debug-strict  # what would happen to each setting here, and why
torchrepro plan train-fast seed=7 --json  # the plan as one JSON document
torchrepro explain set-order  # a cause that a verdict names
torchrepro explain backends.cudnn.benchmark  # a key of a profile
torchrepro explain CUBLAS_WORKSPACE_CONFIG  # an environment variable
eval "$(torchrepro env debug-strict)"  # set the variables in this shell
torchrepro env debug-strict --format dotenv  # for a .env file
torchrepro env debug-strict --format slurm  # for a job script, after #SBATCH
torchrepro schema  # every key of a profile and its legal values
torchrepro schema > profile.schema.json  # for an editor that completes keys
torchrepro new-pack acme  # a package for the profiles of a team
torchrepro new-pack packs/acme --json  # list the written files as JSON
Check later runs against a lock
torchrepro lock debug-strict  # write repro.lock, to be committed
torchrepro lock debug-strict seed=7 -o gpu.lock  # another seed and file
torchrepro lock debug-strict -- python train.py  # also record losses and parameters
torchrepro check repro.lock  # exit status 1 if results may change on this machine
torchrepro check repro.lock -- python train.py  # if results changed, find out why
torchrepro check repro.lock --update "addmm of torch 2.14" -- python train.py
    # accept the new results, and note the reason
torchrepro diff debug-strict train-fast  # two profiles
torchrepro diff runs/a runs/b  # two runs
torchrepro diff repro.lock debug-strict  # a lock and the current profile
This machine
torchrepro doctor  # what would prevent debug-strict from taking effect here
torchrepro doctor npu-align  # the same for another profile
torchrepro selftest  # which guarantees work here, on each device, in half a minute
torchrepro selftest --json  # with a description of the machine, for a bug report
"""
"""Every command below its group: command lines that work as written, with their purpose."""


OPTIONS = """\
--lock FILE: Use this lock's profile; start only if it is met.
--record DIR: Record the run into this new or empty folder.
--log-to DIR: Write the manifest into this folder; --record DIR does so, too.
--level: How much to record.
--every N: Record steps 0, N, 2N, ... in full, and the others at level step.
--max-size SIZE: The limit of the recording on disk, such as 500MB: the oldest records are dropped.
    Each rank gets an equal share.
--keep MODULE: Store the full tensors of the modules that match this pattern.
--statistics: Record statistics, so that runs can be compared within a tolerance; a profile with
    the guarantee `aligned` always does.
--detail: Read every input again, to detect changes made outside of torch.
--on-unwritable: What to do if the trace cannot be written.
--strict: Start only if no difference may affect results.
--dry-run: Show what differs and what would be started.
--stress: Perturb what must not affect results: memory, timing, file order and more.
--escalate: Find the settings that make diverging runs equal.
--no-closer: Do not repeat diverging runs to record more detail.
--folder DIR: Keep the recordings in this new or empty folder.
--rtol: Relative tolerance.
--atol: Absolute tolerance.
--ignore FILE:LINE: Ignore the ops of this line and those that depend only on them.
--relation: Compare with a run in another way that ought to agree; see above.
--checkpoint GLOB: The files of a checkpoint, for resume.
--resume-command TEXT: The command that resumes from {checkpoint}, if it is another one.
--bisect: For `git bisect run`: exit 125 if there is no answer, yes or no.
--report FILE.html: Write the answer as one self-contained page.
"""
"""The options of the commands that take theirs as one value: the name, METAVAR, and the help."""


class CommandHelp(NamedTuple):
    """The group of a command in the help, and the examples that the help shows."""

    group: str
    examples: list[tuple[str, str]]

    @property
    def starts(self) -> str:
        """The usage text for the command to start, in brackets if users may omit that command."""
        has_command = [" -- " in line for line, _ in self.examples]
        return "-- COMMAND..." if all(has_command) else "[-- COMMAND...]" * any(has_command)


def _rows() -> dict[str, CommandHelp]:
    """Return the help of each command, parsed from `HELP`."""
    group, rows = "", dict[str, CommandHelp]()
    for line in HELP.replace("\n    #", "  #").splitlines():
        example, _, purpose = line.partition("  # ")
        if not purpose:
            group = line
            continue
        name = example.partition("torchrepro ")[2].split()[0]
        rows.setdefault(name, CommandHelp(group, [])).examples.append((example, purpose))
    return rows


ROWS = _rows()

FIRST_STEPS = (
    ("torchrepro quickstart", "write an example program and a profile"),
    ("torchrepro verify -- python train.py", "do two runs of your program agree?"),
    ("torchrepro run debug-strict -- python train.py", "run it so that they do"),
    ("torchrepro --help", "every command; COMMAND --help shows examples"),
)
"""The first steps that `torchrepro` without arguments suggests."""


class Command(TyperCommand):
    """A command whose help shows a type only for options that take a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command. Every error shows the usage and mentions --help."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # An error about an option without a value has no context, so no usage is shown.
            if getattr(error, "ctx", ctx) is None:
                error.__dict__.update(ctx=ctx, cmd=ctx.command)
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_idle_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        usage = super().collect_usage_pieces(ctx)
        starts = ROWS[self.name or ""].starts
        if not starts:
            return usage
        for param in self.get_params(ctx):
            if getattr(param, "hidden", False) and isinstance(param, TyperArgument):
                usage = [piece for piece in usage if piece not in param.get_usage_pieces(ctx)]
        return [*usage, starts]


class Commands(TyperGroup):
    """All commands, in the order of `ROWS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=list(ROWS).index)

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_idle_types(super().get_params(ctx))


def _without_idle_types(params: list[Any]) -> list[Any]:
    """Hide the type of flags, which take no value, and of arguments, which show a name."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif isinstance(param, TyperArgument):
            # typer has no setting for this. If typer calls another method, the type is shown again.
            param.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
    return params


VERBOSITY = "torchrepro.verbosity"
"""The key of typer's context under which `--quiet` or `--verbose` is stored."""

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
def show_first_steps(
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
        lines = [f"  {line:{width}}  {purpose}" for line, purpose in FIRST_STEPS]
        head = "torchrepro makes PyTorch runs reproducible. First steps:"
        sys.stdout.write("\n".join([head, *lines, ""]))


def command(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the command `name`, with the group and the examples from `ROWS`."""
    row = ROWS[name]

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        # Each paragraph is one line: versions of typer differ in whether they keep line breaks.
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        examples = (f"{line}\n    {purpose}" for line, purpose in row.examples)
        decorate = app.command(
            name,
            cls=Command,
            help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
            rich_help_panel=row.group,
            epilog="\n\n".join(["Examples:", *examples]),
        )
        return decorate(function)

    return register


def _described_options() -> dict[str, Any]:
    """Return the option that each line of `OPTIONS` describes, by the name of its field."""
    described = {}
    for line in OPTIONS.replace("\n    ", " ").splitlines():
        names, _, text = line.partition(": ")
        name, *metavar = names.split()
        option = typer.Option(name, metavar=" ".join(metavar) or None, help=text)
        described[name.strip("-").replace("-", "_")] = option
    return described


def taking(
    options: type[Options],
) -> Callable[[Callable[[typer.Context, Options], None]], Callable[..., None]]:
    """Pass the options of a command as one value: an instance of the dataclass `options`.

    `OPTIONS` describes a field of `options`, unless the annotation of the field does. typer reads
    options from the parameters of a function, and a command may have twenty. So typer gets a
    function with a parameter for each field.
    """
    described, hints = _described_options(), get_type_hints(options, include_extras=True)
    parameters = [inspect.Parameter("context", _BY_NAME, annotation=typer.Context)]
    for parameter in inspect.signature(options).parameters.values():
        hint = hints[parameter.name]
        if get_origin(hint) is not Annotated:
            hint = Annotated[hint, described[parameter.name]]
        parameters.append(parameter.replace(annotation=hint, kind=_BY_NAME))

    def decorate(function: Callable[[typer.Context, Options], None]) -> Callable[..., None]:
        def call(context: typer.Context, **values: Any) -> None:
            function(context, options(**values))

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        call.__doc__ = function.__doc__
        return call

    return decorate


def _complete(incomplete: str) -> list[str]:
    from torchrepro.profile.search_path import search_path

    names = {name for folder in search_path() for name in folder.names()}
    return sorted(name for name in names if name.startswith(incomplete))


ProfileName = Annotated[
    str,
    typer.Argument(
        metavar="PROFILE",
        help="A name from `torchrepro list`, a path to a YAML file, or pkg://package.path/name.",
        autocompletion=_complete,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDE",
        help="Change a value of the profile: seed=7 or backends.cudnn.benchmark=false.",
    ),
]


def _set_variables(context: typer.Context, variables: Mapping[str, str]) -> None:
    """Set variables in this process and its children until the command ends."""
    context.with_resource(variables_restored(variables))
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
        help="Allow the profile to set this variable, which is not on the list of safe ones.",
    ),
]
"""For every command that reads a profile. The callback acts; commands ignore the value."""


def _setting_verbosity(wanted: Verbosity) -> Callable[[typer.Context, bool], None]:
    def set_verbosity(context: typer.Context, given: bool) -> None:  # noqa: FBT001 - an option
        if not given or context.resilient_parsing:
            return
        if context.meta.setdefault(VERBOSITY, wanted) is not wanted:
            context.close()  # restores the variables that the first option has set
            raise typer.BadParameter("--quiet and --verbose contradict each other")
        _set_variables(context, environment_for(wanted))

    return set_verbosity


Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        callback=_setting_verbosity(Verbosity.VERBOSE),
        help="Show every setting at the start; same as TORCHREPRO_VERBOSE=1.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        callback=_setting_verbosity(Verbosity.QUIET),
        help="Show only errors and a lowered guarantee; same as TORCHREPRO_QUIET=1.",
    ),
]
"""The callbacks of both act; they win over the environment variables."""

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def answer(value: Any, shown: Iterable[Part], *, as_json: bool) -> None:
    """Print the answer of a command: `value` as JSON, or `shown` as tables and lines."""
    if as_json:
        print_json(value)
    else:
        show(*shown)


def resolved_profile(profile: str, overrides: list[str] | None) -> ResolvedProfile:
    """Return a profile with `overrides` applied. Raises `ProfileError` if any is not valid."""
    from torchrepro.profile.load import load

    if "=" in profile and not Path(profile).exists():
        todo = "name the profile"
        raise ProfileError.about("an override without a profile", found=profile, todo=todo)
    for text in overrides or ():
        if "=" not in text and not text.startswith("~"):
            both = f"defaults: [{profile}, {text}, _self_]"
            todo = f"write key=value, or a profile that inherits both: {both}"
            problem = "not an override, and a command takes one profile"
            raise ProfileError.about(problem, found=text, todo=todo)
    return load(profile, overrides or ()).resolved


IMPORTING = "importing torch"


class Progress:
    """Writes lines to stderr. On a terminal, also shows a status text, which is erased later."""

    def __init__(self) -> None:
        self._status = ""
        self.is_watched = sys.stderr is not None and sys.stderr.isatty()
        """Whether the status is shown: only on a terminal."""

    def say(self, text: str) -> None:
        """Write text that stays. The text does not have to end with a line break."""
        self.erase()
        _write(text)

    def for_now(self, text: str) -> None:
        """Show `text` as the status until the next text."""
        if self.is_watched:
            self.erase()
            self._status = text
            _write(text)

    def erase(self) -> None:
        """Erase the status."""
        back = "\b" * len(self._status)
        if back:
            _write(f"{back}{' ' * len(back)}{back}")
        self._status = ""


@contextmanager
def doing(activity: str) -> Iterator[None]:
    """Show `activity` on a terminal while the block runs."""
    progress = Progress()
    progress.for_now(f"{activity} ...")
    try:
        yield
    finally:
        progress.erase()


def _write(text: str) -> None:
    if sys.stderr is not None:  # None if it was closed, as in some services
        sys.stderr.write(text)
        sys.stderr.flush()
