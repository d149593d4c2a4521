"""Tries every promise on this machine, in processes of ours, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torchrepro
from torchrepro.errors import ApplyError
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.manifest.contents import secrets_here
from torchrepro.messages import printable
from torchrepro.redaction import without_secrets
from torchrepro.selftest.child import MACHINE
from torchrepro.selftest.promises import PROMISES, Promise, promises_by_name
from torchrepro.selftest.self_test import SelfTest
from torchrepro.selftest.trials import Result, Row, Trial
from torchrepro.verification.runner import end_group, signals_raised, status_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OURS = "TORCHREPRO_"
"""How the names of our own variables begin: a profile around this command is not tried here."""

CACHES = (
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"),
    *("ASCEND_PROCESS_LOG_PATH", "ASCEND_CACHE_PATH", "XDG_CACHE_HOME"),
)
"""Name folders for what libraries compile and log, which are in the home folder otherwise."""

_START = 120.0  # seconds that a process has to import torch and say what the machine is


def selftest(
    promises: Sequence[Promise] = (), meanwhile: Callable[[str], object] = print
) -> SelfTest:
    """Try `promises`, all of them if none is given, on every device of this machine.

    They are tried one after another in a process that starts without the variables that a knob
    sets, so what the user has exported has no say. After a promise that failed another process
    goes on: what the failure has left behind is not there. `meanwhile` takes what is being tried.
    All files are in a temporary folder that is removed. No secret is in the answer. Raises
    `ApplyError` if torch cannot be imported, and `Interrupted` if a signal ends us, once the
    processes have ended.
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
        tuple(map(_shareable, rows)),
        time.monotonic() - began,
    )


def _all_tried(
    processes: _Processes,
    todo: list[Trial],
    limits: dict[Trial, float],
    say: Callable[[str], object],
) -> Iterator[Row]:
    """Yield the row of each trial; after one that fails, another process goes on."""
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
                row = _row(trial, answer)
                yield row
                if row.result is Result.FAILED:
                    break


def _row(trial: Trial, answer: dict[str, Any]) -> Row:
    texts = {name: answer[name] for name in ("why", "expected", "found")}
    return Row(trial, Result(answer["result"]), seconds=answer["seconds"], **texts)


def _shareable(row: Row) -> Row:
    """Return `row` as it may be sent to others: errors and logs hold whatever a library says."""
    return replace(
        row,
        why=_shareable_text(row.why),
        expected=_shareable_text(row.expected),
        found=_shareable_text(row.found),
    )


def _shareable_text(text: str) -> str:
    return printable(without_secrets(text, secrets_here())) if text else ""


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
        return f"{ended}: {said}" if said else ended


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
                f"torch cannot be imported: {_shareable_text(why)}\n"
                "    to do: torchrepro doctor says more"
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
                env=environment_below(own),
                cwd=own,
                stdin=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(descriptor,),
                start_new_session=True,
            )


def environment_below(folder: Path) -> dict[str, str]:
    """Return the environment without what a knob sets; files of libraries go into `folder`."""
    ours = {knob.variable for knob in CATALOGUE if knob.variable}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith(OURS)
    }
    if kept.get("PYTHONPATH"):  # a process starts in another folder than we did
        paths = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    caches = {name: folder / name.lower() for name in CACHES}
    for cache in caches.values():
        cache.mkdir()  # CANN passes over a folder that is not there
    return {**kept, **{name: str(cache) for name, cache in caches.items()}, "TMPDIR": str(folder)}
