"""Tensors in nested values: each is changed once, and all the rest is as it was."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.policies.placement import NestedMap

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
    """Changed and changed back it has its types, keys and tensors; the caller's own is unwritten.

    A tensor that stands in several places is changed once.
    """
    before = _shape(value)
    changed: list[int] = []

    def raised(tensor: torch.Tensor) -> torch.Tensor:
        changed.append(id(tensor))
        return tensor + 1

    back = NestedMap(lambda tensor: tensor - 1)(NestedMap(raised)(value))

    assert _shape(back) == _shape(value) == before
    assert len(changed) == len(set(changed))


def test_what_holds_itself_ends() -> None:
    """A list that holds itself is gone through once."""
    value: list[Any] = [TENSORS[1]]
    value.append(value)

    assert torch.equal(NestedMap(torch.neg)(value)[0], -TENSORS[1])


def test_other_objects_are_handed_on_themselves() -> None:
    """An object that is no container keeps its identity: it may be somebody's state."""
    cache = type("Cache", (), {"keys": TENSORS[1]})()

    assert NestedMap(torch.neg)([cache])[0] is cache


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
