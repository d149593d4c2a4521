"""Runs a command again and again, each time in fresh processes and recorded."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchrepro.errors import TraceError
from torchrepro.launch import prepared, prepared_as_it_is
from torchrepro.trace.reading import read_run
from torchrepro.trace.request import VARIABLE, Request
from torchrepro.verify.elsewhere import mirrored
from torchrepro.verify.process import run_to_end
from torchrepro.verify.surroundings import Surroundings
from torchrepro.verify.value import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchrepro.profile.resolved import Resolved

CALM = Surroundings()


@dataclass(frozen=True, slots=True)
class Runner:
    """A command, the folder that its recordings go into, and how it is recorded."""

    command: Sequence[str]
    folder: Path
    request: Request
    """What is recorded; the folder in it is not looked at."""
    say: Callable[[str], object]
    """Takes what is told of the progress, as text with its own ends of lines."""

    def run(
        self,
        resolved: Resolved | None,
        name: str,
        around: Surroundings = CALM,
        perturbed: tuple[str, ...] = (),
    ) -> Run:
        """Run the command once, as it is without a profile, and say how long it took.

        Raises `ProfileError`, `ApplyError` and `TraceError` for a command that cannot be started
        under the profile, or recorded, and `Stopped` if a signal ends us.
        """
        traces, log = self.folder / name, self.folder / f"{name}.log"
        request = replace(self.request, folder=str(traces))
        if resolved is None:
            program, environment = prepared_as_it_is(self.command)
        else:
            program, environment = prepared(resolved, self.command)
        request.prepare_folder()
        environment |= {**around.environment(), VARIABLE: request.to_variable()}
        with ExitStack() as stack:
            place = Path.cwd()
            if around.elsewhere:
                place = stack.enter_context(mirrored(place))
                environment["PWD"] = str(place)
            begun = time.monotonic()
            status = run_to_end(program, self.command, environment, place, log)
        seconds = time.monotonic() - begun
        steps = _steps(traces)
        self.say(f" {seconds:.1f} s, {steps:,} step{'s' * (steps != 1)}{_ended(status)}\n")
        return Run(name, str(traces), str(log), status, seconds, steps, perturbed)

    def recording(self, request: Request) -> Runner:
        """Return what runs the same command and records what `request` asks for."""
        return replace(self, request=request)


def _steps(traces: Path) -> int:
    try:
        return len(read_run(traces, records=False)[0].steps)
    except TraceError:
        return 0


def _ended(status: int) -> str:
    return f", exit status {status}" if status else ""
