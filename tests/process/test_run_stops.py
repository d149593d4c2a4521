"""What `torchrepro run` refuses to start, and whose variables it keeps."""

import json
import random
import sys
from pathlib import Path

import pytest

import torchrepro as repro

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        *(([], options) for options in (["-I"], ["-E"], ["-S"], ["-uBE"], ["-W", "ignore", "-BI"])),
        *((["env", *more], ["-S"]) for more in ([], ["A=b"])),
        *((wrapper, ["-S"]) for wrapper in (["timeout", "60"], ["nice", "-n", "5"])),
        (["env", "-i"], []),
    ],
)
@pytest.mark.usefixtures("clean_process")
def test_a_python_that_ignores_our_variables_is_not_started(command, wrapper, options):
    """Options of Python that keep a profile out, behind a wrapper too, and wrappers that drop our
    variables end with status 3 before the command starts.
    """
    words = [*wrapper, sys.executable, *options, "-c", "print('started')"]
    status, out, err = command("run", "seed-only", "--", *words)

    assert (status, out) == (3, "")
    assert not options or f"-{options[-1][-1]}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("option", ["-I", "-sE"])
@pytest.mark.usefixtures("clean_process")
def test_an_isolated_console_script_is_not_started(tmp_path, script, command, option):
    """A script is not started, with status 3, if its shebang isolates Python from the profile."""
    tool = script(f"#!{sys.executable} {option}")

    assert command("run", "seed-only", "--", tool)[0] == 3
    assert command("run", "seed-only", "--", "env", tool)[0] == 3
    assert not (tmp_path / "started").exists()


@pytest.mark.usefixtures("clean_process")
def test_a_python_without_torchrepro_is_not_started(bare, tmp_path, script, command):
    """A command whose Python has no torchrepro ends with status 3 before it starts."""
    tool = script(f"#!{bare}")
    for words in ([bare, tool], [tool], ["timeout", "60", tool], [bare, "-m", "tool"]):
        status, out, err = command("run", "seed-only", "--", *words)

        assert (status, out) == (3, ""), words
        assert str(bare) in err
    assert not (tmp_path / "started").exists()


def test_a_python_of_another_environment_with_torchrepro_is_started(bare, script, torchrepro):
    """A Python of another virtual environment is started if torchrepro can be imported there."""
    source = Path(repro.__file__).parents[1]
    result = torchrepro("run", "seed-only", "--", script(f"#!{bare}"), env={"PYTHONPATH": source})

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[0] == random.Random(1234).random()


def test_a_file_that_cannot_be_started_is_reported(write, torchrepro, tmp_path):
    """A file that the system cannot start ends with status 2 and one message."""
    write({"no-shebang": "\0 nothing to run\n"}).chmod(0o755)
    result = torchrepro("run", "seed-only", "--", tmp_path / "no-shebang")

    assert (result.returncode, result.stdout) == (2, "")
    assert "no-shebang" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [["timeout", "300", "echo"], ["nice", "echo"], ["env", "echo"]])
def test_a_wrapped_command_other_than_python_is_started(torchrepro, words):
    """Words that only look like an isolated Python stop no command."""
    done = torchrepro("run", "seed-only", "--", *words, "python", "-E")

    assert (done.returncode, done.stdout) == (0, "python -E\n")


def test_a_damaged_profile_stops_the_process(run_python):
    """A process whose inherited profile cannot be read ends with 3 and without a traceback."""
    code = """from torchrepro.start.bootstrap import apply_on_import
apply_on_import()
import torch
print('on')
"""
    done = run_python("-c", code, env={"TORCHREPRO_PROFILE": "{bad"})

    assert (done.returncode, done.stdout) == (3, "")
    assert "TORCHREPRO_PROFILE" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("clean_process")
def test_a_contradicting_variable_stops_a_strict_profile(command, monkeypatch):
    """A strict profile names the exported value that contradicts it and starts nothing."""
    monkeypatch.setenv(CUBLAS, ":0:0")
    status, out, err = command("run", "debug-strict", "--", "echo", "started")

    assert (status, out) == (3, "")
    assert CUBLAS in err
    assert ":0:0" in err


OVERRIDDEN = ("train-fast", f'env.{CUBLAS}=":4096:8"')


@pytest.mark.parametrize(
    ("profile", "exported", "kept"),
    [
        (OVERRIDDEN, {}, {CUBLAS: ":4096:8"}),
        (OVERRIDDEN, {CUBLAS: ":0:0"}, {CUBLAS: ":0:0"}),  # nothing strict is promised
        (["debug-strict"], both := {CUBLAS: ":16:8", "PYTHONHASHSEED": "42"}, both),  # as good
    ],
)
def test_an_exported_variable_is_kept(torchrepro, profile, exported, kept):
    """A profile that is not strict keeps any value; a strict one keeps equivalent values."""
    result = torchrepro("run", *profile, "--", "printenv", *kept, env=exported)

    assert (result.returncode, result.stdout.split()) == (0, [*kept.values()])
