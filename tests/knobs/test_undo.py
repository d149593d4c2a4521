"""Undo: what is read after leaving a profile is what was read before entering it."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.application.applier import in_force
from torchrepro.ground.errors import ProfileError
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.knob import Attribute

World = Callable[[], dict[str, Any]]
Fork = Callable[..., subprocess.CompletedProcess[str]]
WRITING = {
    each for knob in CATALOGUE for each in type(knob.access).__mro__ if "write" in vars(each)
}
SHIPPED = ("seed-only", "debug-strict", "train-fast", "npu-align")


def applied(values: Any) -> torchrepro.Applied:
    """Apply drawn values, or drop the example if they contradict each other."""
    try:
        return torchrepro.apply(values)
    except ProfileError:
        assume(False)
        raise


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_undone(name: str, world: World) -> None:
    """Every shipped profile changes the process and leaves it as it was."""
    before = world()

    with torchrepro.apply(name):
        assert before != world()

    assert before == world()


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_undo_gives_back_the_state_of_the_entry_in_any_nesting(
    data: st.DataObject, profiles: Any, world: World
) -> None:
    """Leaving an inner profile gives back the outer one's state, and leaving that the state before.

    So does restoring the outer one alone: it takes the inner one back first.
    """
    before = world()
    outer = applied(data.draw(profiles))
    inner = None
    try:
        between = world()
        applied(data.draw(profiles)).restore()
        assert between == world()
        inner = applied(data.draw(profiles))
    finally:
        outer.restore()

    assert before == world()
    assert inner is not None
    assert not inner.active
    inner.restore()
    assert before == world()


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data(), step=st.integers(0, 30), kind=st.sampled_from([KeyboardInterrupt, OSError]))
def test_a_failure_at_any_step_leaves_the_state_before(
    data: st.DataObject, step: int, kind: type[BaseException], profiles: Any, world: World
) -> None:
    """Whatever raises at whatever step of a strict profile, the process is as it was before."""
    values = data.draw(profiles) | {"guarantee": "aligned"}
    before = world()
    with pytest.MonkeyPatch.context() as patch:
        written: list[Any] = []
        for access in WRITING:
            patch.setattr(access, "write", _failing(access.write, written, step, kind))
        try:
            torchrepro.apply(values).restore()
        except (torchrepro.ApplyError, KeyboardInterrupt, OSError):
            pass
        except ProfileError:
            assume(False)

    assert before == world()
    assert in_force() == ()


def _failing(
    write: Callable[..., None], written: list[Any], step: int, kind: type[BaseException]
) -> Callable[..., None]:
    def failing(self: Any, value: Any) -> None:
        write(self, value)
        written.append(value)
        if len(written) == step + 1:
            raise kind("injected after the write")

    return failing


def test_a_refused_profile_is_not_in_force_even_if_its_undo_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be put back is raised, and nobody finds a profile that was never in force."""

    def broken(access: Any, saved: Any) -> None:
        raise OSError("this one cannot be put back")

    monkeypatch.setattr(Attribute, "write", lambda access, value: None)
    monkeypatch.setattr(Attribute, "restore", broken)
    now = torch.backends.mkldnn.enabled
    with pytest.raises(OSError, match="cannot be put back"):
        torchrepro.apply(
            {"guarantee": "repeatable", "backends": {"cpu": {"mkldnn_enabled": not now}}}
        )

    assert in_force() == ()


def test_every_knob_is_put_back_even_if_one_restore_raises(world: World) -> None:
    """A raising restore in the middle is reported, and stops no other knob from being put back.

    Nor does it matter that the program has flipped one that the profile had found as it should be.
    """
    before = world()
    scope = torchrepro.apply("debug-strict")
    torch.backends.cudnn.benchmark = True

    def broken() -> None:
        raise OSError("this one cannot be put back")

    scope._undo.callback(broken)
    with pytest.raises(OSError, match="cannot be put back"):
        scope.restore()

    assert before == world()


def test_a_refused_write_leaves_the_knob_as_it_was(world: World) -> None:
    """A setter that assigns before it refuses changes nothing that stays."""
    before = world()
    with torchrepro.apply({"backends": {"cuda": {"preferred_linalg_library": "magma"}}}) as outer:
        row = outer.report["backends.cuda.preferred_linalg_library"]
        if row.outcome == "failed":
            assert (
                before["backends.cuda.preferred_linalg_library"]
                == (world()["backends.cuda.preferred_linalg_library"])
            )

    assert before == world()


def test_an_exception_in_the_scope_is_passed_on_and_undone(world: World) -> None:
    """Leaving the scope by an exception restores the state and hides nothing."""
    before = world()

    with pytest.raises(ZeroDivisionError), torchrepro.apply("debug-strict"):
        _ = 1 / 0

    assert before == world()


def test_a_profile_touches_exactly_what_it_names(world: World) -> None:
    """Null leaves alone: nothing but the named knobs, and nothing behind them, has changed."""
    before = world()

    with torchrepro.apply({"backends": {"cpu": {"mkldnn_deterministic": True}}}):
        after = world()

    changed = {key for key in after if after[key] != before[key]}
    assert {"backends.cpu.mkldnn_deterministic"} == changed


def test_older_names_stay_readable_under_a_profile() -> None:
    """Code that reads torch's older precision switches works under every shipped profile."""
    for name in SHIPPED:
        with torchrepro.apply(name):
            assert isinstance(torch.backends.cudnn.allow_tf32, bool)
            assert isinstance(torch.backends.cuda.matmul.allow_tf32, bool)
            assert torch.get_float32_matmul_precision() in ("highest", "high", "medium")
            with torch.backends.cudnn.flags(enabled=True):
                pass


def test_undo_is_exact_from_any_start_as_torch_itself_says(fork_python: Fork) -> None:
    """From random settings, frozen ones at last, what torch says after undo is what it said."""
    done = fork_python(Path(__file__).with_name("random_starts.py"))

    assert done.returncode == 0, done.stderr


FROZEN = """
import torch, torchrepro
def world():
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    flags = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, mkldnn.deterministic
    parts = [getattr(cudnn, name, None) for name in ("conv", "rnn")]  # since torch 2.9
    return flags, [getattr(part, "fp32_precision", None) for part in parts]
before = world()
scope = torchrepro.apply("debug-strict")
inside = world()
torch.backends.disable_global_flags()
scope.restore()
after = world()
try:
    torchrepro.apply("debug-strict")
except torchrepro.ApplyError as error:
    failed = [row.knob for row in error.report if row.outcome == "failed"]
frozen = torch.backends.flags_frozen()
with torchrepro.apply("debug-strict", ["guarantee=seeded"]):
    pass
print([before != inside, before == after == world(), frozen, bool(failed)])
"""


def test_flags_that_are_frozen_meanwhile_are_put_back(fork_python: Fork) -> None:
    """Frozen flags are put back and stay frozen, and a profile that needs them says it failed."""
    done = fork_python("-c", FROZEN)

    assert done.stdout.splitlines()[-1:] == ["[True, True, True, True]"], done.stderr
