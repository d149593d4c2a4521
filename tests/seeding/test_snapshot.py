"""Snapshots: what is restored is what was saved, through any container and in any process."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import torchrepro
from torchrepro.seeding.state import write_atomically

from .drawing import DRAWS, OWN, draw, own, register_own
from .loaders import AUTO, Noisy

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


def test_samples_go_on_under_the_seeds_that_the_program_had_given() -> None:
    """What it gave to `random` and numpy afterwards is forgotten with the restore."""
    with torchrepro.apply(AUTO):
        random.seed(5), np.random.seed(5)
        loader, snapshot = DataLoader(Noisy(), collate_fn=list), torchrepro.rng_state()
        expected = list(loader)
        random.seed(6), np.random.seed(6)
        torchrepro.set_rng_state(snapshot)
        assert list(loader) == expected


FOREVER = """
import sys, random, torchrepro
while True:
    random.random()
    torchrepro.save_rng_state(sys.argv[1])
    print(flush=True)
"""


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


def test_a_snapshot_leaves_one_file(tmp_path: Path) -> None:
    """Saving, over an older file too, leaves the file and nothing beside it."""
    for _ in range(2):
        torchrepro.save_rng_state(tmp_path / "rng.json")

    assert [entry.name for entry in tmp_path.iterdir()] == ["rng.json"]


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A directory that is not there, or a file in its place, is an OSError and leaves nothing."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nope/rng.json", tmp_path / "file/rng.json", tmp_path):
        with pytest.raises(OSError, match=r"."):
            torchrepro.save_rng_state(path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}.*"))


def test_a_full_disk_keeps_the_older_file(tmp_path: Path, full_disk: Callable[..., Any]) -> None:
    """A write that the system cuts short raises, keeps the file that was there, leaves no part."""
    path = tmp_path / "rng.json"
    torchrepro.save_rng_state(path)
    before = path.read_bytes()
    random.random()
    with full_disk(), pytest.raises(OSError, match="File too large"):
        torchrepro.save_rng_state(path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_killed_process_leaves_a_whole_file(tmp_path: Path) -> None:
    """Whenever the saving process is killed, the file that it leaves can be restored."""
    path = tmp_path / "rng.json"
    for round_ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", FOREVER, str(path)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            while process.stdout.readline() not in (b"\n", b""):
                pass  # a back end may print while it is loaded
            time.sleep(0.013 * round_)
            os.kill(process.pid, signal.SIGKILL)
        with torchrepro.isolated_rng():
            torchrepro.set_rng_state(path)


def test_readers_find_one_content_or_the_other(tmp_path: Path) -> None:
    """Somebody who reads while the file is replaced finds the older or the newer, whole."""
    path, contents = tmp_path / "file", [bytes([n]) * 200_000 for n in range(20)]
    write_atomically(path, contents[0])
    program = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1])\nprint(flush=True)\n"
        "sizes = {(len(c), len(set(c))) for c in (p.read_bytes() for _ in range(400))}\n"
        "import json; print(json.dumps(sorted(sizes)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        while reader.poll() is None:
            for content in contents:
                write_atomically(path, content)
        assert json.loads(reader.stdout.read()) == [[200_000, 1]]


def test_threads_that_save_to_one_path_do_not_mix_their_contents(tmp_path: Path) -> None:
    """When several threads write one file, it is what one of them wrote, and none fails."""
    path, failed = tmp_path / "file", []

    def write(content: bytes) -> None:
        try:
            for _ in range(30):
                write_atomically(path, content)
                assert len(set(path.read_bytes())) == 1
        except (OSError, AssertionError) as error:
            failed.append(error)

    threads = [Thread(target=write, args=(bytes([n]) * 300_000,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@settings(max_examples=100)
@given(kept=st.integers(0, 10**6))
def test_a_file_that_is_cut_off_is_refused(
    kept: int, refused: Callable[[Any], str], tmp_path: Path
) -> None:
    """However much of the file is missing, the message says so and nothing has changed."""
    path = tmp_path / "rng.json"
    torchrepro.save_rng_state(path)
    random.random(), np.random.rand(), torch.rand(1)
    content = path.read_bytes()
    path.write_bytes(content[: kept % len(content)])

    assert str(path) in refused(path)


@pytest.mark.parametrize("content", NO_FILES.values(), ids=NO_FILES)
def test_a_file_that_is_no_snapshot_is_refused(
    content: bytes, refused: Callable[[Any], str], tmp_path: Path
) -> None:
    """Whatever else a file holds is refused, and no more than a line of it is shown."""
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
