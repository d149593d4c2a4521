"""The parts of a value that are compared between two runs."""

from __future__ import annotations

import copy

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.trace.hooks import parts_of

PLAIN = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
ARRAYS = st.lists(st.integers(-9, 9), min_size=1, max_size=6).map(np.array)
TENSORS = st.lists(st.integers(-9, 9), min_size=1, max_size=6).map(torch.tensor)
LEAVES = st.one_of(PLAIN, ARRAYS, TENSORS)


def around(leaf, shape):
    """Return `leaf` alone, or within a list, a tuple or a dict."""
    return {"list": [1, leaf], "tuple": ("a", leaf), "dict": {"x": [leaf], "y": 2}, "": leaf}[shape]


@given(LEAVES, LEAVES, st.sampled_from(["list", "tuple", "dict", ""]))
def test_parts_are_equal_if_and_only_if_the_values_are(one, other, shape):
    """A value and its copy have the same parts; another value has other parts."""
    same = type(one) is type(other) and repr(one) == repr(other)
    parts = parts_of(around(one, shape))

    assert parts
    assert parts_of(around(copy.deepcopy(one), shape)) == parts
    assert (parts_of(around(other, shape)) == parts) == same
