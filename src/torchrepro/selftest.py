"""Test every promise on this machine in child processes, and leave no file or setting behind.

A child process starts without torch, so that it sets environment variables before it imports torch,
as a program would. It reads trials as JSON and prints one line of JSON for each trial; without
trials it prints facts about the machine. The function that tests a promise raises an error if the
promise does not hold.
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
from torchrepro.ground.errors import ApplyError, printable, shown, some
from torchrepro.ground.redaction import without_secrets
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.knobs.knob import Knob, MissingState
from torchrepro.manifest.contents import known_secrets
from torchrepro.manifest.environment import hardware, software
from torchrepro.profile.load import resolve
from torchrepro.reporting.outcomes import Outcome
from torchrepro.reporting.process_state import HARDWARE, absent_hardware
from torchrepro.verdict.render import counted
from torchrepro.verification.runner import end_group, raise_on_signals, status_in_words

if TYPE_CHECKING:
    import torch


CPU = "cpu"
ACCELERATORS = ("cuda", "npu", "mps", "xpu")
DEVICES = (CPU, *ACCELERATORS)

_P = 0.5  # probability of dropout
_CLOSE = 1e-3  # if results differ by less, no element was dropped
_DETERMINISTIC = {"torch": {"deterministic_algorithms": "error"}}
_NAMESPACE = "torchrepro_selftest"
_FAULTY_STEP = 1


class NotHeldError(Exception):
    """A promise does not hold; the arguments are the expected and the actual behaviour."""


class CannotTestError(Exception):
    """This machine cannot test the promise; the message explains why."""


def _expect(holds: object, expected: str, actual: str) -> None:
    if not holds:
        raise NotHeldError(expected, actual)


def knob_holds(name: str) -> None:
    """Test that a legal value that changes a knob can be set, read back and undone.

    Raises `CannotTestError` if no legal value changes the knob.
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
        with apply(_profile_with(knob, value)) as applied:
            row = applied.report[knob.name]
            if row.outcome is Outcome.APPLIED:
                read = f"reads {shown(knob.access.read())}"
                _expect(knob.holds(value), f"{shown(value)} is read back", read)
        after = _state(knob)
        _same_variables(knob, variables)
        for state in before:
            expected = f"{state} is {shown(before[state])} again after the undo"
            _expect(before[state] == after[state], expected, shown(after[state]))
        if row.outcome is Outcome.APPLIED:
            return
        skipped = row.outcome in (Outcome.UNCHANGED, Outcome.UNSUPPORTED)
        _expect(skipped, f"{shown(value)} is written and read back", f"{row.outcome}: {row.why}")
        rows.append(row)
    refused = [row.why for row in rows if row.outcome is Outcome.UNSUPPORTED]
    values = " and ".join(dict.fromkeys(shown(row.after) for row in rows))
    raise CannotTestError(
        refused[0] if refused else f"already {values}: no legal value would change it"
    )


def _state(knob: Knob) -> dict[str, Any]:
    if knob.variable:  # must not import torch yet
        return {}
    from torchrepro.seeding.state import rng_state

    try:
        read = knob.access.read()
    except MissingState as missing:
        read = str(missing)
    return {knob.name: read, "the state of the generators": rng_state()}


def _same_variables(knob: Knob, before: Mapping[str, str]) -> None:
    # Show only the names of other variables, because their values may be secret.
    variable, after = knob.variable, os.environ
    expected = f"{variable} is {shown(before.get(variable))} again after the undo"
    _expect(before.get(variable) == after.get(variable), expected, shown(after.get(variable)))
    names = sorted({*before, *after})
    changed = [name for name in names if before.get(name) != after.get(name)]
    _expect(not changed, "no variable has changed after the undo", f"changed: {some(changed)}")


def _profile_with(knob: Knob, value: Any) -> dict[str, Any]:
    wanted = {knob.profile_key: value}
    if knob.needs and knob.needing(value):
        needed = knobs_by_name()[knob.needs]
        wanted[needed.profile_key] = (knob.needed or needed.legal.examples())[0]
    profile: dict[str, Any] = {}
    for key, setting in wanted.items():
        section = profile
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = setting
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
        program, environment = prepared(resolve(_profile_with(knob, value)), command)
        done = subprocess.run(  # noqa: S603 - our own Python
            [program, *command[1:]], env=environment, capture_output=True, text=True, check=False
        )
        expected = f"{knob.variable}={value} in a new process with this profile"
        _expect(not done.returncode, expected, done.stderr.strip().rpartition("\n")[2])
        text, (in_effect, words) = json.loads(done.stdout)
        reached = text == value and in_effect is not False
        _expect(reached, expected, words or f"{knob.variable}={text}")
    _same_variables(knob, before)


def dropout_is_zeroed(device: str) -> None:
    """Test that functions drop elements before and after `dropout: zero`, but not during it."""
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
        names = [
            name
            for name, layer in layers.items()
            if (layer(_P) - layer(0.0)).abs().max().item() >= _CLOSE
        ]
        return ", ".join(names) or "nothing"

    before, all_drop = dropping(), ", ".join(layers)
    with apply({"dropout": "zero"}):
        under = dropping()
    after = dropping()
    dropped = "elements are dropped"
    _expect(under == "nothing", "no element is dropped with the policy", f"dropped in {under}")
    _expect(before == all_drop, f"{dropped} without the policy", f"dropped only in {before}")
    _expect(after == all_drop, f"{dropped} again after it", f"dropped in {after}")


def host_draws(device: str) -> None:
    """Test that `device.rng: host` draws the CPU's random numbers on the device, until its undo."""
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
        numbers = {}
        for name, draw in draws.items():
            torch.manual_seed(7)
            numbers[name] = draw(on).cpu().tolist()
        return numbers

    expected, before = drawn(CPU), drawn(device)
    with apply({"device": {"rng": "host"}}):
        under = drawn(device)
    different = ", ".join(name for name in expected if under[name] != expected[name])
    same = "the same random numbers as on the CPU"
    _expect(not different, same, f"different random numbers from {different}")
    again = "the random numbers of the device again after the undo"
    _expect(drawn(device) == before, again, "different random numbers")


def fallback_runs_on_cpu(device: str) -> None:
    """Test that `device.fallback: cpu` runs an op that torch refuses to run on this device."""
    import torch

    indices, values = torch.tensor([0, 0, 3]).to(device), torch.tensor([1.0, 2.0, 5.0]).to(device)
    pooled = torch.arange(4.0).reshape(1, 1, 2, 2).to(device)
    origins = torch.tensor([0, 2, 8, 10]).reshape(1, 1, 2, 2).to(device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "aten::put_": lambda: torch.zeros(4, device=device).put_(indices, values),
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
        raise CannotTestError(f"torch refuses none of {', '.join(calls)} on this device")
    name = refused[0]
    with apply({"backends": _DETERMINISTIC, "device": {"fallback": "cpu"}}) as applied:
        why = refusal(name)
        _expect(not why, f"{name} runs", why)
        results = [calls[name]().cpu().tolist() for _ in range(2)]
        counted = [effect for effect in applied.report.effects if effect.subject == name]
    _expect(results[0] == results[1], f"{name} computes the same twice", shown(results))
    _expect(counted, f"the report counts the calls of {name}", "no calls")
    with apply({"backends": _DETERMINISTIC}):
        _expect(refusal(name), f"torch refuses {name} again after the undo", "it runs")


def one_bit_is_found(device: str) -> None:
    """Test that a comparison finds the only op whose result differs, by one ulp in one value."""
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
    same, faulty = compare(runs[0], runs[1]), compare(runs[0], runs[2])
    _expect(same.same, "two recordings of one program are the same", _divergence(same))
    expected = f"they diverge at step {_FAULTY_STEP} in {_NAMESPACE}::{name}"
    verdict = "the same" if faulty.same else _divergence(faulty)
    _expect(verdict.removesuffix(".default") == expected, expected, verdict)


def _divergence(verdict: Any) -> str:
    first = verdict.first
    if first is None:
        return "they differ"
    return f"they diverge at step {first.step} in {first.op or first.kind}"


def two_runs_are_the_same(device: str) -> None:
    """Test that two runs of `train` on the device are the same under debug-strict."""
    from torchrepro.verification.verifier import verify

    folder = Path(tempfile.mkdtemp()) / "runs"
    command = [sys.executable, "-c", f"from {__name__} import train; train({device!r})"]
    verification = verify("debug-strict", command, closer=False, folder=folder)
    verdict = verification.verdict
    _expect(verification.same, "both runs are bitwise the same", _divergence(verdict))


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
    """A behaviour that torchrepro promises, tested once per device or once per knob."""

    name: str
    sentence: str  # the promise in words
    attempt: Callable[[str], None]  # tests it on a device, or for a knob
    devices: tuple[str, ...] = DEVICES  # if empty: once per knob, on the device of the knob
    many: str = ""  # the sentence for several knobs; `{}` is their number
    limit: float = 60.0  # timeout of an attempt in seconds


PROMISES = (
    Promise(
        "knob",
        "a setting can be written, read back and restored",
        knob_holds,
        devices=(),
        many="written, read back and restored: {}",
    ),
    Promise("dropout", "`dropout: zero` drops no element", dropout_is_zeroed),
    Promise(
        "host random numbers",
        "`device.rng: host` draws the same random numbers as the CPU",
        host_draws,
        devices=ACCELERATORS,  # trivially true on the CPU
    ),
    Promise("fallback", "`device.fallback: cpu` runs ops that torch refuses", fallback_runs_on_cpu),
    Promise(
        "one bit",
        "a comparison finds one changed bit, and the op that changed it",
        one_bit_is_found,
    ),
    Promise(
        "the same twice",
        "two runs under debug-strict are bitwise the same",
        two_runs_are_the_same,
        limit=180.0,
    ),
)


FORMAT = 1  # the number of the JSON format

CACHES = (
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"),
    *("ASCEND_PROCESS_LOG_PATH", "ASCEND_CACHE_PATH", "XDG_CACHE_HOME"),
)
"""Variables that name folders for caches and logs. By default, they are in the home folder."""

_START = 120.0  # timeout in seconds to import torch and report facts about the machine
_NAMED = 2  # up to so many settings or promises are listed by name


class Result(StrEnum):
    """The result of one test of a promise."""

    HELD = "held"
    FAILED = "failed"
    NOT_HERE = "not here"


_STYLES = {Result.HELD: "green", Result.FAILED: "bold red", Result.NOT_HERE: "dim"}


class PromiseTrial(NamedTuple):
    """One test of a promise: on a device, or for a knob."""

    promise: Promise
    device: str
    knob: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one trial."""

    promise: str
    device: str
    knob: str
    result: Result
    why: str = ""  #: Why this machine cannot test the promise.
    expected: str = ""  #: The expected behaviour, for a promise that failed.
    found: str = ""  #: The actual behaviour, for a promise that failed.
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SelfTest(Displayed):
    """The results of all promises on one machine."""

    version: str  # of torchrepro
    date: str
    machine: Mapping[str, Any]  #: Versions, hardware and devices; see `machine_facts`.
    rows: tuple[Row, ...]
    seconds: float

    @property
    def held(self) -> bool:
        """True if no promise failed."""
        return not self.having(Result.FAILED)

    def having(self, result: Result) -> tuple[Row, ...]:
        """Return the rows with this result."""
        return tuple(row for row in self.rows if row.result is result)

    def to_json(self) -> dict[str, Any]:
        """Return the results as plain JSON values."""
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
def selftest_parts(test: SelfTest) -> tuple[Part, ...]:
    """Return the lines and the table that show a self-test.

    A promise that holds has one line for each device; all settings of a device share a line.
    Promises that cannot be tested for the same reason share a line. A failed promise has its own
    line, with the expected and the actual behaviour.
    """
    cells: list[tuple[Result, str, str, str]] = []
    successes, absent = test.having(Result.HELD), test.having(Result.NOT_HERE)
    for promise in PROMISES:
        for device in DEVICES:
            subject = promise.name, device
            rows = [row for row in successes if (row.promise, row.device) == subject]
            if rows:
                words = promise.many.format(counted(len(rows), "setting")) or promise.sentence
                seconds = sum(row.seconds for row in rows)
                cells.append((Result.HELD, device, f"{seconds:.1f}", words))
    sentences = {promise.name: promise.sentence for promise in PROMISES}
    for row in test.having(Result.FAILED):
        name = row.knob or sentences[row.promise]
        words = f"{name}: expected: {row.expected}; found: {row.found}"
        cells.append((Result.FAILED, row.device, f"{row.seconds:.1f}", words))
    reasons = dict.fromkeys((row.device, row.why) for row in absent)
    for device, why in sorted(reasons, key=lambda reason: DEVICES.index(reason[0])):
        rows = [row for row in absent if (row.device, row.why) == (device, why)]
        cells.append((Result.NOT_HERE, device, "", f"{_subjects(rows)}: {why}"))
    styled = [(Styled(result, _STYLES[result]), *words) for result, *words in cells]
    versions = test.machine["versions"]
    names = [name for names in test.machine["names"].values() for name in dict.fromkeys(names)]
    cpu = test.machine["hardware"].get("cpu", "")
    heading = f"torchrepro {test.version}", f"torch {versions.get('torch')}", *names, cpu
    counts = ", ".join(f"{len(test.having(result))} {result}" for result in Result)
    todo = (
        "to share this result: open an issue with the output of `torchrepro selftest --json`"
        if test.held
        else "to do: open an issue with the output of `torchrepro selftest --json`"
    )
    return (
        ", ".join(filter(None, [*heading, test.date[:10]])),
        table(("result", "device", "s", "promise"), styled),
        f"{counts} in {test.seconds:.0f} s\n{todo}",
    )


def _subjects(rows: Sequence[Row]) -> str:
    knobs = [row.knob for row in rows if row.knob]
    promises = [row.promise for row in rows if not row.knob]
    words = [some(knobs) if len(knobs) <= _NAMED else counted(len(knobs), "setting")]
    words += promises if len(promises) <= _NAMED else [counted(len(promises), "promise")]
    return ", ".join(filter(None, words))


def trials() -> Iterator[PromiseTrial]:
    """Yield all trials, including trials for devices that this machine does not have."""
    for promise in PROMISES:
        for device in promise.devices:
            yield PromiseTrial(promise, device)
        if not promise.devices:
            for knob in CATALOGUE:
                yield PromiseTrial(promise, HARDWARE.get(knob.hardware, CPU), knob.name)


def selftest(meanwhile: Callable[[str], object] = print) -> SelfTest:
    """Test every promise on every device of this machine.

    One child process runs the trials one after another. It starts without the environment
    variables of knobs, so the user's exports have no influence. After a failed promise, a new
    process runs the remaining trials, so that the failure cannot affect them. `meanwhile` is
    called with the name of each trial. All files are in a temporary folder, which is removed. The
    result contains no secrets. Raises `ApplyError` if torch cannot be imported, and `Interrupted`
    after a signal, once the child processes have ended.
    """
    began, date = time.monotonic(), datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="torchrepro-selftest-") as path, raise_on_signals():
        folder = Path(path).resolve()
        meanwhile("importing torch ...")
        with _child([], folder) as answer:
            machine, why = answer(_START)
        if machine is None:
            raise ApplyError(
                f"torch cannot be imported: {_shareable(why)}\n"
                "    to do: run torchrepro doctor for details"
            )
        rows, pending = [], []
        for trial in trials():
            why = machine["absent"].get(trial.device)
            if why:
                rows.append(_row(trial, {"result": Result.NOT_HERE, "why": why}))
            else:
                pending.append(trial)
        tried = 0
        while tried < len(pending):
            with _child(pending[tried:], folder) as answer:
                for trial in pending[tried:]:
                    tried += 1
                    name = trial.knob or trial.promise.name
                    meanwhile(f"{tried} of {len(pending)}: {name} on {trial.device} ...")
                    outcome, why = answer(trial.promise.limit)
                    rows.append(_row(trial, outcome or {"result": Result.FAILED, "found": why}))
                    if rows[-1].result is Result.FAILED:
                        break
    seconds = time.monotonic() - began
    stamp = date.isoformat(timespec="seconds")
    return SelfTest(str(torchrepro.__version__), stamp, machine, tuple(rows), seconds)


def _row(trial: PromiseTrial, outcome: Mapping[str, Any]) -> Row:
    result = Result(outcome["result"])
    if result is Result.FAILED:
        outcome = {"expected": trial.promise.sentence, **outcome}
    texts = {key: _shareable(outcome.get(key, "")) for key in ("why", "expected", "found")}
    seconds = outcome.get("seconds", 0.0)
    return Row(trial.promise.name, trial.device, trial.knob, result, **texts, seconds=seconds)


def _shareable(text: str) -> str:
    # Errors and logs of libraries can contain secrets and control characters.
    return printable(without_secrets(text, known_secrets())) if text else ""


@contextmanager
def _child(
    requested: Sequence[PromiseTrial], folder: Path
) -> Iterator[Callable[[float], tuple[dict[str, Any] | None, str]]]:
    """Start a process for the trials; yield a function that waits for the next answer.

    The argument of the function is a timeout in seconds. The function returns the answer and "",
    or None and the reason why no answer came.
    """
    temporary = Path(tempfile.mkdtemp(dir=folder))
    log = temporary / "log"
    words = json.dumps([(trial.promise.name, trial.knob or trial.device) for trial in requested])
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own Python
            [sys.executable, "-c", f"from {__name__} import try_each; try_each()", words],
            env=environment_below(temporary),
            cwd=temporary,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            start_new_session=True,
            bufsize=0,  # later lines stay in the pipe, where `select` sees them
        )
    answers: Any = process.stdout

    def answer(limit: float) -> tuple[dict[str, Any] | None, str]:
        ready, _, _ = select.select([answers], [], [], limit)
        if not ready:
            return None, f"no answer within {limit:g} s"
        line = answers.readline()
        if line.endswith(b"\n"):
            outcome: dict[str, Any] = json.loads(line)
            return outcome, ""
        last_line = log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        ended = f"the process ended with {status_in_words(process.wait())}"
        return None, f"{ended}: {last_line}" if last_line else ended

    try:
        yield answer
    finally:
        answers.close()
        end_group(process)


def environment_below(folder: Path) -> dict[str, str]:
    """Return environment variables for a child, so that libraries write their files to `folder`.

    Variables of knobs and of torchrepro are removed, so no profile is active in the child.
    """
    removed = {knob.variable for knob in CATALOGUE if knob.variable}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in removed and not name.startswith("TORCHREPRO_")
    }
    if kept.get("PYTHONPATH"):  # the child starts in another folder
        paths = kept["PYTHONPATH"].split(os.pathsep)
        kept["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    caches = {name: folder / name.lower() for name in CACHES}
    for cache in caches.values():
        cache.mkdir()  # CANN ignores a folder that does not exist
    return {**kept, **{name: str(cache) for name, cache in caches.items()}, "TMPDIR": str(folder)}


def machine_facts() -> dict[str, Any]:
    """Return versions, hardware and devices as plain JSON values; imports torch.

    The result has no name of the machine or of a person. Its entry ``absent`` maps every missing
    device to the reason.
    """
    torch = import_module("torch")
    absent = {HARDWARE[name]: why for name, why in absent_hardware().items()}
    names = {}
    for device in DEVICES[1:]:
        module = getattr(torch, device, None)
        if device in absent:
            continue
        if module is None or not module.is_available():
            absent[device] = "the driver is installed, but torch finds no device"
            continue
        name = getattr(module, "get_device_name", lambda index: device)  # noqa: B023
        names[device] = [name(index) for index in range(module.device_count())]
    return {
        "versions": {name: version for name, version in software().items() if version is not None},
        "hardware": {name: fact for name, fact in hardware().items() if fact is not None},
        "devices": [CPU, *names],
        "names": names,
        "absent": absent,
    }


def try_each() -> None:
    """Run the trials in the command line; this is the main function of a child process."""
    requested = json.loads(sys.argv[1])
    # Output of attempts and libraries goes to the log, so that the parent reads only answers.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        attempts = {promise.name: promise.attempt for promise in PROMISES}
        if not requested:
            print(json.dumps(machine_facts()), file=answers)
        for name, subject in requested:
            began = time.monotonic()
            outcome: dict[str, Any] = {"result": Result.HELD}
            try:
                attempts[name](subject)
            except CannotTestError as absent:
                outcome = {"result": Result.NOT_HERE, "why": str(absent)}
            except NotHeldError as fault:
                expected, actual = fault.args
                outcome = {"result": Result.FAILED, "expected": expected, "found": actual}
            except Exception as error:  # noqa: BLE001 - any error is a failed promise
                words = str(error).strip().partition("\n")[0]
                outcome = {"result": Result.FAILED, "found": f"{type(error).__name__}: {words}"}
            outcome["seconds"] = time.monotonic() - began
            print(json.dumps(outcome), file=answers, flush=True)
