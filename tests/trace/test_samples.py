"""What the program's functions return while a batch is loaded: seen, and left as it is."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrepro.trace.frames import source_of
from torchrepro.trace.hooks import SampleRecorder, parts_of

PLAIN = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
ARRAYS = st.lists(st.integers(-9, 9), min_size=1, max_size=6).map(np.array)
TENSORS = st.lists(st.integers(-9, 9), min_size=1, max_size=6).map(torch.tensor)
LEAVES = st.one_of(PLAIN, ARRAYS, TENSORS)


def around(leaf, shape):
    """Return a value that holds `leaf` in a list, a tuple, a dict, or alone."""
    return {"list": [1, leaf], "tuple": ("a", leaf), "dict": {"x": [leaf], "y": 2}, "": leaf}[shape]


@given(LEAVES, LEAVES, st.sampled_from(["list", "tuple", "dict", ""]))
def test_values_have_equal_parts_where_they_are_equal_and_only_there(one, other, shape):
    """The parts of a value and of its copy are the same; those of another value differ."""
    same = type(one) is type(other) and repr(one) == repr(other)
    parts = parts_of(around(one, shape))

    assert parts
    assert parts_of(around(copy.deepcopy(one), shape)) == parts
    assert (parts_of(around(other, shape)) == parts) == same


def returned(call):
    """Return what a recorder was reported while `call` ran as the loading of a batch."""
    reported = []
    recorder = SampleRecorder(lambda *record: reported.append(record))
    recorder.begin()
    try:
        call()
    finally:
        recorder.end()
    return reported


class Words:
    def __getitem__(self, index):
        return self.spelt(index, 2.5)

    def spelt(self, index, weight):
        if index == 7:
            raise KeyError(index)
        return f"word {index} {weight}"


def numbers():
    yield 1
    yield 2


def test_functions_are_reported_in_the_order_in_which_they_return():
    """Each comes with its line, its value, the sample, and the numbers that it was given; library
    code does not come at all.
    """
    reported = returned(lambda: torch.utils.data.default_collate([len(Words()[3])]))
    spelt = [(name, value, text) for _, name, value, text in reported if name.startswith("Words")]
    places = [source_of(place) for place, name, *_ in reported if name.startswith("Words")]

    assert spelt == [
        ("Words.spelt()", "word 3 2.5", "sample 3; index=3, weight=2.5"),
        ("Words.__getitem__()", "word 3 2.5", "sample 3"),
    ]
    assert all(place.startswith(f"{__file__}:") for place in places)
    assert not any("collate" in name for _, name, *_ in reported)


def test_what_a_generator_yields_counts_as_returned():
    """Every value that a generator hands over is reported, one by one."""
    reported = returned(lambda: list(numbers()))

    assert [value for _, name, value, _ in reported if name == "numbers()"] == [1, 2, None]


def test_a_sample_that_fails_fails_as_before_and_the_next_one_is_reported():
    """An error passes through the recorder, and the sample after it has its own index."""

    def load():
        with pytest.raises(KeyError):
            Words()[7]
        return Words()[8]

    texts = [text for _, name, _, text in returned(load) if name == "Words.__getitem__()"]
    assert texts == ["sample 7", "sample 8"]


def test_a_profile_function_that_is_set_goes_on_and_gets_its_place_back():
    """A profiler written in Python sees the same calls, and is the one in place afterwards."""
    seen = []

    def profiler(frame, event, _):
        seen.append((frame.f_code.co_name, event))

    sys.setprofile(profiler)
    try:
        reported = returned(lambda: Words()[1])
        kept = sys.getprofile()
    finally:
        sys.setprofile(None)

    assert kept is profiler
    assert ("spelt", "return") in seen
    assert [name for _, name, *_ in reported][:2] == ["Words.spelt()", "Words.__getitem__()"]


def test_a_loader_within_a_loader_ends_with_the_outer_one():
    """Beginning twice is ended by ending twice; ending without a beginning does nothing."""
    recorder = SampleRecorder(lambda *_: None)
    recorder.end()
    recorder.begin()
    recorder.begin()
    recorder.end()
    inside = sys.getprofile()
    recorder.end()

    assert inside is not None
    assert sys.getprofile() is None


def test_a_value_that_cannot_be_read_is_left_out():
    """A class that raises where it is looked at does the program no harm."""

    class Broken:
        def tobytes(self):
            raise RuntimeError("not now")

    assert parts_of(Broken()) == []
    assert parts_of(object()) == []
