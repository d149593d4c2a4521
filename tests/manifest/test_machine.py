"""The facts on software, hardware and source in a manifest, on unusual machines, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from torchrepro.ground.redaction import sounds_secret
from torchrepro.knobs.catalogue import CATALOGUE
from torchrepro.knobs.variables import RECORDED, ROWS
from torchrepro.manifest import environment as module
from torchrepro.manifest.environment import (
    NotKnownYetError,
    hardware,
    read_rows,
    repository,
    software,
)

from ..benchmarks.paired import ERROR, FIRST_LOOK, interval, require
from ..verification.repositories import commit, git

PATIENCE = 300
"""Seconds for a git that does answer: how long one may take is a law of its own."""

TOO_LONG = "longer than"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A repository with one commit and one untracked file, as the current folder."""
    commit(tmp_path, {"train.py": "1\n"})
    (tmp_path / "log.txt").write_text("written by a run\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_folder", os.getcwd)
    monkeypatch.setitem(module.git.__kwdefaults__, "timeout", PATIENCE)
    module._answer.cache_clear()
    yield tmp_path
    module._answer.cache_clear()


def test_without_a_current_folder_nothing_fails(tmp_path, monkeypatch):
    """A process whose folder was removed is in no repository; this is no failure of git."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", None, raising=False)
    (tmp_path / "gone").rmdir()
    module._answer.cache_clear()

    assert module.commit() == {"unknown": "not in a git repository"}


def test_commit_and_changes_of_the_working_tree(source):
    """A clean tree has a commit and no changes; changed files count, and have a digest."""
    clean = repository()
    found = []
    for text in ("2\n", "3\n"):
        (source / "train.py").write_text(text, encoding="utf-8")
        module._answer.cache_clear()
        found.append(repository())

    assert (len(clean["commit"]), clean["changed_files"], "changes" in clean) == (40, 0, False)
    assert [each["changed_files"] for each in found] == [1, 1]
    assert found[0]["changes"] != found[1]["changes"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://alice:hunter7@host.example/team/repo.git", "(hidden)@host.example/team/repo.git"),
        ("https://ghp_0123456789abcdef@host.example/team/repo", "(hidden)@host.example/team/repo"),
        ("https://host.example/repo?private_token=hunter7", "https://host.example/repo?(hidden)"),
        ("git@host.example:team/repo.git", "host.example:team/repo.git"),
        ("hunter7:x@host.example:team/repo.git", "host.example:team/repo.git"),
    ],
)
def test_remotes_are_shown_without_credentials(source, url, shown):
    """A remote is shown as host and path, without login, password and query."""
    git(source, "remote", "add", "origin", url)
    (remote,) = repository()["remotes"]

    assert remote.endswith(shown)
    assert not any(secret in remote for secret in ("hunter7", "ghp_", "alice"))


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (None, "git is not installed"),
        ("#!/bin/sh\nexec sleep 600\n", TOO_LONG),
        ("#!/bin/sh\necho secret >&2; exit 3\n", "git failed (CalledProcessError)"),
        ("#!/bin/sh\nprintf '\\377\\n'\n", ""),
    ],
    ids=["absent", "slow", "broken", "garbage"],
)
def test_a_missing_or_failing_git_is_reported_and_no_failure(
    source, monkeypatch, tmp_path_factory, program, reason
):
    """If git is absent, slow or broken, the manifest has the reason in place of the commit."""
    folder = tmp_path_factory.mktemp("bin")
    if program:
        (folder / "git").write_text(program, encoding="utf-8")
        (folder / "git").chmod(0o755)
    path = f"{folder}:/bin:/usr/bin" if program else str(folder)
    monkeypatch.setenv("PATH", path)
    patience = 0.2 if reason == TOO_LONG else PATIENCE
    monkeypatch.setitem(module.git.__kwdefaults__, "timeout", patience)
    found = repository()

    assert reason in found.get("unknown", "")
    assert "secret" not in str(found)


def test_a_failing_row_is_unknown_and_an_unknowable_one_is_omitted():
    """Reading a machine never raises: a value that cannot be read is unknown, with the reason."""

    def fails():
        raise PermissionError(13, "no entry")

    def later():
        raise NotKnownYetError

    found = read_rows({"a": fails, "b": later, "c": lambda: 3, "d": lambda: None})

    assert found == {"a": "unknown: PermissionError: [Errno 13] no entry", "c": 3, "d": None}


def test_software_and_hardware_match_torch_and_the_system():
    """Rows that torch and the system can report have the reported values."""
    its, iron = software(), hardware()

    assert its["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert its["cuda"] == torch.version.cuda
    assert its["blas"]
    assert iron["instruction set"] == torch.backends.cpu.get_cpu_capability()
    assert iron["threads"] == torch.get_num_threads()
    assert iron["cpu"]
    assert [v for v in (*its.values(), *iron.values()) if str(v).startswith("unknown")] == []


def test_every_recorded_variable_has_one_row_and_a_reason():
    """A variable has one row; a recorded one has a reason and a source, and is no secret."""
    rows = {row["name"]: row for row in ROWS}

    assert len(rows) == len(ROWS)
    assert {row.get("set_in") for row in ROWS} == {"env", "env_extra", None}
    assert rows.keys() >= {knob.variable for knob in CATALOGUE if knob.variable}
    for name in RECORDED:
        assert rows[name]["does"], name
        assert rows[name]["source"].startswith("https://"), name
        assert not sounds_secret(name)


@pytest.mark.slow
def test_reading_imports_nothing_and_initializes_no_device():
    """Facts that only torch reports are omitted before it is imported, and it stays unimported."""
    code = (
        "import json, sys, torchrepro.manifest.environment as e;"
        "print(json.dumps([e.software(), e.hardware(), e.repository()]));"
        "assert not {'torch', 'numpy'} & set(sys.modules);"
        "import torch; e.software(); e.hardware(); assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    its, iron, _ = json.loads(done.stdout)

    assert its["torch"] is not None
    assert "cuda" not in its
    assert "threads" not in iron
    assert iron["cpu"]


TIMED = """
import json, time, torch, torchrepro
from torchrepro.manifest.contents import manifest
plan = torchrepro.plan("debug-strict")
took = []
for _ in range(4):
    start = time.perf_counter()
    manifest(plan.resolved, plan.report)
    took.append(time.perf_counter() - start)
print(json.dumps([took[0], min(took[1:])]))
"""


@pytest.mark.benchmark
def test_a_manifest_takes_tens_of_milliseconds():
    """The first manifest of a process takes at most 0.15 s, git included, and a later one 0.03."""
    words = [sys.executable, "-c", TIMED]
    found = [
        json.loads(subprocess.run(words, capture_output=True, timeout=300, check=True).stdout)
        for _ in range(FIRST_LOOK)
    ]

    for name, bound, took in zip(
        ("first", "later"), (0.15, 0.03), zip(*found, strict=True), strict=True
    ):
        low, high = interval(took, ERROR)
        print(f"\nmanifest, {name}: {low * 1e3:.0f} to {high * 1e3:.0f} ms")
        require(low <= bound, f"{bound} s for the {name} manifest of a process")
