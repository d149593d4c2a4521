"""The demo needs nothing, names the line, and shows that the profile makes the program repeat."""

from __future__ import annotations

import time

import pytest

from torchrepro.cli.demo_commands import ELSEWHERE, NEXT, commands_for

SECONDS = 30
"""How long the demo may take on two idle cores."""


def _lines(demo):
    """Return the line of the first divergence of both answers, or None."""
    firsts = [each["answer"]["first"] for each in demo["verified"]]
    return [first and first["source"] for first in firsts]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_answer_follows_the_program(answer, tmp_path, monkeypatch):
    """Another fault in a program that was kept is named by its line and cause."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # `python` is another one: the demo names this one
    began = time.monotonic()
    status, first = answer("demo", "--keep", "kept")
    print(f"\nthe demo took {time.monotonic() - began:.0f} s (at most {SECONDS} on idle cores)")
    program = tmp_path / "kept" / "train.py"
    lines = program.read_text(encoding="utf-8").splitlines()
    number = next(at for at, line in enumerate(lines, 1) if line.startswith("labels ="))
    lines[number - 1] += "; import time; labels = labels * (time.time() % 1)"
    program.write_text("\n".join(["", "import torch", "torch.manual_seed(0)", *lines]) + "\n")
    _, second = answer("demo", "--keep", "kept")

    assert status == 0
    assert _lines(first)[0].endswith("train.py:7")
    assert _lines(first)[1] is None
    assert all(line.endswith(f"train.py:{number + 3}") for line in _lines(second))
    assert "clock" in second["verified"][0]["answer"]["advice"]["cause"].lower()


@pytest.mark.parametrize("missing", ["train.py", "conf/repro/mine.yaml"])
def test_half_of_a_demo_is_refused(command, tmp_path, missing):
    """A folder with one of the two files is refused, and stays as it is."""
    command("quickstart", tmp_path)
    (tmp_path / missing).unlink()
    before = sorted(tmp_path.rglob("*"))
    status, out, err = command("demo", "--keep", tmp_path)

    assert (status, out) == (2, "")
    assert f"no {missing}" in err
    assert sorted(tmp_path.rglob("*")) == before


def _named(rows, name):
    return [(line.format(name), purpose) for line, purpose in rows]


def test_the_next_commands_are_of_the_folder(tmp_path):
    """A Hydra app gets an override, and another program of torch is verified."""
    (hydra, for_hydra), (_, for_torch) = NEXT
    assert "hydra" in hydra
    assert commands_for(tmp_path) == ELSEWHERE

    (tmp_path / "test_it.py").write_text("import torch\n")
    (tmp_path / "notes.py").write_text('"""Without: it says import torch."""\n')
    assert commands_for(tmp_path) == ELSEWHERE

    (tmp_path / "a b.py").write_text("from torch import nn\n")
    assert commands_for(tmp_path) == _named(for_torch, "'a b.py'")

    (tmp_path / "train.py").write_text("import torch\n")
    assert commands_for(tmp_path) == _named(for_torch, "train.py")

    (tmp_path / "app.py").write_text("import hydra\n@hydra.main(version_base=None)\n")
    assert commands_for(tmp_path) == _named(for_hydra, "app.py")
