"""Snapshots restore the saved state, through any file format and in any process."""

import io
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import torchrepro
from torchrepro.ground.writing import write_atomically

from .drawing import DRAWS, OWN, draw, register_own
from .loaders import AUTO, Noisy

State = Callable[[], dict[str, Any]]


def _checkpoint(snapshot: Any, _path: Path) -> Any:
    file = io.BytesIO()
    torch.save({"epoch": 3, "rng": snapshot}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["rng"]


def _file(_snapshot: Any, path: Path) -> Path:
    torchrepro.save_rng_state(path)
    return path


CONTAINERS: dict[str, Callable[[Any, Path], Any]] = {
    "itself": lambda snapshot, _: snapshot,
    "any mapping": lambda snapshot, _: MappingProxyType(snapshot),
    "JSON": lambda snapshot, _: json.loads(json.dumps(snapshot)),
    "torch.save": _checkpoint,
    "a file": _file,
    "the name of a file": lambda snapshot, path: str(_file(snapshot, path)),
}


@pytest.fixture
def registered() -> None:
    register_own()


@pytest.mark.parametrize("through", CONTAINERS.values(), ids=CONTAINERS)
@settings(max_examples=20)
@given(drawn=st.tuples(DRAWS, DRAWS, DRAWS))
def test_a_restore_restores_the_saved_state(
    through: Callable[[Any, Path], Any],
    drawn: tuple[list[str], ...],
    generators: State,
    registered: None,
    tmp_path: Path,
) -> None:
    """The state and the following numbers are the same, through any file format."""
    before, between, after = drawn
    for name in before:
        draw(name)
    saved, snapshot = generators(), torchrepro.rng_state()
    kept = through(snapshot, tmp_path / "rng.json")
    assert generators() == saved
    expected = [draw(name) for name in after]
    for name in between:
        draw(name)

    torchrepro.set_rng_state(kept)

    assert generators() == saved
    assert [draw(name) for name in after] == expected
    torchrepro.set_rng_state(kept)
    assert torchrepro.rng_state() == snapshot


def test_a_snapshot_is_plain_text(tmp_path: Path, registered: None, seed_1234: Any) -> None:
    """A file is JSON of plain values with its format and rank; it has no pickle."""
    torchrepro.save_rng_state(tmp_path / "rng.json")
    content = (tmp_path / "rng.json").read_bytes()
    snapshot = json.loads(content)

    assert content.isascii()
    assert snapshot["world"] == {"size": 1, "rank": 0}
    assert snapshot["seed_plan"]["seed"] == 1234
    assert set(snapshot["kinds"]) == set(OWN)
    assert {"python", "numpy", "torch"} <= set(snapshot["generators"])
    assert json.loads(json.dumps(snapshot := torchrepro.rng_state())) == snapshot


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


def test_another_process_continues_from_a_saved_file(
    tmp_path: Path, forked_answer_of: Callable[..., Any]
) -> None:
    """A new process of the same rank draws the same numbers as the process that saved it."""
    path, rank = tmp_path / "rng.json", {"RANK": "2", "WORLD_SIZE": "4"}

    drawn = forked_answer_of(FIRST + SAVE, path, **rank)

    assert forked_answer_of(FIRST + RESTORE, path, **rank) == drawn


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU in this machine")
def test_a_restore_starts_an_unused_gpu(tmp_path: Path, fork_python: Callable[..., Any]) -> None:
    """A framework restores before it moves its model, so the GPU is started for its generator."""
    path = tmp_path / "state.json"
    draw = "print(torch.rand(3, device='cuda').tolist(), torch.rand(3).tolist())"
    save = f"import torch, torchrepro; {draw}; torchrepro.save_rng_state({str(path)!r}); {draw}"
    restore = f"import torch, torchrepro; torchrepro.set_rng_state({str(path)!r}); {draw}"

    saved, restored = fork_python("-c", save), fork_python("-c", restore)

    assert restored.stdout, restored.stderr
    assert restored.stdout.splitlines() == saved.stdout.splitlines()[1:]


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


def test_a_restore_also_restores_the_programs_seeds() -> None:
    """Later seeds of `random` and numpy are forgotten, so samples continue unchanged."""
    with torchrepro.apply(AUTO):
        random.seed(5), np.random.seed(5)
        loader, snapshot = DataLoader(Noisy(), collate_fn=list), torchrepro.rng_state()
        expected = list(loader)
        random.seed(6), np.random.seed(6)
        torchrepro.set_rng_state(snapshot)
        assert list(loader) == expected


NO_FILES = {  # content, word of the message
    "empty": b"",
    "no JSON": b"not json",
    "a number": b"3",
    "a list": b"[]",
    "null": b"null",
    "no text": bytes(range(128, 256)),
    "a pickle": b"\x80\x04K\x01.",
    "an empty object": b"{}",
    "very deep": b"[" * 100_000,
    "a huge number": b"9" * 100_000,
}


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A missing directory, or a file in its place, raises OSError and leaves no file."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nope/rng.json", tmp_path / "file/rng.json", tmp_path):
        with pytest.raises(OSError, match=r"."):
            torchrepro.save_rng_state(path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_a_full_disk_keeps_the_older_file(tmp_path: Path, full_disk: Callable[..., Any]) -> None:
    """A write that fails halfway raises, keeps the older file, and leaves no partial file."""
    path = tmp_path / "rng.json"
    torchrepro.save_rng_state(path)
    before = path.read_bytes()
    random.random()
    with full_disk(), pytest.raises(OSError, match="File too large"):
        torchrepro.save_rng_state(path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_parallel_saves_to_one_path_do_not_mix(tmp_path: Path) -> None:
    """While several threads write one file, a reader finds one complete snapshot."""
    path, contents = tmp_path / "file", [bytes([n]) * 300_000 for n in range(4)]

    def write(content: bytes) -> bool:
        found = set()
        for _ in range(30):
            write_atomically(path, content)
            found.add(path.read_bytes())
        return found <= {*contents}

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(write, contents))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9999])
def test_a_truncated_file_is_refused(
    share: float, refused: Callable[[Any], str], tmp_path: Path
) -> None:
    """The message says that it is truncated, and nothing changes."""
    path = tmp_path / "rng.json"
    torchrepro.save_rng_state(path)
    random.random(), np.random.rand(), torch.rand(1)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])

    assert str(path) in refused(path)


@pytest.mark.parametrize("content", NO_FILES.values(), ids=NO_FILES)
def test_a_file_with_other_content_is_refused(
    content: bytes, refused: Callable[[Any], str], tmp_path: Path
) -> None:
    """The message shows at most one line of it."""
    path = tmp_path / "rng.json"
    path.write_bytes(content)

    assert len(refused(path).splitlines()) <= 3


def test_a_path_that_cannot_be_read_is_refused(
    refused: Callable[[Any], str], tmp_path: Path
) -> None:
    """A missing file, a directory and a path with a NUL are refused with the reason."""
    assert f"{tmp_path / 'nope'}: cannot be read: No such file" in refused(tmp_path / "nope")
    assert "cannot be read: Is a directory" in refused(tmp_path)
    assert refused("rng\0.json")
