"""Two profiles are compared by what they come to on this machine."""

from __future__ import annotations

from contextlib import suppress

import pytest

from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.knob import MissingState
from torchrepro.lock.diff import Impact, compare, effective, of_profile
from torchrepro.messages import shown
from torchrepro.process_state import HARDWARE, present_kinds
from torchrepro.profile.load import resolve
from torchrepro.profile.resolved import DEFAULTS

KINDS = {"cuda": "cuda", "cudnn": "cuda", "npu": "npu"}
ALGORITHMS = "backends.torch.deterministic_algorithms"
DOORS = ("cuda", "communicator", "npu", "torch_npu", "transformer_engine")
"""The doors of variables that only an accelerator's libraries read."""

pytestmark = pytest.mark.usefixtures("clean_process")


def _section(knob):
    return next((kind for kind in KINDS if kind in knob.name.split(".")), "")


def _difference(*overrides):
    """Return in what a profile with these overrides differs from it without them, by key."""
    base = {"seed": 1, "backends": {"torch": {"deterministic_algorithms": "error"}}}
    sides = [resolve(base, chosen) for chosen in (overrides, ())]
    found = effective(compare(*(of_profile(str(n), side) for n, side in enumerate(sides))))
    return {each.key: each for each in found.differences}


def _settings():
    """Yield each knob that a profile names by itself, with the value that it has here now."""
    for knob in CATALOGUE:
        if knob.profile_key != knob.name or knob.moves_on or knob.variable:
            continue
        with suppress(MissingState):
            now = knob.access.read()
            legal = isinstance(now, bool | int | str) and not knob.legal.complaint(now)
            if legal and knob.name != ALGORITHMS:
                yield knob.name, (knob, now)


def test_a_default_that_is_spelt_out_is_no_difference():
    """A profile that sets what holds without it differs in nothing; another value does."""
    settings = dict(_settings())
    spelt_out = [f"{name}={shown(now)}" for name, (_, now) in settings.items()]
    flipped = {name: not now for name, (_, now) in settings.items() if isinstance(now, bool)}
    defaults = [f"{key}={value}" for key, value in DEFAULTS.items()]
    others = ("dropout=zero", "device.rng=host", "guard=warn", "on_late=error")

    assert len(settings) > 15
    assert not _difference(*spelt_out, *defaults)
    assert _difference(*(f"{n}={shown(v)}" for n, v in flipped.items())).keys() == flipped.keys()
    assert _difference(*others).keys() == {each.partition("=")[0] for each in others}


def test_what_hardware_reads_that_is_not_here_is_said_to_be_read_by_nothing():
    """A setting of a back end changes nothing here exactly where its kind of device is absent."""
    flags = {
        name: (_section(knob), not now)
        for name, (knob, now) in _settings()
        if _section(knob) in KINDS and isinstance(now, bool)
    }
    found = _difference(*(f"{name}={shown(value)}" for name, (_, value) in flags.items()))

    assert {"cuda", "cudnn"} <= {target for target, _ in flags.values()}
    for name, (target, _) in flags.items():
        absent = KINDS[target] not in present_kinds()
        assert (found[name].impact is Impact.NOTHING_HERE) == absent, name


def test_each_knob_of_an_accelerator_says_what_it_is_for():
    """Whatever only an accelerator's libraries read names its hardware, and no name is idle."""
    for knob in CATALOGUE:
        if (knob.variable and knob.door in DOORS) or _section(knob) in KINDS:
            assert knob.hardware, knob.name
    assert {knob.hardware for knob in CATALOGUE} == {"", *HARDWARE}


def test_how_likely_says_what_each_setting_is_for():
    """A seed decides numbers, a kernel may, a promise does not."""
    found = _difference(
        "seed=7", "backends.torch.deterministic_algorithms=warn", "on_late=error", "dropout=zero"
    )

    assert {key: each.impact for key, each in found.items()} == {
        "seed": Impact.CHANGES,
        "dropout": Impact.CHANGES,
        "backends.torch.deterministic_algorithms": Impact.MAY,
        "on_late": Impact.SHOULD_NOT,
    }


def test_the_column_that_says_the_same_in_every_row_is_left_out(command, answer, tmp_path):
    """`how likely` is a column where rows differ in it, and one line where they do not."""
    paths = []
    for name, more in (("one", "seed: 1\n"), ("two", "seed: 2\ndropout: zero\n")):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(more, encoding="utf-8")
    _, found = answer("diff", *paths)
    lines = command("diff", *paths)[1].splitlines()
    _, varied = answer("diff", "debug-strict", "seed-only")

    assert [row["rank"] for row in found["differences"]] == ["changes numbers"] * 2
    assert lines[0].split()[:2] == ["what", "differs"]
    assert lines[-1] == "each of these: changes numbers"
    assert len({row["rank"] for row in varied["differences"]}) > 1
    assert command("diff", "debug-strict", "seed-only")[1].startswith("how likely")
