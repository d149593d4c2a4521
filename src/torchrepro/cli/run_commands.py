"""The commands about runs: lock, check, diff, run, rerun, compare, verify and selftest.

Each calls one function of the package and prints its answer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrepro.cli.app import (
    IMPORTING,
    AllowEnv,
    Json,
    Overrides,
    ProfileName,
    Progress,
    Quiet,
    Verbose,
    answer,
    command,
    doing,
    print_json,
    resolved_profile,
)
from torchrepro.ground.console import Verbosity, parts, say, show_aside, verbosity
from torchrepro.ground.errors import ProfileError, TorchreproError, TraceError
from torchrepro.ground.writing import write_in_place
from torchrepro.manifest.contents import LOG_TO, OtherMachineError, refuse_used_folder
from torchrepro.trace.request import VARIABLE, RecordingRequest, bytes_of, is_range

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile


Level = StrEnum("Level", "STEP MODULE OP")  # how much of a run is recorded
RelationName = StrEnum("RelationName", "RESUME WORKERS COMPILE")
Unwritable = StrEnum("Unwritable", "STOP WARN")  # what a run does whose trace cannot be written

BISECT = 125  # the exit status by which `git bisect run` passes a commit over

Record = Annotated[
    str, typer.Option(metavar="DIR", help="Record what is computed into a new or empty folder.")
]
Steps = Annotated[
    str,
    typer.Option(
        metavar="FIRST:LAST",
        help="Record only these steps, counted from 0 by calls of an optimizer's step().",
    ),
]
Every = Annotated[
    str,
    typer.Option(
        metavar="N", help="Record steps 0, N, 2N, ... in full, and all others at level step."
    ),
]
MaxSize = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="What the recording may take on disk, as in 500MB: the oldest records are dropped. "
        "Each rank has an equal share.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE", help="Keep all values of the tensors of these modules; a pattern."
    ),
]

Ignore = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE:LINE", help="Leave out what this line computes, and what only that feeds."
    ),
]

Report = Annotated[
    str, typer.Option(metavar="FILE.html", help="Write the answer as one self-contained page.")
]
Open = Annotated[
    bool, typer.Option("--open", help="Show the answer as a page in the browser, see --report.")
]
DIGITS = 19  # no run has a step with a number of so many

Side = "A profile, a manifest, a lock, or the folder of a run."


@command("lock")
def lock_profile(  # noqa: PLR0913, PLR0917 - options of the command line
    context: typer.Context,
    profile: ProfileName,
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where the lock is written.")
    ] = "repro.lock",
    steps: Steps = "",
    every: Annotated[
        str, typer.Option(metavar="N", help="Hold the numbers of steps 0, N, 2N, ... only.")
    ] = "",
    as_json: Json = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Write a lock: what a run of the profile is here, for later runs to be checked against.

    With COMMAND, which is run twice, it holds the numbers of each step as well: losses and a digest
    of the parameters. If they do not repeat, nothing is written.
    """
    from torchrepro.lock.lock_file import write_lock

    resolved_profile(profile, overrides)  # refuses a wrong one before torch is imported
    if not context.obj:
        if steps or every:
            todo = "write it after `--`: torchrepro lock PROFILE -- python train.py"
            raise ProfileError.about("steps, and no command that has any", todo=todo)
        with doing(IMPORTING):
            report = write_lock(Path(output), profile, overrides or ())
        its = {"lock": output, "written": True, "digest": report.digest}
        lines = (
            f"{output} locks {report.profile} ({report.guarantee}) as it is on this machine",
            f"  {report.digest}",
            f"  torchrepro check {output}",
            f"  torchrepro run --lock {output} -- COMMAND",
        )
        answer(its, lines, as_json=as_json)
        return
    from torchrepro.checking.attribution import LockedCommand
    from torchrepro.checking.check_runs import lock_numbers

    each = _number(every) if every else 1
    if not isinstance(each, int) or each < 1:
        legal = "as in 100, for steps 0, 100, 200, ..."
        raise TraceError.about("not a whole number from 1 on", "--every", found=every, legal=legal)
    asked = LockedCommand.here(context.obj, _steps(steps), each)
    with _progress() as options:
        found = lock_numbers(Path(output), profile, overrides or (), asked, **options)
    answer(found.to_json(), parts(found), as_json=as_json)
    raise typer.Exit(int(found.numbers is None))


@contextmanager
def _progress() -> Iterator[dict[str, Any]]:
    """Show how far runs are, and end as a shell shows it if a signal asks us to."""
    from torchrepro.verification.runner import Interrupted

    progress = Progress()
    silent = verbosity() is Verbosity.QUIET
    meanwhile = progress.for_now if progress.is_watched and not silent else None
    try:
        yield {"say": (lambda text: None) if silent else progress.say, "meanwhile": meanwhile}
    except Interrupted as stopped:
        raise typer.Exit(stopped.exit_status) from None
    finally:
        progress.erase()


@command("check")
def check_lock(
    context: typer.Context,
    lock: Annotated[str, typer.Argument(metavar="FILE", help="A lock.")],
    strict: Annotated[  # noqa: FBT002
        bool, typer.Option("--strict", help="Forbid also what should not change numbers.")
    ] = False,
    no_blame: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-blame", help="Do not find out who changed the numbers.")
    ] = False,
    update: Annotated[
        str | None,
        typer.Option(metavar="REASON", help="Write the numbers that COMMAND has now, and why."),
    ] = None,
    allow_env: AllowEnv = None,
    quiet: Quiet = False,  # noqa: FBT002
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say in what this machine differs from a lock, the likeliest first; exit 1 if it does.

    With COMMAND, that of the lock: whether it still computes the numbers of the lock, and if not,
    who changed them: your change, or the environment. The code of the lock is run for that.
    """
    from torchrepro.lock.lock_file import check

    if not context.obj:
        if update is not None or no_blame:
            _given_command(context, f"check {lock}")
        with doing(IMPORTING):
            found = check(Path(lock), strict=strict)
        answer(found.to_json(), parts(found), as_json=as_json)
        raise typer.Exit(int(not found.met))
    from torchrepro.checking.check_runs import check_numbers, update_numbers

    with _progress() as options:
        if update is not None:
            updated = update_numbers(Path(lock), context.obj, update, **options)
            answer(updated.to_json(), parts(updated), as_json=as_json)
            raise typer.Exit(int(updated.numbers is None))
        try:
            its = check_numbers(
                Path(lock), context.obj, strict=strict, blame=not no_blame, **options
            )
        except OtherMachineError as error:
            if as_json:
                numbers = {"same": None, "first": None, "who": None, "why": str(error)}
                print_json({"met": False, "lock": lock, "strict": strict, "numbers": numbers})
                raise typer.Exit(error.exit_status) from None
            raise
    answer(its.to_json(), parts(its), as_json=as_json)
    raise typer.Exit(int(not its.met))


@command("diff")
def show_differences(
    left: Annotated[str, typer.Argument(metavar="A", help=Side)],
    right: Annotated[str, typer.Argument(metavar="B", help=Side)],
    allow_env: AllowEnv = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say in what two profiles, manifests, locks or runs differ; exit 1 if they do."""
    from torchrepro.lock.diff import differences_of

    with doing(IMPORTING):
        found = differences_of(left, right)
    answer(found.to_json(), parts(found), as_json=as_json)
    raise typer.Exit(int(not found.same))


@command("run")
def run_command(  # noqa: PLR0913, PLR0917 - the options of a command
    context: typer.Context,
    profile: ProfileName = "",
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    lock: Annotated[
        str, typer.Option(metavar="FILE", help="Start only if this lock is met; names the profile.")
    ] = "",
    record: Record = "",
    log_to: Annotated[
        str,
        typer.Option(
            metavar="DIR", help="Write the manifest into this folder; --record DIR does so too."
        ),
    ] = "",
    level: Annotated[Level, typer.Option(help="How much is recorded.")] = Level.OP,
    steps: Steps = "",
    every: Every = "",
    max_size: MaxSize = "",
    keep: Keep = None,
    statistics: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--statistics",
            help="Record what comparing within a tolerance needs; so does `aligned`.",
        ),
    ] = False,
    detail: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--detail", help="Read every input again: sees what changed outside torch."),
    ] = False,
    on_unwritable: Annotated[
        Unwritable, typer.Option(help="What to do where the trace cannot be written.")
    ] = Unwritable.STOP,
    verbose: Verbose = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
) -> None:
    """Start a command with the profile in force from before Python starts.

    It is in force in COMMAND and in every Python process that COMMAND starts, unless one replaces
    PYTHONPATH or starts Python with -I, -E or -S.
    """
    from torchrepro.application.launch import start

    command = _given_command(context, f"run {profile or 'PROFILE'}")
    if lock:
        resolved = _locked_profile(lock, profile, overrides)
    elif profile:
        resolved = resolved_profile(profile, overrides)
    else:
        todo = "write one: torchrepro run PROFILE -- COMMAND"
        raise ProfileError.about("no profile is named", todo=todo)
    if log_to:
        refuse_used_folder(Path(log_to))
    more = {LOG_TO: os.path.abspath(log_to or record)} if log_to or record else {}  # noqa: PTH100 - text
    if lock:
        from torchrepro.application.guard import LOCKED

        more[LOCKED] = "1"
    if record:
        try:
            request = RecordingRequest(
                folder=record,
                level=level.value,
                steps=_steps(steps),
                keep=tuple(keep or ()),
                statistics=statistics or resolved.guarantee == "aligned",
                detail=detail,
                on_unwritable=on_unwritable.value,
                every=_number(every) if every else 1,
                max_size=bytes_of(max_size) if max_size else None,
            )
        except TraceError as error:
            raise _of_option(error) from None
        request.prepare_folder()
        more[VARIABLE] = request.to_variable()
    elif given := _given(context, OF_A_RECORDING):
        todo = "say where to: --record DIR"
        raise TraceError.about("nothing is recorded", key=", ".join(given), todo=todo)
    start(resolved, command, more)


def _of_option(error: TraceError) -> TraceError:
    key = error.problem.key
    return TraceError(error.problem._replace(key=_option(key))) if key in OF_A_RECORDING else error


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(context: typer.Context, names: Iterable[str]) -> list[str]:
    sources = [(name, context.get_parameter_source(name)) for name in names]
    return [_option(name) for name, its in sources if its and its.name == "COMMANDLINE"]


@command("rerun")
def rerun_command(  # noqa: PLR0913, PLR0917 - see above
    context: typer.Context,
    run: Annotated[
        str,
        typer.Argument(metavar="DIR", help="The folder of a run with a manifest, or a manifest."),
    ],
    more: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    allow_env: AllowEnv = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="The folder of the new run.")
    ] = "",
    strict: Annotated[  # noqa: FBT002
        bool, typer.Option("--strict", help="Start only if nothing that may matter differs.")
    ] = False,
    dry_run: Annotated[  # noqa: FBT002
        bool, typer.Option("--dry-run", help="Say what differs and what would be started.")
    ] = False,
    verbose: Verbose = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
    as_json: Annotated[  # noqa: FBT002
        bool, typer.Option("--json", help="Print that as one JSON document, and start nothing.")
    ] = False,
) -> None:
    """Start the command of an earlier run again, with its profile and overrides, in a new folder.

    What differs from then is said first. The values of the profile are those in the manifest,
    whatever its files hold now. COMMAND is needed only where the manifest hides arguments.
    """
    from torchrepro.application.launch import untouched
    from torchrepro.start.rerun import prepare

    if more:
        what = "a rerun takes one folder and no overrides: it is under the original profile"
        todo = "for another profile start anew: torchrepro run PROFILE OVERRIDES -- COMMAND"
        raise ProfileError.about(what, found=" ".join(more), todo=todo)
    given = _given_command(context, f"rerun {run}") if context.obj is not None else ()
    with untouched(), doing(IMPORTING):
        found = prepare(run, given, output, strict=strict)
    if dry_run or as_json:
        answer(found.to_json(), parts(found), as_json=as_json)
        raise typer.Exit(int(found.refused))
    if found.refused or verbosity() is not Verbosity.QUIET:
        show_aside(*parts(found))
    if found.refused:
        raise typer.Exit(1)
    found.start()


def _locked_profile(lock: str, profile: str, overrides: list[str] | None) -> ResolvedProfile:
    """Return the profile of a lock that is met here; otherwise print what differs and exit with 1.

    `profile` and `overrides` replace the lock's own name for it.
    """
    from torchrepro.application.launch import untouched
    from torchrepro.lock.lock_file import check

    with untouched(), doing(IMPORTING):
        found = check(Path(lock), profile=profile, overrides=overrides or ())
    if found.resolved is not None and found.met:
        return found.resolved
    show_aside(*parts(found))
    raise typer.Exit(1)


def _given_command(context: typer.Context, words: str) -> list[str]:
    if not context.obj:
        todo = f"write it after `--`: torchrepro {words} -- python train.py"
        raise ProfileError.about("no command to start", todo=todo)
    return list(context.obj)


OF_A_RECORDING = (
    *("level", "steps", "every", "max_size", "keep", "statistics", "detail", "on_unwritable"),
)
"""Options of `run` that say nothing without a folder to record into."""


def _steps(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    first, colon, last = text.partition(":")
    steps = _number(first), _number(last if colon else first)
    if is_range(steps):
        return steps
    legal = "7 or 5:8, counted from 0"
    raise TraceError.about("names no steps", key="steps", found=text, legal=legal)


def _number(text: str) -> Any:
    # Any other text stays as it is, for whoever checks it to show.
    return int(text) if text.isdecimal() and len(text) < DIGITS else text


@command("compare")
def compare_runs(
    left: Annotated[str, typer.Argument(metavar="RUN_A", help="A folder of a recording.")],
    right: Annotated[str, typer.Argument(metavar="RUN_B", help="Another.")],
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance.")] = None,
    ignore: Ignore = None,
    report: Report = "",
    open_page: Open = False,  # noqa: FBT002
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say whether two recorded runs are the same, or where they diverge; exit 1 if they do."""
    from torchrepro.verdict.comparison import compare
    from torchrepro.verdict.page import page
    from torchrepro.verdict.render import verdict_parts

    _check_page(report)
    with doing("comparing the runs"):
        found = compare(left, right, rtol=rtol, atol=atol, ignore=ignore or ())
    answer(found.to_json(), verdict_parts(found), as_json=as_json)
    _offer_page(lambda: page(found), report, opened=open_page)
    raise typer.Exit(int(not found.same))


@command("verify")
def verify_command(  # noqa: PLR0913, PLR0917 - see above
    context: typer.Context,
    profile: ProfileName = "",
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    runs: Annotated[int, typer.Option(min=2, help="How often the command is run.")] = 2,
    stress: Annotated[  # noqa: FBT002
        bool, typer.Option("--stress", help="Perturb what a reproducible run must not depend on.")
    ] = False,
    escalate: Annotated[  # noqa: FBT002
        bool, typer.Option("--escalate", help="Find the settings that make diverging runs equal.")
    ] = False,
    no_closer: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-closer", help="Do not record a divergence again in detail.")
    ] = False,
    folder: Annotated[
        str, typer.Option(metavar="DIR", help="Keep the recordings in a new or empty folder.")
    ] = "",
    level: Annotated[Level, typer.Option(help="How much is recorded.")] = Level.OP,
    every: Every = "",
    max_size: MaxSize = "",
    keep: Keep = None,
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance.")] = None,
    ignore: Ignore = None,
    relation: Annotated[
        RelationName | None,
        typer.Option(help="Compare with another execution that ought to agree."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="GLOB", help="The files that are a checkpoint, for resume.")
    ] = "",
    resume_command: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="The command that goes on from {checkpoint}, if it is another one."
        ),
    ] = "",
    bisect: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--bisect", help="For `git bisect run`: exit 125 where it is neither yes nor no."
        ),
    ] = False,
    report: Report = "",
    open_page: Open = False,  # noqa: FBT002
    verbose: Verbose = False,  # noqa: FBT002
    quiet: Quiet = False,  # noqa: FBT002
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Run a command several times, compare all it computes, and name the first divergence.

    Without PROFILE the command runs as it is, recorded and nothing set: `torchrepro verify --
    python train.py`. The same means the same bits, whatever the profile promises; --rtol and
    --atol, or a profile with the guarantee `aligned`, ask for the same numbers within a tolerance.
    Exit 1 if the runs differ.

    To record every op makes large steps take a third longer, and those of tiny ops six times as
    long. For a program of hours: --every 100 records each hundredth step in full, --level step none
    (the others by parameters, gradients and losses), --max-size 2GB bounds a run's place on disk.

    With --relation it is another question: does a run that is resumed from its checkpoint
    (resume), one with another number of loader workers (workers), or one without torch.compile
    (compile) compute the same? Exit 4 if that cannot be told.
    """
    from torchrepro.application.launch import untouched
    from torchrepro.lock.lock_file import plan_of_a_run

    with _for_bisect(wanted=bisect):
        command = _given_command(context, f"verify {profile}".rstrip())
        _check_page(report)
        if relation is not None and (given := _given(context, OF_RUNS_ALIKE)):
            todo = "leave it out, or leave out --relation"
            raise ProfileError.about("is for runs that are alike", key=given[0], todo=todo)
        if relation is None and (given := _given(context, OF_A_RELATION)):
            todo = "add --relation resume"
            raise ProfileError.about("is for a relation", key=given[0], todo=todo)
        if profile:
            resolved = resolved_profile(profile, overrides)  # refuses a wrong one at once
            if verbosity() is Verbosity.VERBOSE:
                with untouched(), doing(IMPORTING):
                    planned = plan_of_a_run(resolved)
                show_aside(*parts(planned))  # the runs print into files of their own
        asked: dict[str, Any] = {
            "overrides": overrides or (),
            "folder": folder,
            "level": level.value,
            "keep": tuple(keep or ()),
            "every": _number(every) if every else 1,
            "max_size": max_size or None,
            "rtol": rtol,
            "atol": atol,
            "ignore": tuple(ignore or ()),
        }
        try:
            with _progress() as options:
                asked |= options
                if relation is not None:
                    from torchrepro.verification.relations.relation import relate
                    from torchrepro.verification.relations.variants import (
                        related_json,
                        related_page,
                    )

                    asked |= {"checkpoint": checkpoint, "resume_command": resume_command}
                    found: Any = relate(relation.value, profile or None, command, **asked)
                    document, status = related_json(found), found.status
                    page = partial(related_page, found)
                else:
                    from torchrepro.verification.perturbations import EVERYTHING
                    from torchrepro.verification.result import verification_json, verification_page
                    from torchrepro.verification.verifier import verify

                    asked |= {"runs": runs, "escalate": escalate, "closer": not no_closer}
                    perturbed = EVERYTHING if stress else ()
                    found = verify(profile or None, command, stress=perturbed, **asked)
                    document, status = verification_json(found), int(not found.same)
                    page = partial(verification_page, found)
        except TraceError as error:
            raise _of_option(error) from None
        answer(document, parts(found), as_json=as_json)
        _offer_page(page, report, opened=open_page)
        raise typer.Exit(status)


@contextmanager
def _for_bisect(*, wanted: bool) -> Iterator[None]:
    """End with what `git bisect run` takes for an answer, where that is wanted."""
    try:
        yield
    except typer.Exit as ended:
        if wanted and 1 < ended.exit_code < BISECT:
            raise typer.Exit(BISECT) from None
        raise
    except TorchreproError as error:
        if not wanted:
            raise
        say(error)
        raise typer.Exit(BISECT) from None


OF_RUNS_ALIKE = ("runs", "stress", "escalate", "no_closer")
OF_A_RELATION = ("checkpoint", "resume_command")
"""Options of `verify` that say nothing with a relation, and without one."""


def _check_page(report: str) -> None:
    """Raise `TraceError` if a page cannot be written, before hours are spent on what is in it."""
    place = Path(report)
    if report and (place.is_dir() or not place.absolute().parent.is_dir()):
        todo = "name a file in a folder that is there"
        raise TraceError.about("the page cannot be written there", found=report, todo=todo)


def _offer_page(page: Callable[[], str], report: str, *, opened: bool) -> None:
    if not report and not opened:
        return
    if not report:
        # It stays: a browser reads it after the command has ended.
        descriptor, report = tempfile.mkstemp(prefix="torchrepro-", suffix=".html")
        os.close(descriptor)
    place = Path(report)
    write_in_place(place, page(), "the page")
    say(f"the page is in {place}")
    if opened:
        import webbrowser

        if not webbrowser.open(place.absolute().as_uri()):
            say("no browser could be started here: open that file where there is one")


@command("selftest")
def selftest_here(as_json: Json = False) -> None:  # noqa: FBT002 - an option of the command line
    """Try every promise on the devices of this machine: held, failed or not here; exit 1 if one
    failed.

    It takes half a minute for each device, and leaves no file and no setting behind.
    """
    from torchrepro.selftest import selftest

    with _progress() as options:
        found = selftest(meanwhile=options["meanwhile"] or (lambda text: None))
    answer(found.to_json(), parts(found), as_json=as_json)
    raise typer.Exit(int(not found.held))
