"""The commands about runs: lock, check, diff, run, rerun, compare, verify and selftest.

Each calls one function of the package and prints the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from torchrepro.cli.app import (
    IMPORTING,
    Progress,
    Texts,
    answer,
    check_page_path,
    command,
    conclude,
    doing,
    offer_page,
    print_json,
    resolved_profile,
)
from torchrepro.ground.console import Verbosity, parts, say, show_aside, verbosity
from torchrepro.ground.errors import ProfileError, TorchreproError, TraceError
from torchrepro.ground.imports import named
from torchrepro.manifest.contents import LOG_TO, OtherMachineError, refuse_used_folder
from torchrepro.trace.request import VARIABLE, RecordingRequest, bytes_of, is_range

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile


Level = StrEnum("Level", "STEP MODULE OP")  # how much of a run is recorded
RelationName = StrEnum("RelationName", "RESUME WORKERS COMPILE")
Unwritable = StrEnum("Unwritable", "STOP WARN")  # what to do if the trace cannot be written

BISECT = 125  # the exit status that makes `git bisect run` skip a commit

DIGITS = 19  # every step number has fewer digits


@command("lock")
def lock_profile(  # noqa: PLR0913 - options of the command line
    context: typer.Context,
    profile: str,
    overrides: Texts = None,
    allow_env: Texts = None,
    *,
    output: str = "repro.lock",
    steps: str = "",
    every: str = "",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Write a lock: the profile, the machine and the code, to check later runs against.

    With COMMAND, the lock also stores the results of each step: losses and a digest of the
    parameters. COMMAND is run twice; if the results do not repeat, nothing is written.
    """
    from torchrepro.lock.lock_file import write_lock

    resolved_profile(profile, overrides)  # raises for a wrong profile before torch is imported
    if not context.obj:
        if steps or every:
            todo = "write it after `--`: torchrepro lock PROFILE -- python train.py"
            raise ProfileError.about("--steps and --every need a command to run", todo=todo)
        with doing(IMPORTING):
            report = write_lock(Path(output), profile, overrides or ())
        document = {"lock": output, "written": True, "digest": report.digest}
        lines = (
            f"{output} locks {report.profile} ({report.guarantee}) as it is on this machine",
            f"  {report.digest}",
            f"  torchrepro check {output}",
            f"  torchrepro run --lock {output} -- COMMAND",
        )
        answer(document, lines, as_json=as_json)
        return
    from torchrepro.checking.check_runs import lock_numbers
    from torchrepro.checking.locked_command import LockedCommand

    interval = _number(every) if every else 1
    if not isinstance(interval, int) or interval < 1:
        legal = "as in 100, for steps 0, 100, 200, ..."
        raise TraceError.about("not a whole number from 1 on", "--every", found=every, legal=legal)
    locked_command = LockedCommand.here(context.obj, _steps(steps), interval)
    with _progress() as options:
        locked = lock_numbers(Path(output), profile, overrides or (), locked_command, **options)
    answer(locked.to_json(), parts(locked), as_json=as_json)
    raise typer.Exit(int(locked.numbers is None))


@contextmanager
def _progress() -> Iterator[dict[str, Any]]:
    """Show the progress of runs. If a signal stops them, exit with the status of that signal."""
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
def check_lock(  # noqa: PLR0913 - options of the command line
    context: typer.Context,
    lock: str,
    *,
    strict: bool = False,
    no_blame: bool = False,
    update: str | None = None,
    report: str = "",
    allow_env: Texts = None,
    quiet: bool = False,
    as_json: bool = False,
) -> None:
    """Show what differs from a lock on this machine, the most likely to change results first.

    Exit 1 if the lock is not met. With COMMAND, which must be the command of the lock, run it and
    compare its results with the lock. If they differ, find out what changed them, your change or
    the environment, by running the code of the lock as well.
    """
    from torchrepro.lock.lock_file import check

    check_page_path(report)
    if not context.obj:
        if update is not None or no_blame:
            _command_to_start(context, f"check {lock}")
        with doing(IMPORTING):
            checked = check(Path(lock), strict=strict)
        _end_check(checked, report, met=checked.met, as_json=as_json)
    from torchrepro.checking.check_runs import check_numbers, update_numbers

    with _progress() as options:
        if update is not None:
            updated = update_numbers(Path(lock), context.obj, update, **options)
            _end_check(updated, report, met=updated.numbers is not None, as_json=as_json)
        try:
            compared = check_numbers(
                Path(lock), context.obj, strict=strict, blame=not no_blame, **options
            )
        except OtherMachineError as error:
            if as_json:
                numbers = {"same": None, "first": None, "who": None, "why": str(error)}
                print_json({"met": False, "lock": lock, "strict": strict, "numbers": numbers})
                raise typer.Exit(error.exit_status) from None
            raise
    _end_check(compared, report, met=compared.met, as_json=as_json)


def _end_check(checked: Any, report: str, *, met: bool, as_json: bool) -> NoReturn:
    """Print the answer of `check`, write its page, and exit with 1 if the lock is not met."""
    from torchrepro.verdict.page import text_page

    page = partial(text_page, checked, same=met)
    status = int(not met)
    conclude(checked.to_json(), parts(checked), page, report=report, status=status, as_json=as_json)


@command("diff")
def show_differences(
    left: str, right: str, allow_env: Texts = None, *, as_json: bool = False
) -> None:
    """Show the differences of two profiles, manifests, locks or runs; exit 1 if there are any."""
    from torchrepro.lock.diff import differences_of

    with doing(IMPORTING):
        differences = differences_of(left, right)
    answer(differences.to_json(), parts(differences), as_json=as_json)
    raise typer.Exit(int(not differences.same))


@dataclass(frozen=True)
class RunOptions:
    """The options of `run`, in the order of the help."""

    profile: str = ""
    overrides: Texts = None
    allow_env: Texts = None
    lock: str = ""
    record: str = ""
    log_to: str = ""
    level: Level = Level.OP
    steps: str = ""
    every: str = ""
    max_size: str = ""
    keep: Texts = None
    statistics: bool = False
    detail: bool = False
    on_unwritable: Unwritable = Unwritable.STOP
    verbose: bool = False
    quiet: bool = False


@command("run", RunOptions)
def run_command(context: typer.Context, options: RunOptions) -> None:
    """Run a command under a profile, which is applied before Python starts.

    The profile is active in COMMAND and in every Python process that COMMAND starts, unless one
    replaces PYTHONPATH or starts Python with -I, -E or -S.
    """
    from torchrepro.application.launch import start

    command = _command_to_start(context, f"run {options.profile or 'PROFILE'}")
    if options.lock:
        resolved = _locked_profile(options.lock, options.profile, options.overrides)
    elif options.profile:
        resolved = resolved_profile(options.profile, options.overrides)
    else:
        todo = "write one: torchrepro run PROFILE -- COMMAND"
        raise ProfileError.about("no profile is named", todo=todo)
    if options.log_to:
        refuse_used_folder(Path(options.log_to))
    variables = {}
    if logged := options.log_to or options.record:
        variables[LOG_TO] = os.path.abspath(logged)  # noqa: PTH100 - text
    if options.lock:
        from torchrepro.application.guard import LOCKED

        variables[LOCKED] = "1"
    if options.record:
        request = _recording(
            *(options, options.record, options.steps),
            statistics=options.statistics or resolved.guarantee == "aligned",
            detail=options.detail,
            on_unwritable=options.on_unwritable.value,
        )
        request.prepare_folder()
        variables[VARIABLE] = request.to_variable()
    elif explicit := _explicit_options(context, RECORDING_OPTIONS):
        todo = "name a folder to record into: --record DIR"
        raise TraceError.about("nothing is recorded", key=", ".join(explicit), todo=todo)
    start(resolved, command, variables)


def _recording(
    options: RunOptions | VerifyOptions, folder: str = "", steps: str = "", **details: Any
) -> RecordingRequest:
    """Return the request that `options` describe. An error names the option, as in ``--every``."""
    try:
        return RecordingRequest(
            *(folder, options.level.value, _steps(steps), tuple(options.keep or ())),
            every=_number(options.every) if options.every else 1,
            max_size=bytes_of(options.max_size or None),
            **details,
        )
    except TraceError as error:
        key = error.problem.key
        if key not in RECORDING_OPTIONS:
            raise
        raise TraceError(error.problem._replace(key=_option(key))) from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _explicit_options(context: typer.Context, names: Iterable[str]) -> list[str]:
    sources = [(name, context.get_parameter_source(name)) for name in names]
    return [_option(name) for name, source in sources if source and source.name == "COMMANDLINE"]


@dataclass(frozen=True)
class RerunOptions:
    """The arguments and options of `rerun`, in the order of the help."""

    run: str
    allow_env: Texts = None
    output: str = ""
    strict: bool = False
    dry_run: bool = False
    verbose: bool = False
    quiet: bool = False
    as_json: bool = False


@command("rerun", RerunOptions, allow_extra_args=True)
def rerun_command(context: typer.Context, options: RerunOptions) -> None:
    """Start the command of an earlier run again, with its profile and overrides, in a new folder.

    First show what differs from the earlier run. The values of the profile come from the manifest,
    even if the files of the profile have changed. Write COMMAND only if the manifest hides
    arguments.
    """
    from torchrepro.application.launch import untouched
    from torchrepro.start.rerun import prepare

    if context.args:
        problem = "`rerun` takes one folder and no overrides: it uses the original profile"
        todo = "use another profile with: torchrepro run PROFILE OVERRIDES -- COMMAND"
        raise ProfileError.about(problem, found=" ".join(context.args), todo=todo)
    command = _command_to_start(context, f"rerun {options.run}") if context.obj is not None else ()
    with untouched(), doing(IMPORTING):
        rerun = prepare(options.run, command, options.output, strict=options.strict)
    if options.dry_run or options.as_json:
        answer(rerun.to_json(), parts(rerun), as_json=options.as_json)
        raise typer.Exit(int(rerun.refused))
    if rerun.refused or verbosity() is not Verbosity.QUIET:
        show_aside(*parts(rerun))
    if rerun.refused:
        raise typer.Exit(1)
    rerun.start()


def _locked_profile(lock: str, profile: str, overrides: list[str] | None) -> ResolvedProfile:
    """Return the profile of a lock. If the lock is not met, print the differences and exit with 1.

    If set, `profile` and `overrides` replace the profile and the overrides of the lock.
    """
    from torchrepro.application.launch import untouched
    from torchrepro.lock.lock_file import check

    with untouched(), doing(IMPORTING):
        checked = check(Path(lock), profile=profile, overrides=overrides or ())
    if checked.resolved is not None and checked.met:
        return checked.resolved
    show_aside(*parts(checked))
    raise typer.Exit(1)


def _command_to_start(context: typer.Context, words: str) -> list[str]:
    if not context.obj:
        todo = f"write it after `--`: torchrepro {words} -- python train.py"
        raise ProfileError.about("no command to start", todo=todo)
    return list(context.obj)


RECORDING_OPTIONS = (
    *("level", "steps", "every", "max_size", "keep", "statistics", "detail", "on_unwritable"),
)
"""Options of `run` that need --record."""


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
    # Other text is returned unchanged: the caller's check shows it in its message.
    return int(text) if text.isdecimal() and len(text) < DIGITS else text


@dataclass(frozen=True)
class CompareOptions:
    """The arguments and options of `compare`, in the order of the help."""

    left: str
    right: str
    rtol: float | None = None
    atol: float | None = None
    ignore: Texts = None
    report: str = ""
    open_page: bool = False
    as_json: bool = False


@command("compare", CompareOptions)
def compare_runs(context: typer.Context, options: CompareOptions) -> None:
    """Compare two recorded runs and show where they diverge; exit 1 if they do."""
    from torchrepro.verdict.comparison import compare
    from torchrepro.verdict.page import page
    from torchrepro.verdict.render import verdict_parts

    check_page_path(options.report)
    runs, ignore = (options.left, options.right), options.ignore or ()
    with doing("comparing the runs"):
        verdict = compare(*runs, rtol=options.rtol, atol=options.atol, ignore=ignore)
    answer(verdict.to_json(), verdict_parts(verdict), as_json=options.as_json)
    offer_page(lambda: page(verdict), options.report, opened=options.open_page)
    raise typer.Exit(int(not verdict.same))


@dataclass(frozen=True)
class VerifyOptions:
    """The options of `verify`, in the order of the help."""

    profile: str = ""
    overrides: Texts = None
    allow_env: Texts = None
    runs: int = 2
    stress: bool = False
    escalate: bool = False
    no_closer: bool = False
    folder: str = ""
    level: Level = Level.OP
    every: str = ""
    max_size: str = ""
    keep: Texts = None
    rtol: float | None = None
    atol: float | None = None
    ignore: Texts = None
    relation: RelationName | None = None
    checkpoint: str = ""
    resume_command: str = ""
    bisect: bool = False
    report: str = ""
    open_page: bool = False
    verbose: bool = False
    quiet: bool = False
    as_json: bool = False


@command("verify", VerifyOptions)
def verify_command(context: typer.Context, options: VerifyOptions) -> None:
    """Run a command several times, compare all that it computes, and name the first divergence.

    Exit 1 if the runs differ. Without PROFILE the command is recorded and otherwise unchanged:
    `torchrepro verify -- python train.py`. Results must be bitwise identical, also under a profile
    that promises less; --rtol and --atol, or a profile with the guarantee `aligned`, allow a
    tolerance.

    Recording every op makes steps of large ops a third slower, and steps of tiny ops six times. If
    the program runs for hours: --every 100 records each hundredth step in full, --level step
    records parameters, gradients and losses only, --max-size 2GB limits each run's size on disk.

    --relation asks another question. Does the command compute the same if it is resumed from its
    checkpoint (resume), with another number of loader workers (workers), or without torch.compile
    (compile)? Exit 4 if there is no answer.
    """
    from torchrepro.application.launch import untouched
    from torchrepro.lock.lock_file import plan_of_a_run

    with _for_bisect(wanted=options.bisect):
        command = _command_to_start(context, f"verify {options.profile}".rstrip())
        check_page_path(options.report)
        names, problem, todo = UNUSABLE[options.relation is not None]
        if explicit := _explicit_options(context, names):
            raise ProfileError.about(problem, key=explicit[0], todo=todo)
        if options.profile:
            resolved = resolved_profile(options.profile, options.overrides)
            if verbosity() is Verbosity.VERBOSE:
                with untouched(), doing(IMPORTING):
                    planned = plan_of_a_run(resolved)
                show_aside(*parts(planned))  # the output of the runs goes to files
        with _progress() as progress:
            outcome, document, page, status = _verified(options, command, progress)
        conclude(
            document,
            parts(outcome),
            page,
            report=options.report,
            opened=options.open_page,
            status=status,
            as_json=options.as_json,
        )


def _verified(
    options: VerifyOptions, command: Sequence[str], progress: Mapping[str, Any]
) -> tuple[Any, dict[str, Any], Callable[[], str], int]:
    """Return the outcome of `verify`, with the JSON, the page and the exit status."""
    from torchrepro.verification.runner import RunRequest

    request = RunRequest(
        command,
        profile=options.profile or None,
        overrides=options.overrides or (),
        folder=options.folder,
        recording=_recording(options),
        rtol=options.rtol,
        atol=options.atol,
        ignore=tuple(options.ignore or ()),
        **progress,
    )
    if options.relation is not None:
        if find_spec(RELATIONS) is None:
            todo = "remove it: verify then compares repeated runs"
            raise ProfileError.about("this installation has no relations", "--relation", todo=todo)
        resumes = {"checkpoint": options.checkpoint, "resume_command": options.resume_command}
        related = named(RELATE)(options.relation.value, request, **resumes)
        return related, related.to_json(), related.to_page, related.status
    from torchrepro.verification.perturbations import EVERYTHING
    from torchrepro.verification.result import verification_json, verification_page
    from torchrepro.verification.verifier import verified

    stress, closer = EVERYTHING if options.stress else (), not options.no_closer
    outcome = verified(request, options.runs, stress, escalate=options.escalate, closer=closer)
    page = partial(verification_page, outcome)
    return outcome, verification_json(outcome), page, int(not outcome.same)


@contextmanager
def _for_bisect(*, wanted: bool) -> Iterator[None]:
    """If `wanted`, exit with 125 if there is no answer: `git bisect run` skips such a commit."""
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


UNUSABLE = {
    False: (("checkpoint", "resume_command"), "needs --relation", "add --relation resume"),
    True: (
        *(("runs", "stress", "escalate", "no_closer"), "cannot be used with --relation"),
        "remove it, or remove --relation",
    ),
}
"""Whether --relation is used -> the options of `verify` that are then wrong, why, what to do."""

RELATIONS, RELATE = "torchrepro.verification.relations", "verification.relations.relation:relate"
"""The package behind --relation, which may be absent, and its entry: named nowhere else."""


@command("selftest")
def selftest_here(*, as_json: bool = False) -> None:
    """Test every guarantee on the devices of this machine; exit 1 if a test failed.

    Each test is reported as held, failed, or not available on this machine. It takes half a minute
    for each device, writes no files and changes no settings.
    """
    from torchrepro.selftest import selftest

    with _progress() as options:
        tested = selftest(meanwhile=options["meanwhile"] or (lambda text: None))
    answer(tested.to_json(), parts(tested), as_json=as_json)
    raise typer.Exit(int(not tested.held))
