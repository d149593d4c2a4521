"""The files of snapshots: written completely or not at all."""

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

import torchrepro
from torchrepro.seeding.state import write_atomically

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
