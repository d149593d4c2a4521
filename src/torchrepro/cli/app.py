"""The basis of all commands: table of examples, app, shared arguments, progress and output.

To add a command, add its examples to `HELP`, describe its parameters in `OPTIONS`, and decorate a
function with `command`.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

import torchrepro
from torchrepro.ground.console import Verbosity, environment_for, say, show
from torchrepro.ground.errors import ProfileError, TraceError, near
from torchrepro.ground.patching import variables_restored
from torchrepro.ground.writing import write_in_place

if TYPE_CHECKING:
    from torchrepro.ground.console import Part
    from torchrepro.profile.resolved import ResolvedProfile


_BY_NAME = inspect.Parameter.KEYWORD_ONLY

HELP = """\
Runs
torchrepro demo  # a program that does not repeat, its line, and a profile that makes it repeat
torchrepro demo --keep first-try  # keep its files, and change them
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
Checkpoints
torchrepro digest model.pt  # digests of all tensors, equal in every file format
torchrepro digest model.pt model.safetensors  # which tensors differ, and by how much
torchrepro digest model.pt checkpoints/step-500 --json  # a folder of DCP; all digits
This machine
torchrepro doctor  # what would prevent debug-strict from taking effect here
torchrepro doctor npu-align  # the same for another profile
torchrepro selftest  # which guarantees work here, on each device, in half a minute
torchrepro selftest --json  # with a description of the machine, for a bug report
"""
"""Every command below its group: command lines that work as written, with their purpose."""


OPTIONS = """\
--version: Show the version and exit.
profile PROFILE: A name from `torchrepro list`, a path to a YAML file, or pkg://package.path/name.
overrides OVERRIDE: Change a value of the profile: seed=7 or backends.cudnn.benchmark=false.
--allow-env NAME: Allow the profile to set this variable, which is not on the list of safe ones.
as_json --json: Print one JSON document and nothing else.
rerun/as_json --json: As --dry-run, in one JSON document.
--verbose: Show every setting at the start; same as TORCHREPRO_VERBOSE=1.
--quiet: Show only errors and a lowered guarantee; same as TORCHREPRO_QUIET=1.
only_pieces --pieces: Show the pieces that you can add to a profile.
--origin: Show which file or override set each value.
form --format: The program or kind of file that reads them.
explain/name NAME: A cause, a key of a profile, a variable or an alias.
demo/--keep DIR: Write the files to DIR, and keep them.
quickstart/folder DIR: The folder to write to; created if missing.
name NAME: The name of the pack, or the path of its new folder.
lock/--output -o FILE: The lock file to write.
--steps FIRST:LAST: Record only these steps. A step is a call of an optimizer's step(); the first
    is 0.
lock/--every N: Lock the results of steps 0, N, 2N, ... only.
check/lock FILE: A lock.
check/--strict: Fail also for differences that should not affect results.
--no-blame: Do not find out what changed the results.
--update REASON: Lock the results that COMMAND has now, and note this reason.
diff/left A: A profile, a manifest, a lock, or the folder of a run.
diff/right B: A profile, a manifest, a lock, or the folder of a run.
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
run DIR: A manifest, or the folder of a run that has one.
--output -o DIR: The folder of the new run.
--strict: Start only if no difference may affect results.
--dry-run: Show what differs and what would be started.
left RUN_A: The folder of a recording.
right RUN_B: The folder of another.
--runs: How often to run the command.
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
files FILE: A file of torch.save or safetensors; a DCP folder.
--report FILE.html: Write the answer as one self-contained page.
open_page --open: Show the answer as a page in the browser, see --report.
"""
"""The arguments and options of all commands: the names, METAVAR, and the help.

The first name is the parameter's name; an option's long name replaces an equal one. A row that
begins with the name of a command replaces the common row for this command.
"""

Texts = list[str] | None
"""The type of a parameter with any number of values; without a value, it is None."""


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
    ("torchrepro demo", "see it on a small program, in half a minute"),
    ("torchrepro verify -- python train.py", "do two runs of your program agree?"),
    ("torchrepro run debug-strict -- python train.py", "run it so that they do"),
    ("torchrepro --help", "every command; COMMAND --help shows examples"),
)
"""The first steps that `torchrepro` without arguments suggests."""


class Command(TyperCommand):
    """A command whose help shows a type only for options that take a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words after the command. Every error shows the usage and mentions --help.

        An error about a wrong choice shows a near match.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # An error about an option without a value has no context, so no usage is shown.
            if getattr(error, "ctx", ctx) is None:
                error.__dict__.update(ctx=ctx, cmd=ctx.command)
            # Versions of typer keep choices in different places, but all show them in this message.
            text = str(getattr(error, "message", "")).removeprefix("Value error, ")
            wrong, is_choice, choices = text.partition(" is not one of ")
            if is_choice:
                match = near(wrong, re.findall(r"'([^']*)'", choices))
                error.__dict__["message"] = text + f" Did you mean '{match}'?" * bool(match)
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_idle_types(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        usage, starts = super().collect_usage_pieces(ctx), ROWS[self.name or ""].starts
        return [*usage, starts] if starts else usage


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
    version: Annotated[bool, _described_options()["version"]] = False,  # noqa: FBT002 - an option
) -> None:
    """Reproducible PyTorch runs from one declared profile."""
    if context.invoked_subcommand is None:
        width = max(len(line) for line, _ in FIRST_STEPS)
        lines = [f"  {line:{width}}  {purpose}" for line, purpose in FIRST_STEPS]
        head = "torchrepro makes PyTorch runs reproducible. First steps:"
        sys.stdout.write("\n".join([head, *lines, ""]))


def command(
    name: str, options: type[Any] | None = None, **context_settings: bool
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as the command `name`, with the texts in `ROWS` and `OPTIONS`.

    A command may have twenty parameters. Such a function takes typer's context and one value: an
    instance of the dataclass `options`, whose fields are the parameters.
    """
    row, described = ROWS[name], _described_options()

    def register(function: Callable[..., None]) -> Callable[..., None]:
        taken = options or function
        hints, parameters = get_type_hints(taken), []
        for parameter in inspect.signature(taken).parameters.values():
            hint = hints[parameter.name]
            if hint is not typer.Context:
                option = described.get(f"{name}/{parameter.name}") or described[parameter.name]
                hint = Annotated[hint, option]
            parameters.append(parameter.replace(annotation=hint, kind=_BY_NAME))
        if options is not None:
            parameters.append(inspect.Parameter("context", _BY_NAME, annotation=typer.Context))

        def call(**values: Any) -> None:
            if options is None:
                function(**values)
            else:
                function(values.pop("context"), options(**values))

        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        # Each paragraph is one line: versions of typer differ in whether they keep line breaks.
        paragraphs = (inspect.getdoc(function) or "").split("\n\n")
        examples = (f"{line}\n    {purpose}" for line, purpose in row.examples)
        decorate = app.command(
            name,
            cls=Command,
            help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
            rich_help_panel=row.group,
            epilog="\n\n".join(["Examples:", *examples]),
            context_settings=context_settings,
        )
        return decorate(call)

    return register


@cache
def _described_options() -> dict[str, Any]:
    """Return the argument or option that each row of `OPTIONS` describes, by the parameter."""
    described = {}
    for line in OPTIONS.replace("\n    ", " ").splitlines():
        names, _, text = line.partition(": ")
        of_command, slash, names = names.rpartition("/")
        name, *words = names.split()
        options = [word for word in (name, *words) if word.startswith("-")]
        metavar = next((word for word in words if word not in options), None)
        describe = typer.Option if options else typer.Argument
        field = name.strip("-").replace("-", "_")
        settings = SETTINGS.get(field, {})
        described[f"{of_command}{slash}{field}"] = describe(
            *options, metavar=metavar, help=text, **settings
        )
    return described


def _complete(incomplete: str) -> list[str]:
    from torchrepro.profile.search_path import search_path

    names = {name for folder in search_path() for name in folder.names()}
    return sorted(name for name in names if name.startswith(incomplete))


def _set_variables(context: typer.Context, variables: Mapping[str, str]) -> None:
    """Set variables in this process and its children until the command ends."""
    context.with_resource(variables_restored(variables))
    os.environ.update(variables)


def _consent(context: typer.Context, names: list[str] | None) -> None:
    if names and not context.resilient_parsing:
        from torchrepro.profile.schema import VARIABLE, allowed_by

        _set_variables(context, {VARIABLE: allowed_by(names)})


def _setting_verbosity(wanted: Verbosity) -> Callable[[typer.Context, bool], None]:
    def set_verbosity(context: typer.Context, given: bool) -> None:  # noqa: FBT001 - an option
        if not given or context.resilient_parsing:
            return
        if context.meta.setdefault(VERBOSITY, wanted) is not wanted:
            context.close()  # restores the variables that the first option has set
            raise typer.BadParameter("--quiet and --verbose contradict each other")
        _set_variables(context, environment_for(wanted))

    return set_verbosity


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "version": {"is_eager": True, "callback": _show_version},
    "profile": {"autocompletion": _complete},
    "allow_env": {"callback": _consent},
    "verbose": {"callback": _setting_verbosity(Verbosity.VERBOSE)},
    "quiet": {"callback": _setting_verbosity(Verbosity.QUIET)},
    "runs": {"min": 2},
}
"""The parameters that need more than a row of `OPTIONS`.

Commands ignore the values of the options with a callback, because the callback acts. `--verbose`
and `--quiet` win over the environment variables.
"""


def print_json(value: Any) -> None:
    """Print a value as one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def answer(value: Any, shown: Iterable[Part], *, as_json: bool) -> None:
    """Print the answer of a command: `value` as JSON, or `shown` as tables and lines."""
    if as_json:
        print_json(value)
    else:
        show(*shown)


def check_page_path(report: str) -> None:
    """Raise `TraceError` if the page cannot be written, before hours are spent on the runs."""
    path = Path(report)
    if report and (path.is_dir() or not path.absolute().parent.is_dir()):
        todo = "name a file in an existing folder"
        raise TraceError.about("the page cannot be written to it", found=report, todo=todo)


def offer_page(page: Callable[[], str], report: str, *, opened: bool) -> None:
    """Write the page of an answer into `report`, and show it in a browser if `opened`."""
    if not report and not opened:
        return
    if not report:
        # The file is never removed: a browser reads it after the command has ended.
        descriptor, report = tempfile.mkstemp(prefix="torchrepro-", suffix=".html")
        os.close(descriptor)
    path = Path(report)
    write_in_place(path, page(), "the page")
    say(f"the page is in {path}")
    if opened:
        import webbrowser

        if not webbrowser.open(path.absolute().as_uri()):
            say("no browser could be started: open the file on a machine that has one")


def conclude(
    value: Any,
    shown: Sequence[Part],
    page: Callable[[], str],
    *,
    report: str,
    opened: bool = False,
    status: int,
    as_json: bool,
) -> NoReturn:
    """Do as `answer`, also in a step of GitHub Actions, then as `offer_page`, and exit."""
    from torchrepro.cli.github_step import show_in_step

    answer(value, shown, as_json=as_json)
    show_in_step(value, shown, passed=not status)
    offer_page(page, report, opened=opened)
    raise typer.Exit(status)


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
