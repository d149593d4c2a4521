"""Tries every promise on this machine in a child process, and leaves nothing behind.

``python -m torchrepro.selftest.self_test TRIALS`` is the child. It takes the trials as JSON, and
answers each with a line of JSON; without trials it says what the machine is.
"""

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
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torchrepro
from torchrepro.console import Displayed, Part, Styled, parts, table
from torchrepro.errors import ApplyError
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.manifest.contents import secrets_here
from torchrepro.manifest.environment import hardware, software
from torchrepro.messages import printable, some
from torchrepro.process_state import HARDWARE, absent_hardware
from torchrepro.redaction import without_secrets
from torchrepro.selftest.attempts import CPU, DEVICES, PROMISES, NotHeldError, NotHereError, Promise
from torchrepro.verdict.render import counted
from torchrepro.verification.runner import end_group, signals_raised, status_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


FORMAT = 1  # the number of the JSON format

CACHES = (
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"),
    *("ASCEND_PROCESS_LOG_PATH", "ASCEND_CACHE_PATH", "XDG_CACHE_HOME"),
)
"""Name folders for what libraries compile and log, which are in the home folder otherwise."""

_START = 120.0  # seconds that a process has to import torch and say what the machine is
_NAMED = 2  # settings or promises that are named one by one


class Result(StrEnum):
    """What became of a promise on a device."""

    HELD = "held"
    FAILED = "failed"
    NOT_HERE = "not here"


_STYLES = {Result.HELD: "green", Result.FAILED: "bold red", Result.NOT_HERE: "dim"}


class Trial(NamedTuple):
    """A promise on a device, or for one knob of it."""

    promise: Promise
    device: str
    knob: str = ""

    def __str__(self) -> str:
        return f"{self.knob or self.promise.name} on {self.device}"


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one trial."""

    promise: str
    device: str
    knob: str
    result: Result
    why: str = ""
    """Why it is not here."""

    expected: str = ""
    found: str = ""
    """What was expected of a promise that failed, and what was found instead."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SelfTest(Displayed):
    """What became of every promise on one machine."""

    version: str
    """The version of torchrepro."""

    date: str
    machine: Mapping[str, Any]
    """Versions, hardware and devices; see `machine_facts`."""

    rows: tuple[Row, ...]
    seconds: float

    @property
    def held(self) -> bool:
        """Whether no promise failed."""
        return not self.having(Result.FAILED)

    def having(self, result: Result) -> tuple[Row, ...]:
        """Return the rows with this result."""
        return tuple(row for row in self.rows if row.result is result)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        return {
            "selftest": FORMAT,
            "torchrepro": self.version,
            "date": self.date,
            "machine": dict(self.machine),
            "promises": {promise.name: promise.sentence for promise in PROMISES},
            "counts": {str(result): len(self.having(result)) for result in Result},
            "seconds": round(self.seconds, 1),
            "rows": [
                {**asdict(row), "result": str(row.result), "seconds": round(row.seconds, 3)}
                for row in self.rows
            ],
        }


@parts.register(SelfTest)
def selftest_parts(found: SelfTest) -> tuple[Part, ...]:
    """Return the lines and the table that show a self-test.

    Promises that are held take a line for each device, settings together; so does what is not
    here. Each one that failed has its own, with what was expected and what was found.
    """
    cells: list[tuple[Result, str, str, str]] = []
    held, absent = found.having(Result.HELD), found.having(Result.NOT_HERE)
    for promise in PROMISES:
        for device in DEVICES:
            about = promise.name, device
            rows = [row for row in held if (row.promise, row.device) == about]
            if rows:
                words = promise.many.format(counted(len(rows), "setting")) or promise.sentence
                seconds = sum(row.seconds for row in rows)
                cells.append((Result.HELD, device, f"{seconds:.1f}", words))
    sentences = {promise.name: promise.sentence for promise in PROMISES}
    for row in found.having(Result.FAILED):
        subject = row.knob or sentences[row.promise]
        words = f"{subject}: expected: {row.expected}; found: {row.found}"
        cells.append((Result.FAILED, row.device, f"{row.seconds:.1f}", words))
    reasons = dict.fromkeys((row.device, row.why) for row in absent)
    for device, why in sorted(reasons, key=lambda reason: DEVICES.index(reason[0])):
        rows = [row for row in absent if (row.device, row.why) == (device, why)]
        cells.append((Result.NOT_HERE, device, "", f"{_subjects(rows)}: {why}"))
    shown = [(Styled(result, _STYLES[result]), *words) for result, *words in cells]
    versions = found.machine["versions"]
    names = [name for names in found.machine["names"].values() for name in dict.fromkeys(names)]
    cpu = found.machine["hardware"].get("cpu", "")
    heading = f"torchrepro {found.version}", f"torch {versions.get('torch')}", *names, cpu
    counts = ", ".join(f"{len(found.having(result))} {result}" for result in Result)
    todo = (
        "to send it with its machine: torchrepro selftest --json, as an issue of the project"
        if found.held
        else "to do: send `torchrepro selftest --json` as an issue of the project"
    )
    return (
        ", ".join(filter(None, [*heading, found.date[:10]])),
        table(("result", "device", "s", "promise"), shown),
        f"{counts} in {found.seconds:.0f} s\n{todo}",
    )


def _subjects(rows: Sequence[Row]) -> str:
    knobs = [row.knob for row in rows if row.knob]
    others = [row.promise for row in rows if not row.knob]
    words = [some(knobs) if len(knobs) <= _NAMED else counted(len(knobs), "setting")]
    words += others if len(others) <= _NAMED else [counted(len(others), "promise")]
    return ", ".join(filter(None, words))


def trials() -> Iterator[Trial]:
    """Yield what is to be tried, whatever this machine has."""
    for promise in PROMISES:
        for device in promise.devices:
            yield Trial(promise, device)
        for knob in () if promise.devices else CATALOGUE:
            yield Trial(promise, HARDWARE.get(knob.hardware, CPU), knob.name)


def selftest(meanwhile: Callable[[str], object] = print) -> SelfTest:
    """Try every promise on every device of this machine.

    They are tried one after another in a process that starts without the variables that a knob
    sets, so what the user has exported has no say. After a promise that failed another process
    goes on: what the failure has left behind is not there. `meanwhile` takes what is being tried.
    All files are in a temporary folder that is removed. No secret is in the answer. Raises
    `ApplyError` if torch cannot be imported, and `Interrupted` if a signal ends us, once the
    processes have ended.
    """
    began, date = time.monotonic(), datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="torchrepro-selftest-") as place, signals_raised():
        folder = Path(place).resolve()
        meanwhile("importing torch ...")
        with _child([], folder) as answer:
            machine, why = answer(_START)
        if machine is None:
            raise ApplyError(
                f"torch cannot be imported: {_shareable(why)}\n"
                "    to do: torchrepro doctor says more"
            )
        rows, todo = [], []
        for trial in trials():
            why = machine["absent"].get(trial.device)
            if why:
                rows.append(_row(trial, {"result": Result.NOT_HERE, "why": why}))
            else:
                todo.append(trial)
        tried = 0
        while tried < len(todo):
            with _child(todo[tried:], folder) as answer:
                for trial in todo[tried:]:
                    tried += 1
                    meanwhile(f"{tried} of {len(todo)}: {trial} ...")
                    became, why = answer(trial.promise.limit)
                    failed = {"result": Result.FAILED, "found": why}
                    rows.append(_row(trial, became or failed))
                    if rows[-1].result is Result.FAILED:
                        break
    seconds = time.monotonic() - began
    stamp = date.isoformat(timespec="seconds")
    return SelfTest(str(torchrepro.__version__), stamp, machine, tuple(rows), seconds)


def _row(trial: Trial, became: Mapping[str, Any]) -> Row:
    result = Result(became["result"])
    if result is Result.FAILED:
        became = {"expected": trial.promise.sentence, **became}
    texts = {key: _shareable(became.get(key, "")) for key in ("why", "expected", "found")}
    seconds = became.get("seconds", 0.0)
    return Row(trial.promise.name, trial.device, trial.knob, result, **texts, seconds=seconds)


def _shareable(text: str) -> str:
    """Return `text` as it may be sent to others: errors and logs hold whatever a library says."""
    return printable(without_secrets(text, secrets_here())) if text else ""


@contextmanager
def _child(
    asked: Sequence[Trial], folder: Path
) -> Iterator[Callable[[float], tuple[dict[str, Any] | None, str]]]:
    """Start a process that tries promises, with all its files in `folder`.

    Returns what waits so many seconds for its next answer: that, or None and why there is none.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    log = own / "log"
    words = json.dumps([(trial.promise.name, trial.knob or trial.device) for trial in asked])
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own Python
            [sys.executable, "-m", __name__, words],
            env=environment_below(own),
            cwd=own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            bufsize=0,  # a line that follows stays in the pipe, where `select` sees it
        )
    answers: Any = process.stdout

    def answer(limit: float) -> tuple[dict[str, Any] | None, str]:
        ready, _, _ = select.select([answers], [], [], limit)
        if not ready:
            return None, f"no answer within {limit:g} s"
        line = answers.readline()
        if line.endswith(b"\n"):
            found: dict[str, Any] = json.loads(line)
            return found, ""
        said = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        ended = f"the process ended with {status_in_words(process.wait())}"
        return None, f"{ended}: {said}" if said else ended

    try:
        yield answer
    finally:
        answers.close()
        end_group(process)


def environment_below(folder: Path) -> dict[str, str]:
    """Return the environment without what a knob sets; files of libraries go into `folder`.

    Our own variables are left out too: a profile around this command is not tried here.
    """
    ours = {knob.variable for knob in CATALOGUE if knob.variable}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("TORCHREPRO_")
    }
    if kept.get("PYTHONPATH"):  # a process starts in another folder than we did
        paths = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    caches = {name: folder / name.lower() for name in CACHES}
    for cache in caches.values():
        cache.mkdir()  # CANN passes over a folder that is not there
    return {**kept, **{name: str(cache) for name, cache in caches.items()}, "TMPDIR": str(folder)}


def machine_facts() -> dict[str, Any]:
    """Return versions, hardware and devices as plain JSON values; imports torch.

    Holds no name of the machine or of a person. ``absent`` says of every other device why it is
    not here.
    """
    torch = import_module("torch")
    absent = {HARDWARE[name]: why for name, why in absent_hardware().items()}
    names = {}
    for device in DEVICES[1:]:
        module = getattr(torch, device, None)
        if device in absent:
            continue
        if module is None or not module.is_available():
            absent[device] = "its driver is here, and torch finds no device"
            continue
        name = getattr(module, "get_device_name", lambda index: device)  # noqa: B023
        names[device] = [name(index) for index in range(module.device_count())]
    return {
        "versions": {name: each for name, each in software().items() if each is not None},
        "hardware": {name: each for name, each in hardware().items() if each is not None},
        "devices": [CPU, *names],
        "names": names,
        "absent": absent,
    }


def _try_each(asked: Sequence[Sequence[str]]) -> None:
    # What an attempt or a library prints goes to the log: the parent gets the answers alone.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        attempts = {promise.name: promise.attempt for promise in PROMISES}
        if not asked:
            print(json.dumps(machine_facts()), file=answers)
        for name, subject in asked:
            began = time.monotonic()
            found: dict[str, Any] = {"result": Result.HELD}
            try:
                attempts[name](subject)
            except NotHereError as absent:
                found = {"result": Result.NOT_HERE, "why": str(absent)}
            except NotHeldError as fault:
                found = {"result": Result.FAILED, "expected": fault.expected, "found": fault.found}
            except Exception as error:  # noqa: BLE001 - what was found instead of the promise
                words = str(error).strip().partition("\n")[0]
                found = {"result": Result.FAILED, "found": f"{type(error).__name__}: {words}"}
            found["seconds"] = time.monotonic() - began
            print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    _try_each(json.loads(sys.argv[1]))
