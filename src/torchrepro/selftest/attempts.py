"""Tries a promise in this process: returns if it is held, raises if it is not.

Runs in a process of the self-test (see `child`), which starts without torch: variables are tried
before torch is imported, as a program would set them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.applier import apply
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.knob import MissingState
from torchrepro.launch import prepared
from torchrepro.messages import shown, some
from torchrepro.profile.load import resolve
from torchrepro.report import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torchrepro.knobs.knob import Knob
    from torchrepro.report import Row
    from torchrepro.selftest.trials import Trial

    Tensors = Mapping[str, Callable[[str], Any]]

P = 0.5
"""The share of elements that dropout drops."""

CLOSE = 1e-3
"""How far apart two results may be in which no element was dropped."""

_DETERMINISTIC = {"torch": {"deterministic_algorithms": "error"}}
_OP = "torchrepro_selftest::scaled"
_FAULTY_STEP = 1


class NotHeldError(Exception):
    """A promise is not held: what was expected, and what was found."""

    def __init__(self, expected: str, found: str) -> None:
        self.expected, self.found = expected, found
        super().__init__(f"expected {expected}, found {found}")


class NotHereError(Exception):
    """There is nothing here to try the promise on; the text says why."""


def knob_holds(trial: Trial, folder: Path) -> None:
    """Write legal values of a knob until one is new to it; each is read back and undone.

    Raises `NotHereError` if none could be written that was not there before.
    """
    knob = knobs_by_name()[trial.knob]
    if knob.door == "interpreter":
        _reaches_a_new_process(knob)
        return
    if knob.library:
        import_module(knob.library)
    rows = []
    for value in knob.legal.examples():
        row = _written_and_undone(knob, value)
        if row.outcome is Outcome.APPLIED:
            return
        if row.outcome not in (Outcome.UNCHANGED, Outcome.UNSUPPORTED):
            expected = f"{shown(value)} is written and reads back"
            raise NotHeldError(expected, f"{row.outcome}: {row.why}")
        rows.append(row)
    refused = [row.why for row in rows if row.outcome is Outcome.UNSUPPORTED]
    raise NotHereError(refused[0] if refused else f"it has {_values(rows)} here, nothing is new")


def _written_and_undone(knob: Knob, value: Any) -> Row:
    before = _state(knob)
    with apply(_asking_for(knob, value)) as applied:
        row = applied.report[knob.name]
        if row.outcome is Outcome.APPLIED and not knob.holds(value):
            raise NotHeldError(f"{shown(value)} reads back", f"reads {shown(knob.access.read())}")
    after = _state(knob)
    _same_variables(knob, before.pop(_VARIABLES), after.pop(_VARIABLES))
    for name in before:
        if before[name] != after[name]:
            expected = f"{name} back at {shown(before[name])} after the undo"
            raise NotHeldError(expected, shown(after[name]))
    return row


def _values(rows: Sequence[Row]) -> str:
    return " and ".join(dict.fromkeys(shown(row.after) for row in rows))


def _same_variables(knob: Knob, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise if a variable is not what it was; other values than the knob's own may be secret."""
    names = sorted({*before, *after})
    changed = [name for name in names if before.get(name) != after.get(name)]
    own = knob.variable
    if own in changed:
        expected = f"{own} back at {shown(before.get(own))} after the undo"
        raise NotHeldError(expected, shown(after.get(own)))
    if changed:
        raise NotHeldError("every variable as it was, after the undo", f"changed: {some(changed)}")


def _asking_for(knob: Knob, value: Any) -> dict[str, Any]:
    """Return a profile that sets one knob, and what its value needs to act on."""
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


_VARIABLES = "the environment"


def _state(knob: Knob) -> dict[str, Any]:
    """Return what the undo has to put back, by what it is called."""
    state: dict[str, Any] = {_VARIABLES: dict(os.environ)}
    if knob.variable:  # torch is not to be imported yet
        return state
    from torchrepro.seeding.state import rng_state

    try:
        state[knob.name] = knob.access.read()
    except MissingState as missing:
        state[knob.name] = str(missing)
    return {**state, "the generators": rng_state()}


_LOOK = """
import json, os, sys
from torchrepro.knobs.catalogue import knobs_by_name
knob = knobs_by_name()[sys.argv[1]]
text = os.environ.get(knob.variable)
print(json.dumps([text, knob.effect.look(text) if knob.effect and text else [None, ""]]))
"""


def _reaches_a_new_process(knob: Knob) -> None:
    """Start a Python under each value of a variable, which it reads as it starts."""
    before = dict(os.environ)
    for value in knob.legal.examples():
        command = [sys.executable, "-c", _LOOK, knob.name]
        program, environment = prepared(resolve(_asking_for(knob, value)), command)
        done = subprocess.run(  # noqa: S603 - our own Python
            [program, *command[1:]], env=environment, capture_output=True, text=True, check=False
        )
        expected = f"{knob.variable}={value} in a process that starts under it"
        if done.returncode:
            raise NotHeldError(expected, done.stderr.strip().rpartition("\n")[2])
        text, (in_effect, words) = json.loads(done.stdout)
        if text != value or in_effect is False:
            raise NotHeldError(expected, words or f"{knob.variable}={text}")
    _same_variables(knob, before, os.environ)


def dropout_is_zeroed(trial: Trial, folder: Path) -> None:
    """Call what drops elements before, under and after the policy."""
    before = _dropping(trial.device)
    with apply({"dropout": "zero"}):
        under = _dropping(trial.device)
    after = _dropping(trial.device)
    if under:
        raise NotHeldError("no element is dropped under the policy", f"dropped in {_some(under)}")
    if before != list(_LAYERS):
        raise NotHeldError(
            "elements are dropped without the policy", f"dropped only in {_some(before)}"
        )
    if after != before:
        raise NotHeldError("elements are dropped again after it", f"dropped in {_some(after)}")


def _dropping(device: str) -> list[str]:
    """Return the names of the layers that drop elements."""
    return [
        name for name, layer in _LAYERS.items() if not _close(layer(P, device), layer(0.0, device))
    ]


def _close(left: Any, right: Any) -> bool:
    return bool((left - right).abs().max().item() < CLOSE)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def _torch() -> Any:
    return import_module("torch")


def _ones(device: str) -> Any:
    return _torch().ones(16, 16, device=device)


def _attention(p: float, device: str) -> Any:
    torch = _torch()
    query = torch.linspace(-1, 1, 2 * 16 * 8).reshape(1, 2, 16, 8).to(device)
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=p)


def _recurrent(p: float, device: str) -> Any:
    torch = _torch()
    torch.manual_seed(0)
    layer = torch.nn.LSTM(8, 8, num_layers=2, dropout=p).to(device)
    return layer(torch.linspace(-1, 1, 64).reshape(4, 2, 8).to(device))[0].detach()


_LAYERS: Mapping[str, Callable[[float, str], Any]] = {
    "nn.Dropout": lambda p, device: _torch().nn.Dropout(p)(_ones(device)),
    "functional.dropout": lambda p, device: _torch().nn.functional.dropout(_ones(device), p),
    "attention": _attention,
    "LSTM": _recurrent,
}
"""What drops a share `p` of elements on a device: its result."""


def host_draws(trial: Trial, folder: Path) -> None:
    """Draw from one seed on the CPU, and on the device before, under and after the policy."""
    expected, before = _drawn("cpu"), _drawn(trial.device)
    with apply({"device": {"rng": "host"}}):
        under = _drawn(trial.device)
    other = [name for name in expected if under[name] != expected[name]]
    if other:
        raise NotHeldError("the numbers of the CPU", f"other numbers from {_some(other)}")
    if _drawn(trial.device) != before:
        raise NotHeldError("the device's own numbers after the undo", "other numbers")


_DRAWS: Tensors = {
    "rand": lambda device: _torch().rand(8, device=device),
    "randn": lambda device: _torch().randn(8, device=device),
    "randint": lambda device: _torch().randint(1000, (8,), device=device),
    "randperm": lambda device: _torch().randperm(8, device=device),
    "normal_": lambda device: _torch().empty(8, device=device).normal_(),
    "dropout": lambda device: _torch().nn.functional.dropout(_ones(device), P),
}


def _drawn(device: str) -> dict[str, Any]:
    torch = _torch()
    found = {}
    for name, draw in _DRAWS.items():
        torch.manual_seed(7)
        found[name] = draw(device).cpu().tolist()
    return found


def fallback_goes_on(trial: Trial, folder: Path) -> None:
    """Call an op that torch refuses on this device, with and without the policy."""
    with apply({"backends": _DETERMINISTIC}):
        refused = [name for name in _REFUSED if _refusal(name, trial.device)]
    if not refused:
        raise NotHereError(f"torch refuses none of {_some(list(_REFUSED))} on this device")
    name = refused[0]
    with apply({"backends": _DETERMINISTIC, "device": {"fallback": "cpu"}}) as applied:
        why = _refusal(name, trial.device)
        if why:
            raise NotHeldError(f"{name} goes on", why)
        results = [_REFUSED[name](trial.device).cpu().tolist() for _ in range(2)]
        counted = [effect for effect in applied.report.effects if effect.subject == name]
    if results[0] != results[1]:
        raise NotHeldError(f"{name} gives the same twice", shown(results))
    if not counted:
        raise NotHeldError(f"the report counts the calls of {name}", "no calls")
    with apply({"backends": _DETERMINISTIC}):
        if not _refusal(name, trial.device):
            raise NotHeldError(f"torch refuses {name} again after the undo", "it runs")


def _put(device: str) -> Any:
    torch = _torch()
    places, values = torch.tensor([0, 0, 3]), torch.tensor([1.0, 2.0, 5.0])
    return torch.zeros(4, device=device).put_(places.to(device), values.to(device))


def _unpooled(device: str) -> Any:
    torch = _torch()
    pooled = torch.arange(4.0).reshape(1, 1, 2, 2).to(device)
    places = torch.tensor([0, 2, 8, 10]).reshape(1, 1, 2, 2).to(device)
    return torch.nn.functional.max_unpool2d(pooled, places, 2)


_REFUSED: Tensors = {"aten::put_": _put, "aten::max_unpool2d": _unpooled}
"""Ops that torch refuses to run as deterministic ones, on most devices."""


def _refusal(name: str, device: str) -> str:
    """Return how torch refuses an op, or an empty string."""
    try:
        _REFUSED[name](device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def one_bit_is_told(trial: Trial, folder: Path) -> None:
    """Record a program twice, and once with one value changed by one ulp in one op."""
    from torchrepro.verdict.comparison import compare

    first, second, faulty = (folder / name for name in ("first", "second", "faulty"))
    _record(trial.device, first, fault=False)
    _record(trial.device, second, fault=False)
    _record(trial.device, faulty, fault=True)
    same = compare(first, second)
    if not same.same:
        raise NotHeldError("two recordings of the same are the same", _place(same))
    found = compare(first, faulty)
    expected = f"they diverge at step {_FAULTY_STEP} in {_OP}"
    if found.same or found.first is None:
        raise NotHeldError(expected, "the same")
    if (found.first.step, found.first.op.rpartition(".")[0] or found.first.op) != (
        _FAULTY_STEP,
        _OP,
    ):
        raise NotHeldError(expected, _place(found))


def _place(verdict: Any) -> str:
    first = verdict.first
    if first is None:
        return "they differ"
    return f"they diverge at step {first.step} in {first.op or first.kind}"


def _record(device: str, folder: Path, *, fault: bool) -> None:
    from torchrepro.trace.recorder import end_step, record

    torch, scaled = _torch(), _scaled()
    with record(folder):
        value = torch.linspace(-1, 1, 64).to(device)
        for step in range(3):
            faults.append(fault and step == _FAULTY_STEP)
            value = (scaled(value).tanh() + value).sin()
            end_step()


faults: list[bool] = []
"""Whether the op that can be faulty was, at each call; the last entry is for the next call."""


@cache
def _scaled() -> Any:
    """Return an op of our own that doubles a tensor, and is off by one ulp where it is faulty."""
    torch = _torch()

    def scaled(value: Any) -> Any:
        doubled = value.cpu() * 2
        if faults[-1]:
            doubled[5] = torch.nextafter(doubled[5], torch.tensor(float("inf")))
        return doubled.to(value.device)

    library = torch.library.Library(_OP.partition("::")[0], "DEF")
    library.define("scaled(Tensor value) -> Tensor")
    library.impl("scaled", scaled, "CompositeExplicitAutograd")
    _kept.append(library)
    return torch.ops.torchrepro_selftest.scaled


_kept: list[Any] = []  # an op is there as long as its library is


def two_runs_are_the_same(trial: Trial, folder: Path) -> None:
    """Verify a small training on the device under the strictest profile."""
    from torchrepro.verification.verifier import verify

    command = [sys.executable, "-m", "torchrepro.selftest.training", trial.device]
    found = verify("debug-strict", command, closer=False, folder=folder / "runs")
    if not found.same:
        raise NotHeldError("the same bits in both runs", _place(found.verdict))
