"""Every knob that can be set in this process is guarded, and its writer is reported."""

# ruff: noqa: PT012 - what raises is a step, or the end of the profile

from typing import Any

import pytest
from omegaconf import OmegaConf

import torchrepro
from torchrepro.application.guard import PER_THREAD
from torchrepro.knobs.catalogue import CATALOGUE

OTHERS: dict[str, tuple[Any, Any]] = {  # values of rows whose legal values are mappings
    "device.fallback": ("error", {"ops": {"cumsum": "native"}}),
    "device.modules": ({"0": "cpu"}, {"*": "cpu"}),
    "streams": ({"split": 3}, {"split": 4}),
    "ranks": ("same", "distinct"),
}
AROUND: dict[str, dict[str, Any]] = {  # what a value has to be accompanied by, to act on anything
    "device.fallback": {"backends.torch.deterministic_algorithms": "error"},
    "dataloader.seeding": {"seed": 3},
}


def two_values(knob):
    """Return a legal value of `knob`, and another that can be written."""
    first, *others = OTHERS.get(knob.name, knob.legal.examples())
    if knob.variable:
        return first, "another"
    return first, others[0] if others else None


def profile_of(values):
    """Return the values of a profile, given under dotted keys."""
    profile = OmegaConf.create({"name": "one-knob"})
    for key, value in values.items():
        OmegaConf.update(profile, key, value)
    return profile


def _settable():
    """Return the knobs that a profile can set in this process, except generators and the guard.

    Variables that inductor reads when it is loaded are excluded, since training steps load it.
    """
    found = []
    for knob in CATALOGUE:
        if knob.key == "seed" or knob.name == "guard" or "INDUCTOR" in knob.variable:
            continue
        values = {knob.profile_key: two_values(knob)[0], **AROUND.get(knob.name, {})}
        plan = torchrepro.plan(profile_of(values))
        if plan.report[knob.name].is_set:
            found.append(knob)
    return found


SETTABLE = _settable()


def test_there_are_knobs_of_every_kind_to_guard():
    """The tests below cover most of the catalogue."""
    backends = {f"backends.{name}" for name in ("torch", "cuda", "cudnn", "cpu")}
    assert {*backends, "env", "device"} <= {knob.name.rpartition(".")[0] for knob in SETTABLE}
    assert len(SETTABLE) > 30


@pytest.mark.parametrize("knob", SETTABLE, ids=lambda knob: knob.name)
def test_another_value_of_any_knob_is_reported_with_its_writer(knob, step, monkeypatch):
    """For every knob that a profile sets, the next step reports another value and its writer."""
    if knob.variable:  # what was exported is nobody's to take back
        monkeypatch.delenv(knob.variable, raising=False)
    first, second = two_values(knob)
    values = {"guard": "error", knob.profile_key: first, **AROUND.get(knob.name, {})}
    with (
        pytest.raises(torchrepro.DriftError) as caught,
        torchrepro.apply(profile_of(values)) as applied,
    ):
        if not applied.report[knob.name].is_set:
            pytest.skip(applied.report[knob.name].why)
        step()
        before = knob.access.read()
        try:
            knob.access.write(second)
        except RuntimeError as refused:
            pytest.skip(f"{second}: {refused}")
        step()

    seen = {drift.knob: drift for drift in caught.value.drift}[knob.name]
    assert (seen.was, seen.when) == (before, "before step 1")
    assert seen.now != seen.was
    # Of the others torchrepro alone has the state; these are attributes of torch's Python modules.
    is_plain = "opt_einsum" in knob.name or "python_native" in knob.name
    if knob.name.startswith(("env.", "backends.")) and not is_plain:
        assert seen.where.startswith(f"{__file__}:")


FLAGS = [knob for knob in SETTABLE if not knob.variable]


@pytest.mark.parametrize("knob", FLAGS, ids=lambda knob: knob.name)
def test_a_knob_per_thread_is_guarded_only_in_the_thread_that_applied_it(knob, in_thread):
    """Another thread, which reads another value of such a knob, reports no drift."""
    in_thread(knob.access.read)  # what a thread keeps, it keeps from its first use on
    values = {knob.profile_key: two_values(knob)[1], **AROUND.get(knob.name, {})}

    with torchrepro.apply(profile_of(values)):
        differs = in_thread(knob.access.read) != knob.access.read()

    assert not differs or knob.name in PER_THREAD
