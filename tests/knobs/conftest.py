"""Hypothesis strategies for legal values of knobs and for whole profiles."""

from typing import Any

import pytest
from hypothesis import strategies as st

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.knob import Digits, Integer, Knob, OneOf, Switch, Text, WordOrMapping

WORDS = {  # a few legal texts for variables whose pattern is open
    "NCCL_ALGO": ["Ring", "Tree", "^NVLS"],
    "NCCL_PROTO": ["Simple", "LL128"],
    "HCCL_ALGO": ["level0:NA;level1:ring"],
    "HCCL_DETERMINISTIC": ["true", "strict", "FALSE"],
    "TORCH_NPU_LEGACY_IMPL_LIST": ["randomness"],
}


def legal_values(knob: Knob) -> st.SearchStrategy[Any]:
    """Return a strategy for values that `knob` accepts."""
    if knob.variable in WORDS:
        return st.sampled_from(WORDS[knob.variable])
    match knob.legal:
        case Switch():
            drawn: st.SearchStrategy[Any] = st.booleans()
        case OneOf(values):
            drawn = st.sampled_from(values)
        case Integer(low, high):
            drawn = st.integers(low, min(high if high is not None else 8, 8) if low < 8 else high)
        case Digits(low, high):
            drawn = st.integers(low, min(high, 64)).map(str)
        case Text(pattern):
            drawn = st.from_regex(pattern, fullmatch=True).filter(lambda text: "\0" not in text)
        case WordOrMapping(under="ops"):
            drawn = st.sampled_from(["error", "cpu", {"ops": {"cumsum": "native"}}])
        case _:
            drawn = st.just({"layer.*": "cpu"})
    return drawn


@st.composite
def values_of_profiles(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the values of a profile: some knobs with legal values, in nested sections."""
    keys = {knob.profile_key: knob for knob in CATALOGUE}
    chosen = draw(st.lists(st.sampled_from(sorted(keys)), unique=True, max_size=20))
    values: dict[str, Any] = {"name": "drawn"}
    for key in chosen:
        section = values
        *path, last = key.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = draw(legal_values(keys[key]))
    return values


@pytest.fixture
def profiles() -> st.SearchStrategy[dict[str, Any]]:
    """Return the strategy for values of profiles."""
    return values_of_profiles()
