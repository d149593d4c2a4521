"""The five documented commands that share profiles, typed by somebody with an empty folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ..docs.blocks import block_named as documented

REPO = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_five_documented_commands_lead_from_nothing_to_a_run(environment, tmp_path) -> None:
    """Each command ends with status 0, and the app is under the profile and the piece."""
    commands = documented("share").text.splitlines()
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(REPO / "examples" / "team" / "trainer", tmp_path / "trainer")

    said = [environment.succeed("sh", "-euc", command, cwd=empty) for command in commands]

    assert len(commands) == 5
    assert "src/acme_profiles/strict.yaml" in said[0]
    assert re.search(r" \d+ passed", said[2])
    assert "acme-profiles" in said[3]
    assert said[4].startswith("weights ")
    [manifest] = (tmp_path / "trainer").rglob("repro.json")
    text = manifest.read_text(encoding="utf-8")
    assert "acme-profiles:strict.yaml:" in text
    assert "acme-profiles:with/math-attention.yaml:" in text
