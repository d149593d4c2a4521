"""The commands that hold runs to a lock and compare what runs were."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchrepro.cli.app import (
    AllowEnv,
    Json,
    Overrides,
    ProfileName,
    app,
    leave,
    print_json,
    resolved_profile,
    tell,
)

if TYPE_CHECKING:
    from torchrepro.profile.resolved import Resolved

Side = "A profile, a manifest, a lock, or the folder of a run."


@app.command("lock")
def lock_profile(
    profile: ProfileName,
    overrides: Overrides = None,
    allow_env: AllowEnv = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where the lock is written.")
    ] = "repro.lock",
) -> None:
    """Write down what a run of the profile would be here, so that later runs can be held to it."""
    from torchrepro.lock.lock_file import write_lock

    resolved_profile(profile, overrides)  # says what is wrong with it before torch is imported
    report = write_lock(Path(output), profile, overrides or ())
    sys.stdout.write(
        f"{output} holds runs to {report.profile} ({report.guarantee}) as it is here\n"
        f"  {report.digest}\n"
        f"  torchrepro check {output}\n"
        f"  torchrepro run --lock {output} -- COMMAND\n"
    )


@app.command("check")
def check_lock(
    lock: Annotated[str, typer.Argument(metavar="FILE", help="A lock.")],
    strict: Annotated[  # noqa: FBT002
        bool, typer.Option("--strict", help="Hold to what should not change numbers, too.")
    ] = False,
    allow_env: AllowEnv = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say what differs here from a lock, likeliest to change numbers first; exit 1 if it does."""
    from torchrepro.lock.check import check

    found = check(Path(lock), strict=strict)
    if as_json:
        print_json(found.to_json())
    else:
        from torchrepro.console import show
        from torchrepro.lock.tables import checked_parts

        show(*checked_parts(found))
    leave(same=found.met)


def locked_profile(lock: str, profile: str, overrides: list[str] | None) -> Resolved:
    """Return the profile of a lock that is met here; otherwise says what differs and exits with 1.

    `profile` and `overrides` name it where the lock's own name for it is not wanted.
    """
    from torchrepro.lock.check import check
    from torchrepro.relaunch import untouched

    with untouched():
        found = check(Path(lock), profile=profile, overrides=overrides or ())
    if found.resolved is not None and found.met:
        return found.resolved
    from torchrepro.console import as_text
    from torchrepro.lock.tables import checked_parts

    tell(as_text(*checked_parts(found)) + "\n")
    raise typer.Exit(1)


@app.command("diff")
def show_differences(
    left: Annotated[str, typer.Argument(metavar="A", help=Side)],
    right: Annotated[str, typer.Argument(metavar="B", help=Side)],
    allow_env: AllowEnv = None,
    as_json: Json = False,  # noqa: FBT002
) -> None:
    """Say in what two profiles, manifests, locks or runs differ; exit 1 if they do."""
    from torchrepro.lock.diff import compare
    from torchrepro.lock.snapshot import describe

    found = compare(describe(left), describe(right))
    if as_json:
        print_json(found.to_json())
    else:
        from torchrepro.console import show
        from torchrepro.lock.tables import difference_parts

        show(*difference_parts(found, left, right))
    leave(same=found.same)
