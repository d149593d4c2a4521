"""Tries every promise on this machine, in processes of their own, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchrepro
from torchrepro.errors import ApplyError
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.messages import printable
from torchrepro.selftest.child import MACHINE
from torchrepro.selftest.promises import PROMISES, Promise, promises_by_name
from torchrepro.selftest.self_test import SelfTest
from torchrepro.selftest.trials import Result, Row, Trial
from torchrepro.verification.runner import end_group, signals_raised, status_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OURS = "TORCHREPRO_"
"""How the names of our own variables begin: a profile around this command is not tried here."""

_START = 120.0  # seconds that a process has to import torch and say what the machine is


def selftest(
    promises: Sequence[Promise] = (), meanwhile: Callable[[str], object] = print
) -> SelfTest:
    """Try `promises`, all of them if none is given, on every device of this machine.

    Each is tried in a process that is started without the variables that a knob sets, so what
    the user has exported has no say. `meanwhile` takes what is being tried. All files are in a
    temporary folder that is removed. Raises `ApplyError` if torch cannot be imported, and
    `Interrupted` if a signal ends us, once the processes have ended.
    """
    began, date = time.monotonic(), datetime.now(UTC)
    promises = promises or PROMISES
    with tempfile.TemporaryDirectory(prefix="torchrepro-selftest-") as place, signals_raised():
        processes = _Processes(Path(place).resolve())
        meanwhile("importing torch ...")
        machine = processes.machine()
        rows: list[Row] = []
        todo: list[Trial] = []
        for trial in (trial for promise in promises for trial in promise.trials()):
            why = machine["absent"].get(trial.device)
            if why:
                rows.append(Row(trial, Result.NOT_HERE, why))
            else:
                todo.append(trial)
        known = promises_by_name()
        limits = {trial: known[trial.promise].limit for trial in todo}
        rows += _all_tried(processes, todo, limits, meanwhile)
    return SelfTest(
        str(torchrepro.__version__),
        date.isoformat(timespec="seconds"),
        machine,
        tuple(promises),
        tuple(rows),
        time.monotonic() - began,
    )


def _all_tried(
    processes: _Processes,
    todo: list[Trial],
    limits: dict[Trial, float],
    say: Callable[[str], object],
) -> Iterator[Row]:
    """Yield the row of each trial; after one at which a process dies, another one goes on."""
    number, total = 0, len(todo)
    while number < total:
        with processes.started([asdict(trial) for trial in todo[number:]]) as process:
            for trial in todo[number:]:
                number += 1
                say(f"{number} of {total}: {trial} ...")
                answer, found = process.answer(limits[trial])
                if answer is None:
                    expected = promises_by_name()[trial.promise].sentence
                    yield Row(trial, Result.FAILED, expected=expected, found=found)
                    break
                yield _row(trial, answer)


def _row(trial: Trial, answer: dict[str, Any]) -> Row:
    texts = {name: printable(answer[name]) for name in ("why", "expected", "found")}
    return Row(trial, Result(answer["result"]), seconds=answer["seconds"], **texts)


@dataclass(frozen=True, slots=True)
class _Process:
    """A process that tries promises."""

    process: subprocess.Popen[bytes]
    pipe: int
    log: Path

    def answer(self, limit: float) -> tuple[dict[str, Any] | None, str]:
        """Return the next answer, or None and why there is none."""
        until, line = time.monotonic() + limit, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return None, f"no answer within {limit:g} s"
            byte = os.read(self.pipe, 1)  # a line at a time: what follows is another answer's
            if not byte:
                return None, self._end()
            line += byte
        found: dict[str, Any] = json.loads(line)
        return found, ""

    def _end(self) -> str:
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        ended = f"the process ended with {status_in_words(self.process.wait())}"
        return printable(f"{ended}: {said}" if said else ended)


@dataclass(slots=True)
class _Processes:
    """Starts processes with all their files in one folder."""

    folder: Path
    count: int = 0

    def machine(self) -> dict[str, Any]:
        """Return what this machine is; raises `ApplyError` where torch cannot be imported."""
        with self.started(MACHINE) as process:
            found, why = process.answer(_START)
        if found is None:
            raise ApplyError(
                f"torch cannot be imported: {why}\n    to do: torchrepro doctor says more"
            )
        return found

    @contextmanager
    def started(self, asked: Any) -> Iterator[_Process]:
        """Start a process that is asked for trials; it is ended with the block."""
        self.count += 1
        own = self.folder / str(self.count)
        own.mkdir()
        log = own / "log"
        pipe, theirs = os.pipe()
        try:
            process = self._popen(own, log, theirs, asked)
        finally:
            os.close(theirs)
        try:
            yield _Process(process, pipe, log)
        finally:
            os.close(pipe)
            end_group(process)

    def _popen(self, own: Path, log: Path, descriptor: int, asked: Any) -> subprocess.Popen[bytes]:
        words = own / "asked"
        words.write_text(json.dumps(asked), encoding="utf-8")
        with words.open("rb") as source, log.open("wb") as output:
            return subprocess.Popen(  # noqa: S603 - our own Python
                [sys.executable, "-m", "torchrepro.selftest.child", str(descriptor), str(own)],
                env=_environment(own),
                cwd=own,
                stdin=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(descriptor,),
                start_new_session=True,
            )


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment without what a knob sets; temporary files go into `folder`."""
    ours = {knob.variable for knob in CATALOGUE if knob.variable}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(OURS)
    }
    return {**kept, "TMPDIR": str(folder)}
