"""Packs as their authors and users have them: installed, changed, published, shared."""

from __future__ import annotations

import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from torchrepro.scaffold import write_pack

from ..docs.blocks import block_named as documented

TEAM = Path(__file__).parents[2] / "examples" / "team"
OF_THE_TEAM = {  # what a team changes in the pack that it was given
    "published.json",
    "src/acme_profiles/fast.yaml",
    "src/acme_profiles/strict.yaml",
}
LEFT_BY_TOOLS = ("__pycache__", ".pytest_cache", ".ruff_cache", "*.egg-info")


def _files(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in files
        if not any(part.match(left) for part in (path, *path.parents) for left in LEFT_BY_TOOLS)
    }


def test_the_pack_of_the_example_is_what_new_pack_writes(tmp_path):
    """But for the team's own values the example is a new pack; write it anew if this fails."""
    written = _files(write_pack(tmp_path / "acme").folder)
    example = _files(TEAM / "acme")

    assert written.keys() == example.keys()
    assert {path for path in written if written[path] != example[path]} == OF_THE_TEAM


@pytest.mark.slow
def test_two_repos_share_one_pack(environment, tmp_path):
    """Trainer and evaluator have one digest, until the pack that both have installed changes."""
    shutil.copytree(TEAM, tmp_path / "team")
    pack, trainer, evaluator = (tmp_path / "team" / n for n in ("acme", "trainer", "evaluator"))
    environment.succeed("pip", "install", "-q", "--no-deps", "-e", pack, cwd=tmp_path)

    environment.succeed("pytest", "-q", "-k", "version", cwd=pack)
    for run in ("run", "again"):
        words = ("python", "train.py", "+repro=acme/strict", f"hydra.run.dir={run}")
        environment.succeed(*words, cwd=trainer)
    one, two = ((trainer / run / "weights.pt").read_bytes() for run in ("run", "again"))
    assert one == two

    said = environment.succeed("python", "evaluate.py", "../trainer/run", cwd=evaluator)
    trained, evaluated, error = (line.split()[1] for line in said.splitlines())
    assert trained == evaluated
    assert 0 < float(error) < 0.2

    profile = pack / "src" / "acme_profiles" / "strict.yaml"
    changed = profile.read_text(encoding="utf-8").replace("seed: 20261120", "seed: 7")
    profile.write_text(changed, encoding="utf-8")
    refused = environment.run("python", "evaluate.py", "../trainer/run", cwd=evaluator)
    assert (refused.returncode, "not the same" in refused.stdout) == (1, True)


BUILD = "import hatchling.build as b; print(b.build_wheel('dist'), b.build_sdist('dist'))"


@pytest.mark.slow
def test_a_change_is_noticed_until_the_version_is_raised(environment, tmp_path):
    """A profile that asks for something else fails the pack's tests, which say what to do.

    A name with a dash is no other's; the wheel has all YAML files, and the sdist all files.
    """
    pack = write_pack(tmp_path / "acme-vision")
    environment.succeed("pip", "install", "-q", "--no-deps", "-e", pack.folder, cwd=tmp_path)
    profile = pack.folder / "src" / pack.module / "strict.yaml"
    project = pack.folder / "pyproject.toml"
    changed = profile.read_text(encoding="utf-8").replace("num_threads: 4", "num_threads: 8")
    profile.write_text(changed, encoding="utf-8")

    noticed = environment.run("pytest", "-q", "-k", "version", cwd=pack.folder)
    assert noticed.returncode == 1
    assert "acme-vision/strict differs from the published version 0.1.0" in noticed.stdout
    assert "python tests/published.py" in noticed.stdout
    assert "1 failed" in noticed.stdout

    too_soon = environment.run("python", "tests/published.py", cwd=pack.folder)
    assert (too_soon.returncode, too_soon.stdout) == (1, "")
    assert "raise the version" in too_soon.stderr

    raised = project.read_text(encoding="utf-8").replace('"0.1.0"', '"0.2.0"')
    project.write_text(raised, encoding="utf-8")
    environment.succeed("python", "tests/published.py", cwd=pack.folder)
    environment.succeed("pytest", "-q", cwd=pack.folder)
    kept = (pack.folder / "published.json").read_text(encoding="utf-8")
    assert '"0.1.0"' in kept
    assert '"0.2.0"' in kept

    wheel, sdist = environment.succeed("python", "-c", BUILD, cwd=pack.folder).split()
    profiles = {path.removeprefix("src/") for path in pack.files if path.endswith(".yaml")}
    with zipfile.ZipFile(pack.folder / "dist" / wheel) as built:
        assert profiles <= set(built.namelist())
    with tarfile.open(pack.folder / "dist" / sdist) as built:
        assert set(pack.files) <= {name.partition("/")[2] for name in built.getnames()}


@pytest.mark.slow
def test_the_five_documented_commands_lead_from_nothing_to_a_run(environment, tmp_path):
    """Each command ends with status 0, and the app is under the profile and the piece."""
    commands = documented("share").text.splitlines()
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(TEAM / "trainer", tmp_path / "trainer")

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
