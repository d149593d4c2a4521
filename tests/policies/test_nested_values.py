"""Tensors in nested values: each is changed once, and all the rest is as it was."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from torchrepro.policies.offload import NestedMap

Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Record:
    """A frozen record."""

    one: Any
    two: Any


TENSORS = [torch.tensor([float(number)]) for number in range(3)]
LEAVES = st.one_of(
    st.sampled_from(TENSORS), st.none(), st.booleans(), st.integers(), st.text(max_size=3)
)


def _inside(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keyed = st.dictionaries(st.text(max_size=2), values, max_size=3)
    return st.one_of(
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
        keyed,
        keyed.map(OrderedDict),
        keyed.map(UserDict),
        st.builds(Pair, values, values),
        st.builds(Record, values, values),
    )


NESTED = st.recursive(LEAVES, _inside, max_leaves=12)


def _shape(value: Any) -> Any:
    """Return what `value` looks like, tensors by their numbers."""
    if isinstance(value, torch.Tensor):
        return ("tensor", *value.tolist())
    if isinstance(value, dict | UserDict):
        return type(value), [(key, _shape(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_shape(part) for part in value]
    if isinstance(value, Record):
        return Record, [_shape(value.one), _shape(value.two)]
    return value


@given(NESTED)
def test_a_value_comes_back_as_it_went(value: Any) -> None:
    """Changed and changed back, a nested value has the same types, keys and tensors."""
    there = NestedMap(lambda tensor: tensor + 1)(value)
    back = NestedMap(lambda tensor: tensor - 1)(there)

    assert _shape(back) == _shape(value)


@given(NESTED)
def test_each_tensor_is_changed_once(value: Any) -> None:
    """A tensor that stands in several places is one tensor in all of them afterwards."""
    changed: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        changed.append(id(tensor))
        return tensor.clone()

    NestedMap(note)(value)

    assert len(changed) == len(set(changed))


@given(NESTED)
def test_the_value_itself_is_left_alone(value: Any) -> None:
    """The containers of the caller are never written to."""
    before = _shape(value)
    NestedMap(torch.neg)(value)

    assert _shape(value) == before


def test_what_holds_itself_ends() -> None:
    """A list that holds itself is gone through once."""
    value: list[Any] = [TENSORS[1]]
    value.append(value)

    assert torch.equal(NestedMap(torch.neg)(value)[0], -TENSORS[1])


def test_other_objects_are_handed_on_themselves() -> None:
    """An object that is no container keeps its identity: it may be somebody's state."""
    cache = type("Cache", (), {"keys": TENSORS[1]})()

    assert NestedMap(torch.neg)([cache])[0] is cache


def test_a_packed_sequence_keeps_its_batch_sizes() -> None:
    """Of a packed sequence the data changes, and the batch sizes are the same object."""
    packed = pack_sequence([torch.ones(2, 3), torch.ones(1, 3)])
    found = NestedMap(torch.neg)(packed)

    assert isinstance(found, PackedSequence)
    assert torch.equal(found.data, -packed.data)
    assert found.batch_sizes is packed.batch_sizes


def test_a_result_of_torchs_own_type_keeps_it() -> None:
    """The named results of torch's functions stay what they are."""
    found = NestedMap(torch.neg)(torch.tensor([1, 2]).max(0))

    assert isinstance(found, torch.return_types.max)
    assert found.values == -2


def test_an_output_of_transformers_keeps_its_type() -> None:
    """The outputs of transformers, mappings and records at once, can be read in both ways."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given_ = outputs.BaseModelOutput(last_hidden_state=torch.ones(1), attentions=(torch.ones(2),))
    found = NestedMap(torch.neg)(given_)

    assert type(found) is type(given_)
    assert found["last_hidden_state"] is found.last_hidden_state
    assert found.last_hidden_state == -1
    assert torch.equal(found.attentions[0], -torch.ones(2))
