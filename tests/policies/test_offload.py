"""A module on another device computes the same as in place, bit for bit, with the same effects."""

import copy
import operator
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from torchrepro.policies import placement

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as another device: every tensor is copied there and back."""
    monkeypatch.setattr(placement, "is_there", lambda *_: False)


class Elsewhere(nn.Module):
    """A module whose forward runs on another device."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return placement.run_forward_on(CPU, self.part, self.part.forward, args, kwargs)[0]


class Direct(Elsewhere):
    """The same module in place."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.part.forward(*args, **kwargs)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x.abs().long().clamp(max=7)) * x.unsqueeze(-1))


class Writing(nn.Module):
    """Writes to its input, to a buffer, and to its weight without autograd noticing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.weight = nn.Parameter(torch.randn(8))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(8))
        self.offset = torch.randn(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.clamp_(min=0)
        self.count.add_(1)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.latest = x.detach() + self.offset
        return x.mul_(self.scale) * self.weight


class Recomputed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


class Attending(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cells = kind(8, 4, num_layers=2, bidirectional=True, dropout=0.3, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cells(x)[0]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "batch norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)),
    "tied weights": Tied,
    "renormalised embedding": lambda: nn.Sequential(Rounded(), nn.Embedding(8, 8, max_norm=0.5)),
    "in-place writes": Writing,
    "checkpoint": lambda: Recomputed(reentrant=False),
    "reentrant checkpoint": lambda: Recomputed(reentrant=True),
    "frozen part": lambda: nn.Sequential(
        nn.Linear(8, 8).requires_grad_(requires_grad=False), nn.Linear(8, 8)
    ),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "part with spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8))),
    "parametrized": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(8, 8))),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(8, 8)),
    "attention": lambda: Attending(8, 2, dropout=0.2, batch_first=True),
    "transformer layer": lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "LSTM": lambda: Recurrent(nn.LSTM, proj_size=3),
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "module without parameters": lambda: nn.Softmax(dim=-1),
}
SEQUENCES = ("attention", "transformer layer", "LSTM", "GRU", "RNN")


class Rounded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().long().clamp(max=7)


def _train(
    wrap: type[Elsewhere], name: str, steps: int = 3
) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(3)
    model, first = wrap(MODULES[name]()), nn.Linear(8, 8)
    weights = [*first.parameters(), *model.parameters()]
    results: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    shape = (4, 5, 8) if name in SEQUENCES else (6, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = first(torch.randn(shape))
        result = model(hidden)
        if name == "linear":
            result = model(result)
        result.sum().backward()
        optimizer.step()
        results += [result.detach(), hidden.detach().clone()]
        results += [weight.grad for weight in weights if weight.grad is not None]
    assert all(map(operator.is_, [*first.parameters(), *model.parameters()], weights))
    return model, [*results, *model.state_dict().values(), torch.get_rng_state()]


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.mark.parametrize("name", MODULES)
def test_training_on_another_device_equals_training_in_place(name: str) -> None:
    """Results, gradients, weights, buffers, inputs and generators are bitwise equal.

    So are the attributes of the module afterwards; its parameter objects are the same.
    """
    (here, expected), (there, found) = _train(Direct, name), _train(Elsewhere, name)

    assert _same(expected, found)
    for left, right in zip(here.modules(), there.modules(), strict=True):
        assert [*vars(left)] == [*vars(right)]
        if isinstance(right, nn.RNNBase):
            assert all(map(operator.is_, right._flat_weights, right.parameters()))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "nothing": nullcontext,
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("mode", MODES)
def test_evaluation_on_another_device_equals_evaluation_in_place(mode: str, name: str) -> None:
    """In every mode of autograd and autocast, results and buffers of an evaluation are equal."""
    torch.manual_seed(1)
    direct = Direct(MODULES[name]()).eval()
    moved = Elsewhere(copy.deepcopy(direct.part)).eval()
    x = torch.randn((4, 5, 8) if name in SEQUENCES else (6, 8))
    with MODES[mode]():
        results = [model(x.clone()) for model in (direct, moved)]

    assert results[0].dtype == results[1].dtype
    assert torch.equal(*results)
    assert _same([*direct.state_dict().values()], [*moved.state_dict().values()])


def _of_gradients(wrap: type[Elsewhere]) -> list[torch.Tensor]:
    model, x = wrap(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), torch.randn(4, 8).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    grad.square().sum().backward()
    return [next(model.parameters()).grad, x.grad]


def _recomputed(wrap: type[Elsewhere], *, reentrant: bool) -> list[torch.Tensor]:
    model, x = wrap(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))), torch.randn(4, 8)
    checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).square().sum().backward()
    return [x.grad, *(weight.grad for weight in model.parameters())]


class Scaling(nn.Module):
    """Writes its result into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(self.scale)


def _through_a_write(wrap: type[Elsewhere]) -> list[torch.Tensor]:
    model, first = wrap(Scaling()), nn.Linear(8, 8)
    hidden = first(torch.randn(4, 8))
    assert model(hidden) is hidden
    hidden.square().sum().backward()
    return [model.part.scale.grad, first.weight.grad]


GRADIENTS: dict[str, Callable[[type[Elsewhere]], list[torch.Tensor]]] = {
    "of gradients": _of_gradients,
    "of a part that backward runs again": partial(_recomputed, reentrant=False),
    "of one that a reentrant backward runs again": partial(_recomputed, reentrant=True),
    "through an input that was written to": _through_a_write,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_all_kinds_equal_those_in_place(name: str) -> None:
    """Weights and inputs get the same gradients, with the same dropout masks."""
    found = []
    for wrap in (Direct, Elsewhere):
        torch.manual_seed(0)
        found.append(GRADIENTS[name](wrap))

    assert _same(*found)


def test_a_packed_sequence_moves_with_its_data() -> None:
    """The data of a packed sequence is moved, and its batch sizes stay on the host."""
    torch.manual_seed(0)
    layer = nn.GRU(8, 4)
    packed = pack_sequence([torch.randn(n, 8) for n in (2, 4, 3)], enforce_sorted=False)
    there, hidden = Elsewhere(layer)(packed)
    here, expected = layer(packed)

    assert isinstance(there, PackedSequence)
    assert torch.equal(here.batch_sizes, there.batch_sizes)
    assert torch.equal(here.data, there.data)
    assert torch.equal(here.unsorted_indices, there.unsorted_indices)
    assert torch.equal(expected, hidden)


class Caching(nn.Module):
    """Adds to the lists and mappings of its caller."""

    def forward(self, x: torch.Tensor, *, kept: list[Any], by_name: dict[str, Any]) -> Any:
        kept.append(x * 2)
        kept[0] = by_name.pop("old")
        by_name["new"] = x
        return kept, by_name


def test_lists_and_mappings_of_the_caller_are_written_to() -> None:
    """Values that a module adds to a list or mapping of the caller are there after the call."""
    x, first, old = torch.ones(2), torch.zeros(1), torch.full((3,), 3.0)
    kept, by_name = [first], {"old": old}
    results = Elsewhere(Caching())(x, kept=kept, by_name=by_name)

    assert kept[0] is old
    assert torch.equal(x * 2, kept[1])
    assert by_name == {"new": x}
    assert results[0] == kept


def test_arguments_on_the_device_are_passed_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If all tensors are on the device already, nothing is copied or counted."""
    monkeypatch.undo()
    seen = []
    part = nn.Identity()
    cache = {"x": [torch.ones(1)]}
    result, moved = placement.run_forward_on(
        CPU, part, lambda *args: seen.append(args), (cache,), {}
    )

    assert (result, moved) == (None, 0)
    assert seen[0][0] is cache


def test_a_failing_forward_restores_the_module() -> None:
    """After an exception the module has its own parameters and attributes again."""
    part = Writing()
    weight, offset = part.weight, part.offset
    with pytest.raises(RuntimeError):
        Elsewhere(part)(torch.ones(2, 3))

    assert part.weight is weight
    assert part.offset is offset


# Values in which tensors are found.

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Record:
    """A frozen dataclass."""

    one: Any
    two: Any


TENSORS = [torch.tensor([float(number)]) for number in range(3)]


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", *value.tolist())
    if isinstance(value, dict | UserDict):
        return type(value), [(key, _shape(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_shape(part) for part in value]
    if isinstance(value, Record):
        return Record, [_shape(value.one), _shape(value.two)]
    return value


def _containers(*parts: Any) -> list[Any]:
    ends, keyed = (parts[0], parts[-1]), {f"key {n}": part for n, part in enumerate(parts)}
    mappings = keyed, OrderedDict(keyed), UserDict(keyed)
    return [[*parts], parts, [], {}, *mappings, Pair(*ends), Record(*ends)]


def test_a_nested_value_survives_a_round_trip() -> None:
    """After two opposite changes, types, keys and tensors are equal; the original is unchanged.

    Shared containers stay shared. A tensor that occurs several times is changed once.
    """
    value = _containers(*_containers(*TENSORS, None, 3, "text"))
    before = _shape(value)
    changed: list[int] = []

    def raised(tensor: torch.Tensor) -> torch.Tensor:
        changed.append(id(tensor))
        return tensor + 1

    back = placement.NestedCopier(lambda tensor: tensor - 1)(placement.NestedCopier(raised)(value))

    assert _shape(back) == _shape(value) == before
    assert sorted(changed) == sorted(map(id, TENSORS))


def test_other_objects_keep_their_type() -> None:
    """A list that contains itself ends the recursion; results of torch keep their type."""
    cache = type("Cache", (), {"keys": TENSORS[1]})()
    value: list[Any] = [TENSORS[1], cache, torch.tensor([1, 2]).max(0)]
    value.append(value)
    found = placement.NestedCopier(torch.neg)(value)

    assert torch.equal(found[0], -TENSORS[1])
    assert found[1] is cache
    assert isinstance(found[2], torch.return_types.max)
    assert found[2].values == -2
    assert len(found) == 4


def test_an_output_of_transformers_keeps_its_type() -> None:
    """Outputs of transformers, both mappings and dataclasses, can be read in both ways."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given_ = outputs.BaseModelOutput(last_hidden_state=torch.ones(1), attentions=(torch.ones(2),))
    found = placement.NestedCopier(torch.neg)(given_)

    assert type(found) is type(given_)
    assert found["last_hidden_state"] is found.last_hidden_state
    assert found.last_hidden_state == -1
    assert torch.equal(found.attentions[0], -torch.ones(2))
