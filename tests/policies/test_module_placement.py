"""`device.modules`: submodules are found by name, run on another device, and restored exactly."""

import copy
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchrepro
from torchrepro.knobs.catalogue import DEVICES_OF_MODULES
from torchrepro.policies import placement, policy
from torchrepro.policies.placement import PlacedForward, bare, match

POLICY = "device.modules"
X = torch.randn(4, 8)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.dense(x)).relu()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


@pytest.fixture(autouse=True)
def _own_counts() -> Iterator[None]:
    policy.reset_counts()
    yield
    policy.reset_counts()


def _apply(**patterns: str) -> torchrepro.Applied:
    return torchrepro.apply({"device": {"modules": patterns}})


def _calls() -> dict[str, int]:
    return {effect.subject: effect.calls for effect in policy.effects() if effect.policy == POLICY}


def _step(model: nn.Module) -> None:
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


NAMES = {
    "encoder.layer.1": ["encoder.layer.1"],
    "encoder.layer.[02]": ["encoder.layer.0", "encoder.layer.2"],
    "encoder.layer": ["encoder.layer.0", "encoder.layer.1", "encoder.layer.2"],
    "head": ["head"],
    "*.1.norm": ["encoder.layer.1.norm"],
    "module.head": ["head"],
}


@pytest.mark.parametrize("pattern", NAMES)
def test_a_pattern_selects_modules_by_name(pattern: str) -> None:
    """Names, globs and lists of modules select the submodules that run under those names."""
    model = Model()
    with _apply(**{pattern: "cpu"}) as applied:
        model(X)

    assert applied.report[POLICY].outcome == "applied"
    assert _calls() == dict.fromkeys(NAMES[pattern], 1)
    assert {effect.moved for effect in policy.effects()} == {0}  # they were on the CPU before


class Wrapper(nn.Module):
    """Wraps a model under the name that DDP, DataParallel and averaged models use."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_patterns_ignore_wrappers() -> None:
    """A pattern uses the names of the bare model, whatever wraps the model."""
    model = Model()
    model.encoder.layer[1] = Wrapper(model.encoder.layer[1])
    with _apply(**{"encoder.layer.1": "cpu", "*": "cpu"}):
        Wrapper(Wrapper(model))(X)

    assert _calls()["encoder.layer.1"] == 1
    assert "module" not in _calls()
    assert bare("module._orig_mod.a._checkpoint_wrapped_module.b") == "a.b"


def test_an_unmatched_pattern_stops_the_first_step() -> None:
    """The first optimizer step raises an error with the pattern, the models and a near name."""
    model = Model()
    with _apply(**{"encoder.layers.1": "cpu"}):
        nn.MSELoss()(model(X), torch.zeros(4, 2))
        with pytest.raises(torchrepro.ApplyError) as refused:
            _step(model)

    message = str(refused.value)
    assert "device.modules = encoder.layers.1: matches no module" in message
    assert "called so far: Model, MSELoss" in message
    assert "did you mean: encoder.layer.1" in message
    assert refused.value.exit_status == 3


def test_parts_of_several_models_are_found_before_the_first_step() -> None:
    """Patterns can match parts of several models; a step after calls of all models succeeds."""
    generator, judge = Model(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with _apply(**{"encoder": "cpu", "1": "cpu"}):
        judge(generator(X)).sum().backward()
        torch.optim.SGD(judge.parameters()).step()

    assert _calls() == {"encoder": 1, "1": 1}


def _attention() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8))


@pytest.mark.parametrize(
    ("pattern", "make", "says"),
    [
        ("encoder", Model, ""),
        ("nothing", Model, "torchrepro: device.modules = nothing"),
        ("nothing", lambda: abs, ""),  # a launcher calls no module
        ("*out_proj", _attention, "never called, so it never ran on its device: 0.self_attn.out"),
        ("0.*", _attention, ""),  # what lies in a part that ran elsewhere has gone there with it
    ],
)
def test_unmatched_patterns_and_uncalled_parts_are_reported_at_the_end(
    pattern: str, make: Callable[[], Any], says: str, capsys: Any
) -> None:
    """Without an optimizer step, the undo of the profile reports unmatched patterns.

    It also reports a part whose weights another module uses without calling it.
    """
    with _apply(**{pattern: "cpu"}):
        make()(X)
    message = capsys.readouterr().err

    assert says in message
    assert bool(says) == bool(message)


def test_parts_can_be_placed_before_the_first_call() -> None:
    """`place_modules` returns the names of the parts of a model that is never called as a whole."""
    model = Model()
    assert torchrepro.place_modules(model) == ()
    with _apply(**{"encoder.layer.?": "cpu"}):
        names = torchrepro.place_modules(model)
        model.head(model.encoder(X))

    assert names == tuple(f"encoder.layer.{number}" for number in range(3))
    assert _calls() == dict.fromkeys(names, 1)


def test_place_modules_refuses_an_unmatched_pattern() -> None:
    """`place_modules` raises for a pattern without a match in the models that it gets."""
    with _apply(encoder="cpu", haed="cpu"), pytest.raises(torchrepro.ApplyError) as refused:
        torchrepro.place_modules(Model(), nn.ReLU())

    assert "did you mean: head" in str(refused.value)
    assert "= encoder" not in str(refused.value)


def test_a_module_that_was_added_later_is_found() -> None:
    """A part added to a model after its first call runs under its full name."""
    model = Model()
    with _apply(**{"encoder.layer.?": "cpu"}):
        model(X)
        model.encoder.layer.append(Layer())
        model(X)

    assert _calls()["encoder.layer.3"] == 1


def test_a_name_overrides_a_pattern_and_patterns_must_agree() -> None:
    """The exact name decides; two patterns with different devices for one part are refused."""
    both = {"encoder.layer.1": "cpu", "encoder.*": "meta"}
    assert set(match(Model(), both)[0].values()) >= {("encoder.layer.1", "cpu")}
    with pytest.raises(torchrepro.ApplyError, match="several devices"):
        match(Model(), {"encoder.*": "cpu", "*.1": "meta"})


def test_one_module_under_two_names_is_placed_once() -> None:
    """A shared module is placed if a pattern matches any of its names."""
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with _apply(**{"2": "cpu"}):
        model(X)

    assert _calls() == {"2": 2}


def test_a_name_with_dots_or_a_number_is_one_key(tmp_path: Path) -> None:
    """An override can remove a pattern of a file and add another one."""
    profile = tmp_path / "team.yaml"
    profile.write_text("device: {modules: {encoder.layer.3: cpu, '0': null, '1': cpu}}\n")
    modules = torchrepro.load(profile, ["device.modules={dec*: cpu, 1: null}"]).device.modules

    assert dict(modules) == {"encoder.layer.3": "cpu", "dec*": "cpu"}


def test_an_override_with_a_mapping_names_the_wrong_key() -> None:
    """An error about an override with a whole mapping shows the wrong key in it."""
    with pytest.raises(torchrepro.ProfileError, match=r"\}: device\.modules\.b: not the name of a"):
        torchrepro.load("seed-only", ["device.modules={a: cpu, b: CPU}"])


def test_the_innermost_profile_handles_a_refusal() -> None:
    """Errors of policies go to the innermost profile."""
    refused: list[torchrepro.TorchreproError] = []
    with torchrepro.apply({"seed": 1}), _apply(nothing="cpu") as applied:
        applied.refuse = refused.append
        _step(Model())

    assert [str(error).partition(":")[0] for error in refused] == ["device.modules = nothing"]


WRONG: dict[str, tuple[Any, str]] = {
    "no mapping": (["encoder"], "not a mapping"),
    "no text": ({"encoder": 3}, "not"),
    "no device": ({"encoder": "the cpu"}, "not the name of a device"),
    "a section": ({"encoder": {"layer": "cpu"}}, "whole name of a module as one key"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_does_not_map_to_devices_is_refused(name: str) -> None:
    """A value without a device is refused when the profile is read, with the legal values."""
    value, why = WRONG[name]
    assert why in DEVICES_OF_MODULES.complaint(value)


@pytest.mark.parametrize("device", ["cuda:99", "cpuu", "meta"])
def test_a_missing_device_is_unsupported(device: str) -> None:
    """The report names the missing device and the devices of the machine."""
    with _apply(encoder=device) as applied:
        row = applied.report[POLICY]

    assert row.outcome == "unsupported"
    assert f"this machine has no device `{device}`" in row.why
    assert "it has cpu" in row.why
    assert ("did you mean cpu?" in row.why) == (device == "cpuu")


def test_torchscript_cannot_be_placed() -> None:
    """A submodule in TorchScript raises an error."""
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)))
    with _apply(**{"0": "cpu"}), pytest.raises(torchrepro.ApplyError, match="TorchScript"):
        model(X)


def _dicts(model: nn.Module) -> list[list[str]]:
    return [[*vars(module)] for module in model.modules()]


def _small() -> nn.Sequential:
    encoder = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(OrderedDict(encoder=encoder, head=nn.Linear(8, 2)))


def test_undo_is_exact() -> None:
    """After the scope, and after a failure inside it, modules are as before."""
    model = _small()
    before = _dicts(model)
    with _apply(**{"encoder*": "cpu"}):
        model(X)
        assert "forward" in vars(model.encoder)
    assert _dicts(model) == before

    with pytest.raises(ZeroDivisionError), _apply(head="cpu"):
        model(X).tolist()[1 // 0]
    assert _dicts(model) == before


def test_scopes_nest() -> None:
    """An inner profile replaces the patterns, and leaving it restores the outer ones."""
    model = _small()
    with _apply(encoder="cpu"):
        model(X)
        with _apply(head="cpu"):
            model(X)
            assert "forward" not in vars(model.encoder)
            assert "forward" in vars(model.head)
        model(X)
        assert "forward" not in vars(model.head)
    assert _calls() == {"encoder": 2, "head": 1}


def test_a_forward_set_on_the_module_is_kept() -> None:
    """A module whose forward other code replaced keeps that forward, during and after."""
    model = _small()

    def own(x: torch.Tensor) -> torch.Tensor:
        return x * 0

    model.encoder.forward = own
    with _apply(encoder="cpu"):
        assert torch.equal(model.encoder(X), model.encoder.forward(X))
        model(X)
    assert model.encoder.forward is own


def test_a_wrapper_around_a_placed_forward_outlives_the_undo() -> None:
    """A wrapper of other code stays after the undo, and the wrapped forward runs in place."""
    model = _small()
    with _apply(encoder="cpu"):
        model(X)
        placed = model.encoder.forward
        model.encoder.forward = lambda x: placed(x) + 0
    model(X)

    assert _calls() == {"encoder": 1}


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deep copy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_independent(way: str) -> None:
    """A copy made under the profile always uses its own weights, and needs no torchrepro."""
    model = _small().eval()
    with _apply(**{"encoder.?": "cpu"}):
        model(X)
        copied = COPIES[way](model)
        assert b"torchrepro" not in pickle.dumps(model)
        for weight in copied.parameters():
            nn.init.zeros_(weight)
        assert copied(X).count_nonzero() == 0
        assert model(X).count_nonzero() > 0
    assert copied(X).count_nonzero() == 0
    assert _dicts(copied) == _dicts(_small())


class Scaling(nn.Tanh):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own


def test_a_shallow_copy_is_placed_separately() -> None:
    """A shallow copy, as DataParallel makes of every part, is placed for itself."""
    model = nn.Sequential(nn.Tanh())
    with _apply(**{"0": "cpu"}):
        model(X)
        replica, part = copy.copy(model), copy.copy(model[0])
        part.own, part.__class__ = 0.0, Scaling
        vars(replica)["_modules"] = {"0": part}
        assert replica(X).count_nonzero() == 0


def test_a_placed_model_can_be_freed() -> None:
    """A placed model is freed at once, without the garbage collector."""
    model = _small()
    with _apply(**{"encoder.*": "cpu"}):
        model(X)
        gone = weakref.ref(model.encoder)
        del model
        assert gone() is None


class Meeting(nn.Module):
    """Waits a little for another thread, and shows whether its weight stayed the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.entered = nn.Parameter(torch.ones(2)), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.weight
        self.entered.wait(0.2)
        self.entered.set()
        return x * self.weight if self.weight is before else x * float("nan")


def test_threads_do_not_see_the_copies_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in one placed part use separate copies, and both gradients arrive."""
    monkeypatch.setattr(placement, "is_there", lambda *_: False)  # so that all is copied
    part = Meeting()
    forward = PlacedForward("part", part, torch.device("cpu"))
    forward.install()
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(part, [torch.ones(2), torch.ones(2)]))
    forward.uninstall()
    sum(results).sum().backward()

    assert torch.equal(part.weight.grad, torch.full((2,), 2.0))


# Under torch.compile a placed part runs uncompiled, or a message says that it was not found.

HEAD = """
import torch, torchrepro
from torch import nn
from torchrepro.policies import policy
PROFILE = {"device": {"modules": {"1": "cpu"}}}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))
x = torch.randn(4, 8)
expected = model(x)

def check(compiled):
    before = policy.counts_so_far()
    for _ in range(2):
        assert torch.allclose(compiled(x), expected)
    return sum(effect.calls for effect in policy.effects(before))
"""

UNSEEN = """
model.compile(backend="eager")
with torchrepro.apply(PROFILE):
    assert check(model) == 0
    STEP
"""
HIDDEN = "called so far: only compiled code", "torchrepro.place_modules(model)"
STEP = "torch.optim.SGD(model.parameters()).step()"

PROGRAMS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "compiled before": (
        """
compiled = torch.compile(model, backend="eager")
assert check(compiled) == 0
with torchrepro.apply(PROFILE):
    assert check(compiled) == 2
assert check(compiled) == 0
""",
        0,
        (),
    ),
    "a compiled function, placed by hand": (
        """
compiled = torch.compile(lambda x: model(x), backend="eager")
with torchrepro.apply(PROFILE):
    assert torchrepro.place_modules(model) == ("1",)
    assert check(compiled) == 2
assert check(compiled) == 0
""",
        0,
        (),
    ),
    "hidden until the end": (UNSEEN.replace("STEP", "pass"), 0, HIDDEN),
    "hidden until a step": (UNSEEN.replace("STEP", STEP), 1, HIDDEN),
}
"""A program, the status that it ends with, and what it says."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_placed_part_of_compiled_code_runs_uncompiled_or_is_reported(
    fork_python: Callable[..., Any], name: str
) -> None:
    """Compiled code calls the placed part exactly while the profile is active.

    If all calls are in compiled code, an error at the first optimizer step, or a line at the end,
    reports that no part was found.
    """
    program, status, words = PROGRAMS[name]
    # In a process of its own: what torch.compile remembers stays there.
    done = fork_python("-c", HEAD + program, env={"OMP_NUM_THREADS": "1"})

    assert done.returncode == status, done.stderr
    assert [word for word in words if word not in done.stderr] == []
