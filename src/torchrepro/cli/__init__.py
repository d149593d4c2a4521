"""The command `torchrepro`: parse, call, render."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 yes or done, 1 no, 2 a wrong request, 3 not in force."""
    import torchrepro.cli.profile_commands
    import torchrepro.cli.run_commands  # noqa: F401 - they register commands
    from torchrepro.cli.app import ROWS, app
    from torchrepro.console import say
    from torchrepro.errors import TorchreproError

    words = list(sys.argv[1:] if arguments is None else arguments)
    theirs = None
    if "--" in words and words[0] in ROWS and ROWS[words[0]].starts:
        # Typer consumes `--`, which begins the command to start.
        at = words.index("--")
        words, theirs = words[:at], words[at + 1 :]
    try:
        app(words, prog_name="torchrepro", obj=theirs)
    except TorchreproError as error:
        say(error)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads our output any more
        sys.exit(1)
