"""Tries each promise in this process: an attempt returns if it is held, and raises if it is not.

Runs in a child of the self-test, which starts without torch: variables are tried before torch is
imported, as a program would set them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrepro.applier import apply
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import Knob, MissingState
from torchrepro.launch import prepared
from torchrepro.messages import shown, some
from torchrepro.outcomes import Outcome
from torchrepro.profile.load import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


CPU = "cpu"
ACCELERATORS = ("cuda", "npu", "mps", "xpu")
DEVICES = (CPU, *ACCELERATORS)

_P = 0.5  # the share of elements that dropout drops
_CLOSE = 1e-3  # results that differ by less have lost no element
_DETERMINISTIC = {"torch": {"deterministic_algorithms": "error"}}
_NAMESPACE = "torchrepro_selftest"
_STEPS, _BATCH = 4, 16
_FAULTY_STEP = 1


class NotHeldError(Exception):
    """A promise is not held: what was expected, and what was found."""

    def __init__(self, expected: str, found: str) -> None:
        self.expected, self.found = expected, found
        super().__init__(f"expected {expected}, found {found}")


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
    """Raise if a variable is not what it was; other values than the knob's own may be secret."""
    own, after = knob.variable, os.environ
    back = f"{own} back at {shown(before.get(own))} after the undo"
    _expect(before.get(own) == after.get(own), back, shown(after.get(own)))
    names = sorted({*before, *after})
    changed = [name for name in names if before.get(name) != after.get(name)]
    _expect(not changed, "every variable as it was, after the undo", f"changed: {some(changed)}")


def _asking_for(knob: Knob, value: Any) -> dict[str, Any]:
    wanted = {knob.profile_key: value}
    if knob.needs and value in knob.needing:
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
    first = found.first
    where = first and (first.step, first.op.removesuffix(".default"))
    fault = _FAULTY_STEP, f"{_NAMESPACE}::{name}"
    expected = "they diverge at step {} in {}".format(*fault)
    _expect(where == fault, expected, "the same" if found.same else _place(found))


def _place(verdict: Any) -> str:
    first = verdict.first
    if first is None:
        return "they differ"
    return f"they diverge at step {first.step} in {first.op or first.kind}"


def two_runs_are_the_same(device: str) -> None:
    """Verify a small training on the device under the strictest profile."""
    from torchrepro.verification.verifier import verify

    program = f"from {__name__} import train; train({device!r})"
    folder = Path(tempfile.mkdtemp()) / "runs"
    command = [sys.executable, "-c", program]
    found = verify("debug-strict", command, closer=False, folder=folder)
    _expect(found.same, "the same bits in both runs", _place(found.verdict))


def train(device: str) -> None:
    """Train a convolution, dropout and a linear layer on random images."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    count = _STEPS * _BATCH
    images = TensorDataset(torch.randn(count, 1, 8, 8), torch.randint(4, (count,)))
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(4 * 6 * 6, 4)),
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for image, label in DataLoader(images, batch_size=_BATCH, shuffle=True):
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
    devices: tuple[str, ...] = DEVICES
    """Empty if it is tried for every knob instead, on the device that the knob belongs to."""

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
