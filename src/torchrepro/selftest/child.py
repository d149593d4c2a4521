"""The process in which promises are tried: it says on a pipe what it tries, and what came of it.

``python -m torchrepro.selftest.child DESCRIPTOR FOLDER`` takes the trials as JSON on its standard
input. A line is written before each trial and another after it, so whoever reads them knows on
which one the process died.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.imports import named
from torchrepro.selftest.attempts import NotHeldError, NotHereError
from torchrepro.selftest.promises import promises_by_name
from torchrepro.selftest.trials import Result, Row, Trial

if TYPE_CHECKING:
    from collections.abc import Callable

MACHINE = "machine"
"""Asks for what the machine is, instead of trials."""


def tried(attempt: Callable[[Trial, Path], None], trial: Trial, folder: Path) -> Row:
    """Try a promise, and return what became of it.

    An error of any other kind is what was found instead of what the promise says.
    """
    began = time.monotonic()

    def row(result: Result, **more: str) -> Row:
        return Row(trial, result, seconds=time.monotonic() - began, **more)

    try:
        attempt(trial, folder)
    except NotHereError as absent:
        return row(Result.NOT_HERE, why=str(absent))
    except NotHeldError as found:
        return row(Result.FAILED, expected=found.expected, found=found.found)
    except Exception as error:  # noqa: BLE001 - see above
        words = str(error).strip().partition("\n")[0]
        expected = promises_by_name()[trial.promise].sentence
        return row(Result.FAILED, expected=expected, found=f"{type(error).__name__}: {words}")
    return row(Result.HELD)


def main() -> None:
    """Try what standard input asks for."""
    from torchrepro.selftest.machine import machine_facts

    descriptor, folder = int(sys.argv[1]), Path(sys.argv[2])
    asked = json.load(sys.stdin)
    with os.fdopen(descriptor, "w", encoding="utf-8") as answers:

        def say(value: Any) -> None:
            answers.write(json.dumps(value) + "\n")
            answers.flush()

        if asked == MACHINE:
            say(machine_facts())
            return
        promises = promises_by_name()
        for number, words in enumerate(asked):
            trial = Trial(**words)
            own = folder / str(number)
            own.mkdir()
            attempt = named(promises[trial.promise].attempt)
            say(tried(attempt, trial, own).to_json())


if __name__ == "__main__":
    main()
