"""Snapshots: what is restored is what was saved, through any container and in any process."""

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrepro

from .drawing import DRAWS, OWN, draw, own, register_own

State = Callable[[], dict[str, Any]]


def _json(snapshot: Any) -> Any:
    return json.loads(json.dumps(snapshot))


def _checkpoint(snapshot: Any) -> Any:
    file = io.BytesIO()
    torch.save({"epoch": 3, "rng": snapshot}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["rng"]


CONTAINERS = {"itself": lambda snapshot: snapshot, "JSON": _json, "torch.save": _checkpoint}


@pytest.fixture
def registered() -> None:
    register_own()


@pytest.mark.parametrize("through", CONTAINERS.values(), ids=CONTAINERS)
@settings(max_examples=40)
@given(drawn=st.tuples(DRAWS, DRAWS, DRAWS))
def test_restoring_is_the_identity(
    through: Callable[[Any], Any],
    drawn: tuple[list[str], ...],
    generators: State,
    registered: None,
) -> None:
    """After a restore the state is the saved one, and the same numbers come, from any container."""
    before, between, after = drawn
    for name in before:
        draw(name)
    saved = generators()
    snapshot = through(torchrepro.rng_state())
    assert generators() == saved
    expected = [draw(name) for name in after]
    for name in between:
        draw(name)

    torchrepro.set_rng_state(snapshot)

    assert generators() == saved
    assert [draw(name) for name in after] == expected
    torchrepro.set_rng_state(snapshot)
    assert torchrepro.rng_state() == snapshot


@settings(max_examples=15)
@given(drawn=DRAWS)
def test_a_file_restores_what_its_snapshot_restores(
    drawn: list[str], generators: State, registered: None, tmp_path: Path
) -> None:
    """What is saved to a file is restored from it, given as text or as a path."""
    for name in drawn:
        draw(name)
    saved, path = generators(), tmp_path / "rng.json"

    torchrepro.save_rng_state(path)
    assert generators() == saved
    for form in (path, str(path)):
        random.random(), torch.rand(2), np.random.rand(2), own["own Philox"].random()
        torchrepro.set_rng_state(form)
        assert generators() == saved


def test_a_snapshot_is_plain_text(tmp_path: Path, registered: None, seed_1234: Any) -> None:
    """A file is JSON of plain values that says where it comes from; nothing in it is a pickle."""
    torchrepro.save_rng_state(tmp_path / "rng.json")
    content = (tmp_path / "rng.json").read_bytes()
    snapshot = json.loads(content)

    assert content.isascii()
    assert snapshot["world"] == {"size": 1, "rank": 0}
    assert snapshot["seed_plan"]["seed"] == 1234
    assert set(snapshot["kinds"]) == set(OWN)
    assert {"python", "numpy", "torch"} <= set(snapshot["generators"])

    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(type(key) is str for key in value) and all(map(plain, value.values()))
        if isinstance(value, list):
            return all(map(plain, value))
        return value is None or type(value) in (int, float, str, bool)

    assert plain(torchrepro.rng_state())


FIRST = """
import json, random, sys, numpy as np, torch, torchrepro
torchrepro.apply({"seed": 11, "ranks": "distinct"})
own = torchrepro.register_generator("own", np.random.Generator(np.random.Philox(3)))
legacy = torchrepro.register_generator("legacy", np.random.RandomState(4))

def draw():
    return [random.random(), random.gauss(0, 1), *np.random.rand(2), np.random.randn(),
            *torch.rand(2).tolist(), torch.randn(1).item(), own.random(), legacy.randn()]

"""
SAVE = "draw()\ntorchrepro.save_rng_state(sys.argv[1])\nprint(json.dumps([draw(), draw()]))"
RESTORE = "torchrepro.set_rng_state(sys.argv[1])\nprint(json.dumps([draw(), draw()]))"


@pytest.mark.parametrize(
    "variables",
    [{}, pytest.param({"RANK": "2", "WORLD_SIZE": "4"}, marks=pytest.mark.slow)],
    ids=["alone", "rank"],
)
def test_another_process_goes_on_where_the_file_was_saved(
    variables: dict[str, str],
    tmp_path: Path,
    answer_of: Callable[..., Any],
    forked_answer_of: Callable[..., Any],
) -> None:
    """A new process that restores a file draws what the process that saved it drew next."""
    path = tmp_path / "rng.json"

    drawn = forked_answer_of(FIRST + SAVE, path, **variables)

    assert answer_of(FIRST + RESTORE, path, PYTHONHASHSEED="7", **variables) == drawn


@pytest.mark.parametrize("mode", ["meta", "inference", "double"])
def test_a_snapshot_is_independent_of_the_defaults_of_torch(mode: str, generators: State) -> None:
    """Default device, default type and inference mode change neither saving nor restoring."""
    saved, snapshot = generators(), torchrepro.rng_state()
    scopes = {"meta": torch.device("meta"), "inference": torch.inference_mode()}
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64 if mode == "double" else default)
        with scopes.get(mode, torch.enable_grad()):
            assert torchrepro.rng_state() == snapshot
            random.random(), np.random.rand(2)
            torch.default_generator.manual_seed(3)
            torchrepro.set_rng_state(snapshot)
    finally:
        torch.set_default_dtype(default)

    assert generators() == saved


def test_a_snapshot_taken_in_a_scope_is_the_one_of_the_scope(seed_1234: Any) -> None:
    """Inside `seeded` a snapshot holds the scope's generators, outside those of the run."""
    outside = torchrepro.rng_state()
    with torchrepro.seeded("init"):
        inside = torchrepro.rng_state()
        drawn = torch.rand(3)

    assert inside != outside
    assert torchrepro.rng_state() == outside
    with torchrepro.isolated_rng():
        torchrepro.set_rng_state(inside)
        assert torch.equal(torch.rand(3), drawn)
    assert torchrepro.rng_state() == outside
