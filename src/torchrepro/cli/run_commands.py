"""The commands about runs; each calls one function of the package and prints its answer."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from torchrepro.cli.app import (
    AllowEnv,
    Json,
    Overrides,
    ProfileName,
    Report,
    app,
    check_page,
    leave,
    print_json,
    resolved_profile,
    tell,
    write_page,
)
from torchrepro.cli.lock_commands import locked_profile
from torchrepro.errors import ProfileError, TraceError
from torchrepro.messages import Problem
from torchrepro.trace.request import VARIABLE, Request

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved


class Level(StrEnum):
    """How much of a run is recorded."""

    STEP = "step"
    MODULE = "module"
    OP = "op"


class Unwritable(StrEnum):
    """What a run does whose trace cannot be written."""

    STOP = "stop"
    WARN = "warn"


Record = Annotated[
    str, typer.Option(metavar="DIR", help="Record what is computed into a new or empty folder.")
]
Steps = Annotated[
    str, typer.Option(metavar="FIRST:LAST", help="Record only these steps, counted from 0.")
]
Keep = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE", help="Keep the tensors of these modules whole; a pattern."),
]


@app.command("run", options_metavar="[OPTIONS]", epilog="The command stands after `--`.")
def run_command(  # noqa: PLR0913, PLR0917 - the options of a command
    context: typer.Context,
    profile: ProfileName = "",
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    lock: Annotated[
        str, typer.Option(metavar="FILE", help="Start only if this lock is met; names the profile.")
    ] = "",
    record: Record = "",
    level: Annotated[Level, typer.Option(help="How much is recorded.")] = Level.OP,
    steps: Steps = "",
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
        typer.Option("--detail", help="Read every input anew: sees what changed outside torch."),
    ] = False,
    on_unwritable: Annotated[
        Unwritable, typer.Option(help="What to do where the trace cannot be written.")
    ] = Unwritable.STOP,
) -> None:
    """Start a command with the profile in force from before Python starts.

    It is in force in COMMAND and in every Python process that COMMAND starts, unless one replaces
    PYTHONPATH or starts Python with -I, -E or -S.
    """
    from torchrepro.launch import start

    command = given_command(context, f"run {profile or 'PROFILE'}")
    resolved = _to_run(profile, overrides, lock)
    more = {}
    if record:
        request = Request(
            folder=record,
            level=level.value,
            steps=_steps(steps),
            keep=tuple(keep or ()),
            statistics=statistics or resolved.guarantee == "aligned",
            detail=detail,
            on_unwritable=on_unwritable.value,
        )
        request.prepare_folder()
        more[VARIABLE] = request.to_variable()
    elif steps or keep or statistics or detail:
        raise TraceError(
            Problem(
                "nothing is recorded",
                key="--steps, --keep, --statistics and --detail",
                todo="say where to: --record DIR",
            )
        )
    start(resolved, command, more)


def _to_run(profile: str, overrides: list[str] | None, lock: str) -> Resolved:
    """Return the profile to run, which is a lock's if one is given; it must be met."""
    if lock:
        return locked_profile(lock, profile, overrides)
    if not profile:
        raise ProfileError(
            Problem("names no profile", todo="write one: torchrepro run PROFILE -- COMMAND")
        )
    return resolved_profile(profile, overrides)


def given_command(context: typer.Context, words: str) -> list[str]:
    """Return the command after `--`; raises `ProfileError` if there is none."""
    if not context.obj:
        raise ProfileError(
            Problem(
                "no command to start",
                todo=f"write it after `--`: torchrepro {words} -- python train.py",
            )
        )
    return list(context.obj)


def _steps(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    first, colon, last = text.partition(":")
    if first.isdecimal() and (last if colon else first).isdecimal():
        return int(first), int(last if colon else first)
    raise TraceError(
        Problem("names no steps", key="--steps", found=text, legal="7 or 5:8, counted from 0")
    )


@app.command("compare")
def compare_runs(  # noqa: PLR0913, PLR0917 - see above
    left: Annotated[str, typer.Argument(metavar="RUN_A", help="A folder of a recording.")],
    right: Annotated[str, typer.Argument(metavar="RUN_B", help="Another.")],
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance.")] = None,
    report: Report = "",
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say whether two recorded runs are the same, and where they part; exit 1 if they do."""
    from torchrepro.verdict.comparison import compare, next_rung
    from torchrepro.verdict.render import verdict_json

    check_page(report)
    found = compare(left, right, rtol=rtol, atol=atol)
    rung = next_rung(found)
    if as_json:
        print_json(verdict_json(found, rung))
    else:
        from torchrepro.console import show
        from torchrepro.verdict.render import verdict_parts

        show(*verdict_parts(found, rung))
    write_page(found, rung, report)
    leave(same=found.same)


@app.command("verify", options_metavar="[OPTIONS]", epilog="The command stands after `--`.")
def verify_command(  # noqa: PLR0913, PLR0917 - see above
    context: typer.Context,
    profile: ProfileName = "",
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    runs: Annotated[int, typer.Option(min=2, help="How often the command is run.")] = 2,
    stress: Annotated[  # noqa: FBT002
        bool, typer.Option("--stress", help="Perturb what a reproducible run must not depend on.")
    ] = False,
    climb: Annotated[  # noqa: FBT002
        bool, typer.Option("--climb", help="Find the settings that make diverging runs equal.")
    ] = False,
    no_closer: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-closer", help="Do not run again to look at a divergence closely.")
    ] = False,
    folder: Annotated[
        str, typer.Option(metavar="DIR", help="Keep the recordings in a new or empty folder.")
    ] = "",
    level: Annotated[Level, typer.Option(help="How much is recorded.")] = Level.OP,
    keep: Keep = None,
    rtol: Annotated[float | None, typer.Option(help="Relative tolerance.")] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance.")] = None,
    report: Report = "",
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Run a command several times, compare all it computes, and name the first divergence.

    Without PROFILE the command runs as it is, recorded and nothing set: `torchrepro verify --
    python train.py`. The same means the same bits, whatever the profile promises; --rtol and
    --atol, or a profile with the guarantee `aligned`, ask for the same numbers within a tolerance.
    Exit 1 if the runs differ.
    """
    from torchrepro.verification.perturbations import EVERYTHING
    from torchrepro.verification.result import verification_json, verification_parts
    from torchrepro.verification.runner import Interrupted
    from torchrepro.verification.verifier import verify

    command = given_command(context, f"verify {profile}".rstrip())
    check_page(report)
    if profile:
        resolved_profile(profile, overrides)  # says what is wrong with it before anything starts
    try:
        found = verify(
            profile or None,
            command,
            overrides=overrides or (),
            runs=runs,
            stress=EVERYTHING if stress else (),
            climb=climb,
            closer=not no_closer,
            folder=folder,
            level=level.value,
            keep=tuple(keep or ()),
            rtol=rtol,
            atol=atol,
            say=tell,
        )
    except Interrupted as stopped:
        raise typer.Exit(stopped.exit_status) from None
    if as_json:
        print_json(verification_json(found))
    else:
        from torchrepro.console import show

        show(*verification_parts(found))
    write_page(found.verdict, found.next_rung, report)
    leave(same=found.same)
