"""The example of two repos that share one pack."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from torchrepro.scaffold import write_pack

TEAM = Path(__file__).parents[2] / "examples" / "team"
OF_THE_TEAM = {  # what a team changes in the pack that it was given
    "published.json",
    "src/acme_profiles/fast.yaml",
    "src/acme_profiles/strict.yaml",
}
OLDER = {"profile.schema.json"}  # what it was when the example was written
LEFT_BY_TOOLS = ("__pycache__", ".pytest_cache", ".ruff_cache", "*.egg-info")


def _files(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
        for path in files
        if not any(part.match(left) for part in (path, *path.parents) for left in LEFT_BY_TOOLS)
    }


def test_the_pack_of_the_example_is_what_new_pack_writes(tmp_path: Path) -> None:
    """But for the team's own values the example is a new pack; write it anew if this fails."""
    written = _files(write_pack(tmp_path / "acme").folder)
    example = _files(TEAM / "acme")

    assert written.keys() == example.keys()
    assert {path for path in written if written[path] != example[path]} - OLDER == OF_THE_TEAM


@pytest.mark.slow
def test_two_repos_share_one_pack(environment, tmp_path: Path) -> None:
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
