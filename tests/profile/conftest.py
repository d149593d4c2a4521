"""Profiles written to files, the command line in this process, and a Hydra app of its own."""

from __future__ import annotations

from typing import NamedTuple

import pytest

import torchrepro

APP = """
import hydra

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    print("RAN")

if __name__ == "__main__":
    main()
"""


class Ended(NamedTuple):
    """The exit status and the output of a command."""

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
    """Return the message of the `ProfileError` that loading the text of a profile must raise."""

    def refusal(content, *overrides, name="bad.yaml"):
        with pytest.raises(torchrepro.ProfileError) as caught:
            load_text(content, *overrides, name=name)
        return str(caught.value)

    return refusal


@pytest.fixture
def attempt():
    """Return the value of a call, or the `ProfileError` that it raises; other errors fail."""

    def attempt(function, *arguments, **options):
        try:
            return function(*arguments, **options)
        except torchrepro.ProfileError as error:
            return error

    return attempt


@pytest.fixture
def show(command):
    """Run ``torchrepro show`` with these arguments, in this process."""
    return lambda *arguments: Ended(*command("show", *arguments))


@pytest.fixture
def hydra_app(tmp_path, fork_python):
    """Run a tiny Hydra app, with its own profiles in ``conf/repro``, with these arguments.

    The app prints RAN when its task runs. Its environment has plain variables and PYTHONHASHSEED,
    so that no strict profile relaunches it.
    """
    (tmp_path / "conf" / "repro").mkdir(parents=True, exist_ok=True)
    (tmp_path / "conf" / "config.yaml").write_text("size: 3\n", encoding="utf-8")
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")

    def hydra_app(*arguments, **variables):
        env = {"SECRET": "the secret", "PYTHONHASHSEED": "0", **variables}
        done = fork_python("app.py", *arguments, env=env)
        return Ended(done.returncode, done.stdout, done.stderr)

    return hydra_app
