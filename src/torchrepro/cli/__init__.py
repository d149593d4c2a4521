"""The command `torchrepro`: parse, call, render."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 yes or done, 1 no, 2 a wrong request, 3 not in force."""
    import torchrepro.cli.profile_commands
    import torchrepro.cli.run_commands
    import torchrepro.cli.selftest_commands  # noqa: F401 - they register commands
    from torchrepro.cli.app import app
    from torchrepro.console import say
    from torchrepro.errors import TorchreproError

    words = list(sys.argv[1:] if arguments is None else arguments)
    # Typer consumes `--`, which begins the command to start after `run`, `rerun` and `verify`.
    ours, theirs = _split(words)
    try:
        app(ours, prog_name="torchrepro", obj=theirs)
    except TorchreproError as error:
        say(error)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads our output any more
        sys.exit(1)


def _split(words: list[str]) -> tuple[list[str], list[str] | None]:
    if words[:1] not in (["run"], ["rerun"], ["verify"]) or "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]
