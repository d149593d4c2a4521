"""What `device.modules` does to modules: taken back exactly, and of no harm to their copies."""

import copy
import pickle
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer as optimizers

import torchrepro
from torchrepro.policies import policy
from torchrepro.policies.offload import Device, PlacedForward

POLICY = "device.modules"
X = torch.randn(4, 8)


def _model() -> nn.Sequential:
    encoder = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(OrderedDict(encoder=encoder, head=nn.Linear(8, 2)))


@pytest.fixture(autouse=True)
def _own_counts() -> Iterator[None]:
    policy.reset_counts()
    yield
    policy.reset_counts()


def _apply(**patterns: str) -> torchrepro.Applied:
    return torchrepro.apply({"device": {"modules": patterns}})


def _calls() -> dict[str, int]:
    """Return how often each placed part was called so far."""
    return {effect.subject: effect.calls for effect in policy.effects() if effect.policy == POLICY}


def _dicts(model: nn.Module) -> list[list[str]]:
    return [[*vars(module)] for module in model.modules()]


def _hooks() -> tuple[int, int]:
    found = hooks._global_forward_pre_hooks, optimizers._global_optimizer_pre_hooks
    return len(found[0]), len(found[1])


def _fail_after(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_undo_is_exact() -> None:
    """After the scope, and after a failure inside it, modules and torch's hooks are as before."""
    model = _model()
    before = _dicts(model), _hooks()
    with _apply(**{"encoder*": "cpu"}):
        model(X)
        assert "forward" in vars(model.encoder)
    assert (_dicts(model), _hooks()) == before

    with pytest.raises(ZeroDivisionError), _apply(head="cpu"):
        _fail_after(model(X))
    assert (_dicts(model), _hooks()) == before


def test_scopes_nest() -> None:
    """An inner profile replaces the patterns, and leaving it brings back those around it."""
    model = _model()
    with _apply(encoder="cpu"):
        model(X)
        with _apply(head="cpu"):
            model(X)
            assert "forward" not in vars(model.encoder)
            assert "forward" in vars(model.head)
        model(X)
        assert "forward" not in vars(model.head)
    assert _calls() == {"encoder": 2, "head": 1}


def test_a_forward_of_the_modules_own_comes_back() -> None:
    """A module whose forward was replaced by somebody keeps that one, during and after."""
    model = _model()

    def own(x: torch.Tensor) -> torch.Tensor:
        return x * 0

    model.encoder.forward = own
    with _apply(encoder="cpu"):
        assert torch.equal(model.encoder(X), model.encoder.forward(X))
        model(X)
    assert model.encoder.forward is own


def test_a_wrapper_put_around_a_placed_forward_outlives_it() -> None:
    """Somebody's wrapper stays after the undo, and what it wraps runs in place."""
    model = _model()
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
def test_a_copy_is_a_model_of_its_own(way: str) -> None:
    """A copy made in force uses its own weights, in force and after, and leaves torch's classes."""
    model = _model().eval()
    with _apply(**{"encoder.?": "cpu"}):
        model(X)
        copied = COPIES[way](model)
        for weight in copied.parameters():
            nn.init.zeros_(weight)
        assert copied(X).count_nonzero() == 0
        assert model(X).count_nonzero() > 0
    assert copied(X).count_nonzero() == 0
    assert _dicts(copied) == _dicts(_model())


def test_a_pickle_needs_no_torchrepro() -> None:
    """What was pickled in force names nothing of torchrepro's."""
    model = nn.Sequential(nn.Linear(8, 8))
    with _apply(**{"0": "cpu"}):
        model(X)
        assert b"torchrepro" not in pickle.dumps(model)


class Scaling(nn.Tanh):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.own


def test_a_shallow_copy_runs_as_itself() -> None:
    """A shallow copy, as DataParallel makes of every part, is placed for itself."""
    model = nn.Sequential(nn.Tanh())
    with _apply(**{"0": "cpu"}):
        model(X)
        replica, part = copy.copy(model), copy.copy(model[0])
        part.own, part.__class__ = 0.0, Scaling
        vars(replica)["_modules"] = {"0": part}
        assert replica(X).count_nonzero() == 0


def test_a_placed_model_can_be_freed() -> None:
    """Being placed does not keep a model alive, nor make it wait for the garbage collector."""
    model = _model()
    with _apply(**{"encoder.*": "cpu"}):
        model(X)
        gone = weakref.ref(model.encoder)
        del model
        assert gone() is None


class Copying(Device):
    """The CPU as if it were elsewhere: every tensor is copied there and back."""

    def has(self, tensor: torch.Tensor) -> bool:
        return False

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, copy=True)


class Meeting(nn.Module):
    """Waits a little for another thread, and tells whether its weight stayed the same."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.entered = nn.Parameter(torch.ones(2)), threading.Event()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.weight
        self.entered.wait(0.2)
        self.entered.set()
        return x * self.weight if self.weight is before else x * float("nan")


def test_threads_do_not_see_the_copies_of_each_other() -> None:
    """Two threads in one placed part each run with copies of their own, whose gradients arrive."""
    part = Meeting()
    forward = PlacedForward("part", part, Copying(torch.device("cpu")))
    forward.put()
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(part, [torch.ones(2), torch.ones(2)]))
    forward.take()
    sum(results).sum().backward()

    assert torch.equal(part.weight.grad, torch.full((2,), 2.0))
