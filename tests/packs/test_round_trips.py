"""Profiles survive being written, shown and read again, and digests depend on meaning only."""

from __future__ import annotations

import contextlib
import io
import json
import random

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.cli import main
from torchrepro.profile.resolved import flatten
from torchrepro.profile.schema import PROFILE_NAME
from torchrepro.reporting.process_state import PROFILE, outer_run

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Cf", "Zl", "Zp")), max_size=30
).filter(lambda text: "${" not in text and text != "???")
TRICKY = st.sampled_from(
    [
        *("yes", "null", "~", "010", "1:30:00", "1e3", "0x1F", "2026-11-20"),
        *("- a", "a: b", "#", "=", "<<"),
    ]
)
WORDS = TEXT | TRICKY
KEYS = WORDS.filter(lambda key: key and not (key[0] == key[-1] == "_"))
PROFILES = st.fixed_dictionaries(
    {},
    optional={
        "name": WORDS.filter(lambda name: not PROFILE_NAME.complaint(name)),
        "description": WORDS | st.just("two\nlines"),
        "seed": st.integers(0, 2**32 - 1),
        "streams": st.dictionaries(KEYS, st.integers(0, 9), max_size=3),
        "dropout": st.sampled_from(["keep", "zero"]),
        "guard": st.sampled_from(["none", "warn", "error"]),
        "device": st.fixed_dictionaries(
            {}, optional={"modules": st.dictionaries(KEYS, st.just("cpu"), max_size=3)}
        ),
        "env": st.fixed_dictionaries(
            {}, optional={"OMP_NUM_THREADS": st.sampled_from(["1", "16"])}
        ),
        "env_extra": st.dictionaries(
            st.sampled_from(["TEAM", "Team", "T_1"]), WORDS | st.just("a\nb\t"), max_size=3
        ),
        "requires": st.just({"pyyaml": ">=1"}),
        "backends": st.fixed_dictionaries(
            {}, optional={"cudnn": st.fixed_dictionaries({"benchmark_limit": st.integers(0, 99)})}
        ),
    },
).filter(bool)


@pytest.fixture(autouse=True)
def _consent(monkeypatch):
    """Allow the variables of these profiles any values."""
    monkeypatch.setenv("TORCHREPRO_ALLOW_ENV", "TEAM,Team,T_1")


def _file(folder, values, name="p.yaml", **style):
    path = folder / name
    text = yaml.safe_dump(values, **{"allow_unicode": True, **style})
    path.write_text(text, encoding="utf-8")
    return path


def _shown(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["show", *map(str, arguments)])
    return out.getvalue()


def _shuffled(values, seed):
    if not isinstance(values, dict):
        return values
    keys = list(values)
    random.Random(seed).shuffle(keys)
    return {key: _shuffled(values[key], seed) for key in keys}


@pytest.mark.slow
@settings(max_examples=40)
@given(values=PROFILES)
def test_the_output_of_show_is_the_same_profile(tmp_path_factory, values):
    """Its values, its name and its digest are the same after `show` and another load."""
    folder = tmp_path_factory.mktemp("shown")
    profile = torchrepro.load(str(_file(folder, values)))
    shown = _shown(folder / "p.yaml")
    (folder / "again.yaml").write_text(shown, encoding="utf-8")
    again = torchrepro.load(str(folder / "again.yaml"))

    assert profile == again
    assert profile.resolved.values == again.resolved.values
    assert shown.splitlines()[0] == f"# {again.digest}"
    assert json.loads(_shown(folder / "p.yaml", "--json")) == yaml.safe_load(shown)


@settings(max_examples=100)
@given(values=PROFILES, seed=st.integers(0, 999))
def test_the_digest_does_not_depend_on_formatting(tmp_path_factory, values, seed):
    """Nor on the order of keys, comments, nulls, the name or the description."""
    folder = tmp_path_factory.mktemp("written")
    digest = torchrepro.load(str(_file(folder, values))).digest
    shuffled = _shuffled(values, seed)
    plain = _file(folder, shuffled, "block.yaml", default_flow_style=False, width=20)
    _file(folder, shuffled, "flow.yaml", default_flow_style=True, width=1000, default_style='"')
    commented = "# c\n\n" + plain.read_text(encoding="utf-8") + "# end\non_late: null\n"
    (folder / "comments.yaml").write_text(commented, encoding="utf-8")
    _file(folder, {**values, "name": "another", "description": "other words"}, "named.yaml")

    written = ("block.yaml", "comments.yaml", "named.yaml")
    assert {torchrepro.load(str(folder / name)).digest for name in written} == {digest}


def _differences(outer, inner):
    """Return the differences that a job under `inner` reports in a run under `outer`, by key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PROFILE, json.dumps(outer.to_json()))
        try:
            outer_run(inner, "job")
        except torchrepro.ApplyError as error:
            lines = str(error).splitlines()[1:-1]
            return dict(line.removeprefix("  ").split(": ", 1) for line in lines)
    return {}


@settings(max_examples=100)
@given(first=PROFILES, second=PROFILES)
def test_profiles_differ_exactly_if_their_digests_do(tmp_path_factory, first, second):
    """The reported values are those of the two profiles, in either direction."""
    folder = tmp_path_factory.mktemp("two")
    left = torchrepro.load(str(_file(folder, first, "first.yaml"))).resolved
    right = torchrepro.load(str(_file(folder, second, "second.yaml"))).resolved
    forward, backward = _differences(left, right), _differences(right, left)

    assert _differences(left, left) == {}
    assert forward.keys() == backward.keys()
    for key, reported in forward.items():
        values = [repr(flatten(profile.values).get(key)) for profile in (left, right)]
        assert reported == "run {}, job {}".format(*values)
        assert backward[key] == "run {}, job {}".format(*reversed(values))
        assert values[0] != values[1]
    assert bool(forward) == (left.digest != right.digest)
