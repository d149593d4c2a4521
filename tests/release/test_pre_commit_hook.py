"""The hook that repositories of users take from ours: their profiles are valid before a commit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[2]
HOOKS = REPO / ".pre-commit-hooks.yaml"
VALID = "defaults: [debug-strict, _self_]\nname: mine\nseed: 7\n"


def _repository(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    identity = ("-c", "user.name=You", "-c", "user.email=you@example.com")
    for words in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "files")):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.fixture
def run_hook(tmp_path, execute):
    """Run our hook with pre-commit on a repository of these files, as its users do."""
    ours = tmp_path / "ours"
    _repository(ours, {HOOKS.name: HOOKS.read_text(encoding="utf-8")})

    def run_hook(files):
        theirs = tmp_path / "theirs"
        shutil.rmtree(theirs, ignore_errors=True)
        _repository(theirs, files)
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        env = {"PRE_COMMIT_HOME": str(tmp_path / "home"), "HOME": str(tmp_path), "PATH": path}
        words = ("pre_commit", "try-repo", ours, "torchrepro-profiles", "--all-files")
        return execute(sys.executable, "-m", *words, env=env, cwd=theirs)

    return run_hook


@pytest.mark.slow
def test_the_hook_accepts_valid_profiles_and_names_every_wrong_one(run_hook):
    """Profiles and pieces are read; each wrong one is reported with its line and a near match."""
    files = {
        "conf/repro/mine.yaml": VALID,
        "conf/repro/with/quiet layers.yaml": "dropout: zero\n",
        "conf/model.yaml": "depth: 3\n",
    }

    accepted = run_hook(files)
    refused = run_hook(
        files
        | {"conf/repro/a.yaml": VALID.replace("seed", "sed")}
        | {"conf/repro/z.yaml": VALID.replace("7", "seven")}
    )

    assert (accepted.returncode, "Passed" in accepted.stdout) == (0, True), accepted.stdout
    assert refused.returncode == 1
    assert "conf/repro/a.yaml:3: sed = 7: unknown key" in refused.stdout
    assert "did you mean: seed" in refused.stdout
    assert "conf/repro/z.yaml:3: seed = seven: not a whole number" in refused.stdout
    assert "mine.yaml" not in refused.stdout


@pytest.mark.parametrize(
    ("name", "is_profile"),
    [
        ("conf/repro/mine.yaml", True),
        ("repro/mine.yaml", True),
        ("conf/repro/with/piece.yaml", True),
        ("conf/model.yaml", False),
        ("reproduce/a.yaml", False),
    ],
)
def test_the_hook_reads_the_config_group_of_profiles(name, is_profile):
    """Files in a folder `repro` are profiles, as in a Hydra app; other YAML files are not read."""
    [hook] = yaml.safe_load(HOOKS.read_text(encoding="utf-8"))

    assert hook["types"] == ["yaml"]
    assert bool(re.search(hook["files"], name)) == is_profile
