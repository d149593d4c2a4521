"""Profiles written to files, the command line in this process, and a Hydra app of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

import torchrepro
from torchrepro.cli import main

TIMEOUT = 600
_FOREIGN = ("TORCHREPRO_", "PYTEST_", "HYDRA_", "COV_")
APP = """
import hydra

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    print("RAN")

if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it said."""

    status: int
    out: str
    err: str


@pytest.fixture
def write(tmp_path):
    """Write a profile, text or bytes, to a file below `tmp_path` and return its path."""

    def write(content, name="bad.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def load_text(write):
    """Load the text of a profile from a file."""

    def load_text(content, *overrides, name="bad.yaml"):
        return torchrepro.load(str(write(content, name)), overrides=list(overrides))

    return load_text


@pytest.fixture
def refusal(load_text):
    """Return what the `ProfileError` says that loading the text of a profile must raise."""

    def refusal(content, *overrides, name="bad.yaml"):
        with pytest.raises(torchrepro.ProfileError) as caught:
            load_text(content, *overrides, name=name)
        return str(caught.value)

    return refusal


@pytest.fixture
def attempt():
    """Return what a call returns or the `ProfileError` that it raises; nothing else may come."""

    def attempt(function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except torchrepro.ProfileError as error:
            return error

    return attempt


@pytest.fixture
def show(capsys):
    """Run ``torchrepro show`` with these arguments, in this process."""

    def show(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(["show", *(str(argument) for argument in arguments)])
        said = capsys.readouterr()
        return Ended(int(left.value.code or 0), said.out, said.err)

    return show


@pytest.fixture
def hydra_app(tmp_path):
    """Run a tiny Hydra app, whose own profiles are in ``conf/repro``, with these arguments.

    The app prints RAN when its task runs; it is started from an environment of plain variables.
    """
    (tmp_path / "conf" / "repro").mkdir(parents=True, exist_ok=True)
    (tmp_path / "conf" / "config.yaml").write_text("size: 3\n", encoding="utf-8")
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}

    def hydra_app(*arguments, **variables):
        done = subprocess.run(
            [sys.executable, "app.py", *arguments],
            cwd=tmp_path,
            env={**environment, "SECRET": "the secret", **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return hydra_app
