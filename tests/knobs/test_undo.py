"""After a profile ends, all settings read as they did before it started."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import torchrepro
from torchrepro.application.applier import active_profiles
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
    """Apply the drawn values, or skip the example if they contradict each other."""
    try:
        return torchrepro.apply(values)
    except ProfileError:
        assume(False)
        raise


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_profiles_are_undone(name: str, world: World) -> None:
    """Every shipped profile changes the process, and its undo restores it."""
    before = world()

    with torchrepro.apply(name):
        assert before != world()

    assert before == world()


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_undo_restores_the_state_at_entry_in_any_nesting(
    data: st.DataObject, profiles: Any, world: World
) -> None:
    """Leaving an inner profile restores the state of the outer; leaving that, the state before.

    Restoring the outer one alone undoes the inner one first.
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
    """If any step of a strict profile raises, the process is as before."""
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
    assert active_profiles() == ()


def _failing(
    write: Callable[..., None], written: list[Any], step: int, kind: type[BaseException]
) -> Callable[..., None]:
    def failing(self: Any, value: Any) -> None:
        write(self, value)
        written.append(value)
        if len(written) == step + 1:
            raise kind("injected after the write")

    return failing


def test_a_refused_profile_is_not_active_even_if_its_undo_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error of the undo is raised, and the profile never counts as active."""

    def broken(access: Any, saved: Any) -> None:
        raise OSError("this one cannot be put back")

    monkeypatch.setattr(Attribute, "write", lambda access, value: None)
    monkeypatch.setattr(Attribute, "restore", broken)
    now = torch.backends.mkldnn.enabled
    with pytest.raises(OSError, match="cannot be put back"):
        torchrepro.apply(
            {"guarantee": "repeatable", "backends": {"cpu": {"mkldnn_enabled": not now}}}
        )

    assert active_profiles() == ()


def test_every_knob_is_restored_even_if_one_restore_raises(world: World) -> None:
    """A restore that raises is reported, and all other knobs are restored.

    This includes a knob that the profile did not have to change, but the program changed later.
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
    """If a setter assigns a value and then raises, the old value is restored."""
    before = world()
    with torchrepro.apply({"backends": {"cuda": {"preferred_linalg_library": "magma"}}}) as outer:
        row = outer.report["backends.cuda.preferred_linalg_library"]
        if row.outcome == "failed":
            assert (
                before["backends.cuda.preferred_linalg_library"]
                == (world()["backends.cuda.preferred_linalg_library"])
            )

    assert before == world()


def test_an_exception_in_the_scope_propagates_and_the_state_is_restored(world: World) -> None:
    """Leaving the scope by an exception restores the state and hides no error."""
    before = world()

    with pytest.raises(ZeroDivisionError), torchrepro.apply("debug-strict"):
        _ = 1 / 0

    assert before == world()


def test_a_profile_changes_exactly_the_knobs_that_it_names(world: World) -> None:
    """A null changes nothing: only the named knobs and the state behind them change."""
    before = world()

    with torchrepro.apply({"backends": {"cpu": {"mkldnn_deterministic": True}}}):
        after = world()

    changed = {key for key in after if after[key] != before[key]}
    assert {"backends.cpu.mkldnn_deterministic"} == changed


def test_older_names_stay_readable_under_a_profile() -> None:
    """Code that reads the older precision switches of torch works under every shipped profile."""
    for name in SHIPPED:
        with torchrepro.apply(name):
            assert isinstance(torch.backends.cudnn.allow_tf32, bool)
            assert isinstance(torch.backends.cuda.matmul.allow_tf32, bool)
            assert torch.get_float32_matmul_precision() in ("highest", "high", "medium")
            with torch.backends.cudnn.flags(enabled=True):
                pass


def test_undo_is_exact_from_random_initial_states(fork_python: Fork) -> None:
    """From random settings, in the end frozen ones, torch reports the same state after the undo."""
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


def test_flags_that_were_frozen_in_the_scope_are_restored(fork_python: Fork) -> None:
    """Frozen flags are restored and stay frozen; a profile that must set them fails."""
    done = fork_python("-c", FROZEN)

    assert done.stdout.splitlines()[-1:] == ["[True, True, True, True]"], done.stderr
