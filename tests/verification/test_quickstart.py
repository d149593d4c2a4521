"""A reader's first program and profile: the printed commands work as printed."""

from __future__ import annotations

import shlex
import sys

import pytest


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_program_diverges_and_the_profile_makes_it_the_same(answer, command):
    """With the printed commands, the program differs without its profile and agrees with it."""
    status, verification = answer("quickstart", "a first try")
    as_it_is, under_profile, _ = (shlex.split(each["command"]) for each in verification["next"])
    statuses = [
        command(*(sys.executable if word == "python" else word for word in words[1:]))[0]
        for words in (as_it_is, under_profile)
    ]

    assert (status, statuses) == (0, [1, 0])


@pytest.mark.parametrize("name", ["train.py", "conf/repro/mine.yaml"])
def test_quickstart_overwrites_no_file(command, name, tmp_path):
    """If one of the files exists, quickstart names it, keeps it, and writes no other."""
    place = tmp_path / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("mine\n", encoding="utf-8")
    status, out, err = command("quickstart", tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]

    assert (status, out) == (2, "")
    assert str(place) in err
    assert (files, place.read_text(encoding="utf-8")) == ([place], "mine\n")
