"""Tries every promise on this machine in child processes, and leaves nothing behind.

A child starts without torch: variables are tried before torch is imported, as a program would set
them. It takes trials as JSON, and answers each with a line of JSON; without trials it says what the
machine is. An attempt returns if its promise is held, and raises if it is not.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torchrepro
from torchrepro.application.applier import apply
from torchrepro.application.launch import prepared
from torchrepro.ground.console import Displayed, Part, Styled, parts, table
from torchrepro.ground.errors import ApplyError
from torchrepro.ground.messages import printable, shown, some
from torchrepro.ground.redaction import without_secrets
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.knobs.knob import Knob, MissingState
from torchrepro.manifest.contents import secrets_here
from torchrepro.manifest.environment import hardware, software
from torchrepro.profile.load import resolve
from torchrepro.reporting.outcomes import Outcome
from torchrepro.reporting.process_state import HARDWARE, absent_hardware
from torchrepro.verdict.render import counted
from torchrepro.verification.runner import end_group, signals_raised, status_in_words

if TYPE_CHECKING:
    import torch


CPU = "cpu"
ACCELERATORS = ("cuda", "npu", "mps", "xpu")
DEVICES = (CPU, *ACCELERATORS)

_P = 0.5  # the share of elements that dropout drops
_CLOSE = 1e-3  # results that differ by less have lost no element
_DETERMINISTIC = {"torch": {"deterministic_algorithms": "error"}}
_NAMESPACE = "torchrepro_selftest"
_FAULTY_STEP = 1


class NotHeldError(Exception):
    """A promise is not held: what was expected, and what was found."""


class NotHereError(Exception):
    """There is nothing here to try the promise on; the text says why."""


def _expect(holds: object, expected: str, found: str) -> None:
    if not holds:
        raise NotHeldError(expected, found)


def knob_holds(name: str) -> None:
    """Write legal values of a knob until one is new to it; each is read back and undone.

    Raises `NotHereError` if none could be written that was not there before.
    """
    knob = knobs_by_name()[name]
    if knob.door == "interpreter":
        _reaches_a_new_process(knob)
        return
    if knob.library:
        import_module(knob.library)
    rows = []
    for value in knob.legal.examples():
        variables, before = dict(os.environ), _state(knob)
        with apply(_asking_for(knob, value)) as applied:
            row = applied.report[knob.name]
            if row.outcome is Outcome.APPLIED:
                read = f"reads {shown(knob.access.read())}"
                _expect(knob.holds(value), f"{shown(value)} reads back", read)
        after = _state(knob)
        _same_variables(knob, variables)
        for each in before:
            back = f"{each} back at {shown(before[each])} after the undo"
            _expect(before[each] == after[each], back, shown(after[each]))
        if row.outcome is Outcome.APPLIED:
            return
        skipped = row.outcome in (Outcome.UNCHANGED, Outcome.UNSUPPORTED)
        _expect(skipped, f"{shown(value)} is written and reads back", f"{row.outcome}: {row.why}")
        rows.append(row)
    refused = [row.why for row in rows if row.outcome is Outcome.UNSUPPORTED]
    values = " and ".join(dict.fromkeys(shown(row.after) for row in rows))
    raise NotHereError(refused[0] if refused else f"it has {values} here, nothing is new")


def _state(knob: Knob) -> dict[str, Any]:
    if knob.variable:  # torch is not to be imported yet
        return {}
    from torchrepro.seeding.state import rng_state

    try:
        read = knob.access.read()
    except MissingState as missing:
        read = str(missing)
    return {knob.name: read, "the generators": rng_state()}


def _same_variables(knob: Knob, before: Mapping[str, str]) -> None:
    # Values of other variables than the knob's own may be secret.
    own, after = knob.variable, os.environ
    back = f"{own} back at {shown(before.get(own))} after the undo"
    _expect(before.get(own) == after.get(own), back, shown(after.get(own)))
    names = sorted({*before, *after})
    changed = [name for name in names if before.get(name) != after.get(name)]
    _expect(not changed, "every variable as it was, after the undo", f"changed: {some(changed)}")


def _asking_for(knob: Knob, value: Any) -> dict[str, Any]:
    wanted = {knob.profile_key: value}
    if knob.needs and knob.needing(value):
        needed = knobs_by_name()[knob.needs]
        wanted[needed.profile_key] = (knob.needed or needed.legal.examples())[0]
    profile: dict[str, Any] = {}
    for key, its in wanted.items():
        section = profile
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = its
    return profile


_LOOK = """
import json, os, sys
from torchrepro.knobs.catalogue import knobs_by_name
knob = knobs_by_name()[sys.argv[1]]
text = os.environ.get(knob.variable)
print(json.dumps([text, knob.effect.check(text) if knob.effect and text else [None, ""]]))
"""


def _reaches_a_new_process(knob: Knob) -> None:
    before = dict(os.environ)
    for value in knob.legal.examples():
        command = [sys.executable, "-c", _LOOK, knob.name]
        program, environment = prepared(resolve(_asking_for(knob, value)), command)
        done = subprocess.run(  # noqa: S603 - our own Python
            [program, *command[1:]], env=environment, capture_output=True, text=True, check=False
        )
        expected = f"{knob.variable}={value} in a process that starts under it"
        _expect(not done.returncode, expected, done.stderr.strip().rpartition("\n")[2])
        text, (in_effect, words) = json.loads(done.stdout)
        reached = text == value and in_effect is not False
        _expect(reached, expected, words or f"{knob.variable}={text}")
    _same_variables(knob, before)


def dropout_is_zeroed(device: str) -> None:
    """Call what drops elements before, under and after the policy."""
    import torch
    from torch import nn

    ones = torch.ones(16, 16, device=device)
    query = torch.linspace(-1, 1, 2 * 16 * 8).reshape(1, 2, 16, 8).to(device)

    def recurrent(p: float) -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.LSTM(8, 8, num_layers=2, dropout=p).to(device)
        result: torch.Tensor = layer(torch.linspace(-1, 1, 64).reshape(4, 2, 8).to(device))[0]
        return result.detach()

    layers: dict[str, Callable[[float], torch.Tensor]] = {
        "nn.Dropout": lambda p: nn.Dropout(p)(ones),
        "functional.dropout": lambda p: nn.functional.dropout(ones, p),
        "attention": lambda p: nn.functional.scaled_dot_product_attention(
            query, query, query, dropout_p=p
        ),
        "LSTM": recurrent,
    }

    def dropping() -> str:
        found = [
            name
            for name, layer in layers.items()
            if (layer(_P) - layer(0.0)).abs().max().item() >= _CLOSE
        ]
        return ", ".join(found) or "nothing"

    before, all_drop = dropping(), ", ".join(layers)
    with apply({"dropout": "zero"}):
        under = dropping()
    after = dropping()
    dropped = "elements are dropped"
    _expect(under == "nothing", "no element is dropped under the policy", f"dropped in {under}")
    _expect(before == all_drop, f"{dropped} without the policy", f"dropped only in {before}")
    _expect(after == all_drop, f"{dropped} again after it", f"dropped in {after}")


def host_draws(device: str) -> None:
    """Draw from one seed on the CPU, and on the device before, under and after the policy."""
    import torch

    draws: dict[str, Callable[[str], torch.Tensor]] = {
        "rand": lambda on: torch.rand(8, device=on),
        "randn": lambda on: torch.randn(8, device=on),
        "randint": lambda on: torch.randint(1000, (8,), device=on),
        "randperm": lambda on: torch.randperm(8, device=on),
        "normal_": lambda on: torch.empty(8, device=on).normal_(),
        "dropout": lambda on: torch.nn.functional.dropout(torch.ones(16, 16, device=on), _P),
    }

    def drawn(on: str) -> dict[str, Any]:
        found = {}
        for name, draw in draws.items():
            torch.manual_seed(7)
            found[name] = draw(on).cpu().tolist()
        return found

    expected, before = drawn(CPU), drawn(device)
    with apply({"device": {"rng": "host"}}):
        under = drawn(device)
    other = ", ".join(name for name in expected if under[name] != expected[name])
    _expect(not other, "the numbers of the CPU", f"other numbers from {other}")
    own = "the device's own numbers after the undo"
    _expect(drawn(device) == before, own, "other numbers")


def fallback_goes_on(device: str) -> None:
    """Call an op that torch refuses on this device, with and without the policy."""
    import torch

    places, values = torch.tensor([0, 0, 3]).to(device), torch.tensor([1.0, 2.0, 5.0]).to(device)
    pooled = torch.arange(4.0).reshape(1, 1, 2, 2).to(device)
    origins = torch.tensor([0, 2, 8, 10]).reshape(1, 1, 2, 2).to(device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "aten::put_": lambda: torch.zeros(4, device=device).put_(places, values),
        "aten::max_unpool2d": lambda: torch.nn.functional.max_unpool2d(pooled, origins, [2, 2]),
    }

    def refusal(name: str) -> str:
        try:
            calls[name]()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    with apply({"backends": _DETERMINISTIC}):
        refused = [name for name in calls if refusal(name)]
    if not refused:
        raise NotHereError(f"torch refuses none of {', '.join(calls)} on this device")
    name = refused[0]
    with apply({"backends": _DETERMINISTIC, "device": {"fallback": "cpu"}}) as applied:
        why = refusal(name)
        _expect(not why, f"{name} goes on", why)
        results = [calls[name]().cpu().tolist() for _ in range(2)]
        counted = [effect for effect in applied.report.effects if effect.subject == name]
    _expect(results[0] == results[1], f"{name} gives the same twice", shown(results))
    _expect(counted, f"the report counts the calls of {name}", "no calls")
    with apply({"backends": _DETERMINISTIC}):
        _expect(refusal(name), f"torch refuses {name} again after the undo", "it runs")


def one_bit_is_told(device: str) -> None:
    """Record a program twice, and once with one value changed by one ulp in one op."""
    import torch

    from torchrepro.trace.recorder import end_step, record
    from torchrepro.verdict.comparison import compare

    is_faulty = False

    def doubled(value: torch.Tensor) -> torch.Tensor:
        result = value.cpu() * 2
        if is_faulty:
            result[5] = torch.nextafter(result[5], torch.tensor(float("inf")))
        return result.to(value.device)

    name = f"scaled_on_{device}"
    library: Any = import_module("torch.library").Library(_NAMESPACE, "FRAGMENT")
    library.define(f"{name}(Tensor value) -> Tensor")
    library.impl(name, doubled, "CompositeExplicitAutograd")
    scaled = getattr(getattr(torch.ops, _NAMESPACE), name)
    runs = [Path(tempfile.mkdtemp()) / name for name in ("first", "second", "faulty")]
    for run in runs:
        with record(run):
            value = torch.linspace(-1, 1, 64).to(device)
            for step in range(3):
                is_faulty = run.name == "faulty" and step == _FAULTY_STEP
                value = (scaled(value).tanh() + value).sin()
                end_step()
    same, found = compare(runs[0], runs[1]), compare(runs[0], runs[2])
    _expect(same.same, "two recordings of the same are the same", _place(same))
    expected = f"they diverge at step {_FAULTY_STEP} in {_NAMESPACE}::{name}"
    place = "the same" if found.same else _place(found)
    _expect(place.removesuffix(".default") == expected, expected, place)


def _place(verdict: Any) -> str:
    first = verdict.first
    if first is None:
        return "they differ"
    return f"they diverge at step {first.step} in {first.op or first.kind}"


def two_runs_are_the_same(device: str) -> None:
    """Verify a small training on the device under the strictest profile."""
    from torchrepro.verification.verifier import verify

    folder = Path(tempfile.mkdtemp()) / "runs"
    command = [sys.executable, "-c", f"from {__name__} import train; train({device!r})"]
    found = verify("debug-strict", command, closer=False, folder=folder)
    _expect(found.same, "the same bits in both runs", _place(found.verdict))


def train(device: str) -> None:
    """Train a convolution, dropout and a linear layer on random images."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    images = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(4, (64,)))
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(4 * 6 * 6, 4)),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for image, label in DataLoader(images, batch_size=16, shuffle=True):
        loss = nn.functional.cross_entropy(model(image.to(device)), label.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise, tried once for each of its devices."""

    name: str
    sentence: str  # what holds, in words
    attempt: Callable[[str], None]  # tries it on a device, or for a knob
    devices: tuple[str, ...] = DEVICES  # empty: for every knob instead, on the knob's own device
    many: str = ""  # the sentence for several knobs at once, with a place for how many
    limit: float = 60.0  # seconds after which an attempt counts as failed


PROMISES = (
    Promise(
        "knob",
        "a setting is written, reads back, and is put back as it was",
        knob_holds,
        devices=(),
        many="written, read back, and put back as it was: {}",
    ),
    Promise("dropout", "`dropout: zero` lets every element through", dropout_is_zeroed),
    Promise(
        "host random numbers",
        "`device.rng: host` draws what the CPU draws",
        host_draws,
        devices=ACCELERATORS,  # the CPU draws what the CPU draws
    ),
    Promise("fallback", "`device.fallback: cpu` goes on where torch refuses", fallback_goes_on),
    Promise("one bit", "two recordings tell one bit, and the op it is in", one_bit_is_told),
    Promise(
        "the same twice",
        "two runs under debug-strict are the same",
        two_runs_are_the_same,
        limit=180.0,
    ),
)


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


class PromiseTrial(NamedTuple):
    """A promise on a device, or for one knob of it."""

    promise: Promise
    device: str
    knob: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one trial."""

    promise: str
    device: str
    knob: str
    result: Result
    why: str = ""  #: Why it is not here.
    expected: str = ""
    found: str = ""  #: What was expected of a promise that failed, and what was found instead.
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SelfTest(Displayed):
    """What became of every promise on one machine."""

    version: str  # of torchrepro
    date: str
    machine: Mapping[str, Any]  #: Versions, hardware and devices; see `machine_facts`.
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


def trials() -> Iterator[PromiseTrial]:
    """Yield what is to be tried, whatever this machine has."""
    for promise in PROMISES:
        for device in promise.devices:
            yield PromiseTrial(promise, device)
        for knob in () if promise.devices else CATALOGUE:
            yield PromiseTrial(promise, HARDWARE.get(knob.hardware, CPU), knob.name)


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
                    name = trial.knob or trial.promise.name
                    meanwhile(f"{tried} of {len(todo)}: {name} on {trial.device} ...")
                    became, why = answer(trial.promise.limit)
                    rows.append(_row(trial, became or {"result": Result.FAILED, "found": why}))
                    if rows[-1].result is Result.FAILED:
                        break
    seconds = time.monotonic() - began
    stamp = date.isoformat(timespec="seconds")
    return SelfTest(str(torchrepro.__version__), stamp, machine, tuple(rows), seconds)


def _row(trial: PromiseTrial, became: Mapping[str, Any]) -> Row:
    result = Result(became["result"])
    if result is Result.FAILED:
        became = {"expected": trial.promise.sentence, **became}
    texts = {key: _shareable(became.get(key, "")) for key in ("why", "expected", "found")}
    seconds = became.get("seconds", 0.0)
    return Row(trial.promise.name, trial.device, trial.knob, result, **texts, seconds=seconds)


def _shareable(text: str) -> str:
    # Errors and logs hold whatever a library says.
    return printable(without_secrets(text, secrets_here())) if text else ""


@contextmanager
def _child(
    asked: Sequence[PromiseTrial], folder: Path
) -> Iterator[Callable[[float], tuple[dict[str, Any] | None, str]]]:
    # Yields what waits so many seconds for the next answer: that, or None and why there is none.
    own = Path(tempfile.mkdtemp(dir=folder))
    log = own / "log"
    words = json.dumps([(trial.promise.name, trial.knob or trial.device) for trial in asked])
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own Python
            [sys.executable, "-c", f"from {__name__} import try_each; try_each()", words],
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


def try_each() -> None:
    """Try what the command line asks for: what a child does."""
    asked = json.loads(sys.argv[1])
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
                expected, its = fault.args
                found = {"result": Result.FAILED, "expected": expected, "found": its}
            except Exception as error:  # noqa: BLE001 - what was found instead of the promise
                words = str(error).strip().partition("\n")[0]
                found = {"result": Result.FAILED, "found": f"{type(error).__name__}: {words}"}
            found["seconds"] = time.monotonic() - began
            print(json.dumps(found), file=answers, flush=True)
