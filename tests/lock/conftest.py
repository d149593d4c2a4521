"""Commands in this process, locks, and the folders of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrepro.knobs.variables import RECORDED
from torchrepro.manifest.contents import seal_of
from torchrepro.profile.resolved import ResolvedProfile
from torchrepro.verification import runner

from ..verification.repositories import commit, write
from .training import FILES, Training

APP = """
import hydra, torch

@hydra.main(version_base=None, config_path=None)
def main(config):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
SCRIPT = str(Path(sys.executable).with_name("torchrepro"))


@pytest.fixture(autouse=True)
def _clean(clean_process):
    """No lock of these tests depends on what their reader has exported."""


@pytest.fixture
def lock(command, tmp_path):
    """A lock of debug-strict with seed 7, in a file of its own."""
    path = tmp_path / "repro.lock"
    status, _, err = command("lock", "debug-strict", "seed=7", "-o", path)

    assert (status, err) == (0, "")
    return path


@pytest.fixture
def edit():
    """Change values in the file of a lock or a manifest: ``edit(path, {"profile/seed": 3})``.

    The digest and the seal are those afterwards, as if all of that had been locked.
    """

    def edit(path, changes):
        contents = json.loads(path.read_text(encoding="utf-8"))
        for key, value in changes.items():
            *sections, last = key.split("/")
            inner = contents
            for section in sections:
                inner = inner[section]
            inner[last] = value
        contents["digest"] = ResolvedProfile.of(contents["profile"]).digest
        contents["seal"] = seal_of(contents)
        path.write_text(json.dumps(contents), encoding="utf-8")

    return edit


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """The folder of a Hydra job that was recorded, which holds ``out`` and ``recorded``."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "app.py").write_text(APP, encoding="utf-8")
    done = subprocess.run(
        [
            *(SCRIPT, "run", "debug-strict", "seed=7", "--record", "recorded", "--"),
            *(sys.executable, "app.py", "+repro=debug-strict", "repro.seed=7"),
            "hydra.run.dir=out",
        ],
        cwd=folder,
        env={name: its for name, its in os.environ.items() if name not in RECORDED},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def forked(fork, fork_with_other_kernels, monkeypatch):
    """Run the commands whose numbers are locked in forks of a Python that has torch."""

    def run(program, command, environment, log, limit, look):
        assert os.path.abspath(command[0]) == sys.executable  # noqa: PTH100 - links stay
        log.write_bytes(b"")
        other = environment.get("ATEN_CPU_CAPABILITY") == "default"
        server = fork_with_other_kernels if other else fork
        return server(command[1:], environment, Path.cwd(), (os.devnull, log, log))

    monkeypatch.setattr(runner, "run_to_end", run)


@pytest.fixture
def training(forked, command, tmp_path, monkeypatch):
    """A training program in a repository of its own, which uses a library outside of it."""
    folder = tmp_path / "work"
    write(tmp_path, {"library/acme.py": "SCALE = 1.0\n", "other/acme.py": "SCALE = 1.5\n"})
    commit(folder, FILES)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    monkeypatch.setenv("TORCHREPRO_QUIET", "1")
    return Training(folder, command)
