"""The entry point of the command `torchrepro`."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence

LAUNCHER = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed|mpirun|srun|bash|uv)")
"""The programs that the command to start usually begins with."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, and exit the process.

    Exit status 0 means yes or done, 1 means no, 2 a wrong request, and 3 that the profile was not
    applied. Status 70 means an internal error of torchrepro.
    """
    import torchrepro.cli.checkpoint_commands
    import torchrepro.cli.demo_commands
    import torchrepro.cli.profile_commands
    import torchrepro.cli.run_commands  # noqa: F401 - they register commands
    from torchrepro.cli.app import ROWS, app
    from torchrepro.ground.console import say
    from torchrepro.ground.errors import INTERNAL, ProfileError, TorchreproError

    atexit.register(gc.freeze)  # with torch, collecting garbage at the end takes half a second
    words = list(sys.argv[1:] if arguments is None else arguments)
    started_command = None
    try:
        if words and words[0] in ROWS and ROWS[words[0]].starts:
            if "--" in words:
                # typer consumes `--`, so the command to start is removed before typer runs.
                at = words.index("--")
                words, started_command = words[:at], words[at + 1 :]
            elif repaired := _with_dashes(words, 1 + ROWS[words[0]].starts.startswith("[")):
                todo = f"write it after `--`: torchrepro {shlex.join(repaired)}"
                raise ProfileError.about("no `--` before the command to start", todo=todo)  # noqa: TRY301
        app(words, prog_name="torchrepro", obj=started_command)
    except TorchreproError as error:
        say(error)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output, such as `head`, has ended
        sys.exit(1)
    except Exception:  # noqa: BLE001 - exit status 1 would be read as the answer `no`
        traceback.print_exc()
        say("an internal error of torchrepro\n    to do: report it with the lines above")
        sys.exit(INTERNAL)


def _with_dashes(words: list[str], first: int) -> list[str]:
    """Return `words` with `--` before the program. Returns an empty list if no word is a program.

    The search starts at the index `first`, because a lock or a folder may precede the program.
    """
    for at, word in enumerate(words[first:], first):
        is_script = word.endswith(".py") and not os.access(word, os.X_OK)
        follows_option = words[at - 1].startswith("-")  # so it may be the option's value
        is_script = is_script and not (follows_option and first > 1)  # as in `-o FILE`
        if is_script or LAUNCHER.fullmatch(word) or (not follows_option and shutil.which(word)):
            return [*words[:at], "--", *["python"] * is_script, *words[at:]]
    return []
