"""The command that tries on this machine what torchrepro promises."""

from __future__ import annotations

import typer

from torchrepro.cli.app import Json, answer, app
from torchrepro.cli.command_table import command
from torchrepro.cli.progress import Progress
from torchrepro.console import parts


@command(app, "selftest")
def selftest_here(as_json: Json = False) -> None:  # noqa: FBT002 - an option of the command line
    """Try every promise on the devices of this machine: held, failed or not here; exit 1 if one
    failed.

    It takes half a minute for each device, and leaves no file and no setting behind.
    """
    from torchrepro.selftest.self_test import selftest
    from torchrepro.verification.runner import Interrupted

    progress = Progress()
    try:
        found = selftest(meanwhile=progress.for_now)
    except Interrupted as stopped:
        raise typer.Exit(stopped.exit_status) from None
    finally:
        progress.erase()
    answer(found.to_json(), parts(found), as_json=as_json)
    raise typer.Exit(int(not found.held))
