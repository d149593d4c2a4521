"""The first program and profile of a reader: the commands that follow work as they are printed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(sys.executable).parent


@pytest.fixture
def next_commands(answer, monkeypatch):
    """Write a quickstart into a folder of this name; return the lines that are to be run next."""
    monkeypatch.setenv("PATH", f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}")

    def next_commands(*folder):
        status, found = answer("quickstart", *folder)

        assert status == 0
        return [shlex.split(each["command"]) for each in found["next"]]

    return next_commands


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("folder", [(), ("a first try",)])
def test_the_program_diverges_and_the_profile_makes_it_the_same(next_commands, command, folder):
    """Verified as printed, the program differs without its profile and is the same under it."""
    as_it_is, under_profile, _ = next_commands(*folder)
    statuses = [
        command(*(sys.executable if word == "python" else word for word in words[1:]))[0]
        for words in (as_it_is, under_profile)
    ]

    assert statuses == [1, 0]


@pytest.mark.slow
def test_the_command_to_go_on_with_runs_as_it_is_printed(next_commands):
    """A shell that runs the last of the commands starts the program under the profile."""
    *_, line = next_commands()
    done = subprocess.run(
        ["sh", "-c", shlex.join(line)], capture_output=True, text=True, timeout=300, check=True
    )

    assert done.stdout.startswith("loss after")
    assert "mine" in done.stderr


@pytest.mark.parametrize("name", ["train.py", "conf/repro/mine.yaml"])
def test_nothing_is_overwritten(command, name, tmp_path):
    """Where one of the files exists, quickstart names it, changes it not, and writes no other."""
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("mine\n", encoding="utf-8")
    status, out, err = command("quickstart", tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]

    assert (status, out) == (2, "")
    assert str(place) in err
    assert (files, place.read_text(encoding="utf-8")) == ([place], "mine\n")
