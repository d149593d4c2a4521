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
def test_a_python_that_would_not_listen_is_not_started(torchrepro, wrapper, options):
    """Options of Python that keep a profile out, behind a wrapper too, and wrappers that drop our
    variables end with status 3 before the command starts.
    """
    command = [*wrapper, sys.executable, *options, "-c", "print('started')"]
    result = torchrepro("run", "seed-only", "--", *command)

    assert (result.returncode, result.stdout) == (3, "")
    assert not options or f"-{options[-1][-1]}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", ["-I", "-sE"])
def test_an_isolated_console_script_is_not_started(tmp_path, script, torchrepro, option):
    """A script whose first line keeps a profile out ends with status 3 before it starts."""
    tool = script(f"#!{sys.executable} {option}")
    by_path = torchrepro("run", "seed-only", "--", tool)
    by_wrapper = torchrepro("run", "seed-only", "--", "env", tool)

    assert (by_path.returncode, by_wrapper.returncode) == (3, 3)
    assert not (tmp_path / "started").exists()


def test_a_python_without_torchrepro_is_not_started(bare, tmp_path, script, torchrepro):
    """A command whose Python has no torchrepro ends with status 3 before it starts."""
    tool = script(f"#!{bare}")
    for command in ([bare, tool], [tool], ["timeout", "60", tool], [bare, "-m", "tool"]):
        result = torchrepro("run", "seed-only", "--", *command)

        assert (result.returncode, result.stdout) == (3, ""), command
        assert str(bare) in result.stderr
    assert not (tmp_path / "started").exists()


def test_a_python_elsewhere_that_has_torchrepro_is_started(bare, script, torchrepro):
    """A Python of another virtual environment is started if torchrepro can be imported there."""
    source = Path(repro.__file__).parents[1]
    result = torchrepro("run", "seed-only", "--", script(f"#!{bare}"), env={"PYTHONPATH": source})

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)[0] == random.Random(1234).random()


def test_a_file_that_cannot_be_started_is_told(write, torchrepro, tmp_path):
    """A file that the system cannot start ends with status 2 and one message."""
    write({"no-shebang": "\0 nothing to run\n"}).chmod(0o755)
    result = torchrepro("run", "seed-only", "--", tmp_path / "no-shebang")

    assert (result.returncode, result.stdout) == (2, "")
    assert "no-shebang" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("words", [["timeout", "300", "echo"], ["nice", "echo"], ["env", "echo"]])
def test_a_wrapped_command_that_is_no_python_is_started(torchrepro, words):
    """Words that only look like an isolated Python stop no command."""
    done = torchrepro("run", "seed-only", "--", *words, "python", "-E")

    assert (done.returncode, done.stdout) == (0, "python -E\n")


def test_a_damaged_profile_stops_the_process(run_python):
    """A process whose inherited profile cannot be read ends with 3 and without a traceback."""
    code = "import torchrepro.bootstrap as b; b.put_in_force_on_import(); import torch; print('on')"
    done = run_python("-c", code, env={"TORCHREPRO_PROFILE": "{bad"})

    assert (done.returncode, done.stdout) == (3, "")
    assert "TORCHREPRO_PROFILE" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_contradicting_variable_stops_a_strict_profile(torchrepro):
    """A strict profile names the exported value that contradicts it and starts nothing."""
    result = torchrepro("run", "debug-strict", "--", "echo", "started", env={CUBLAS: ":0:0"})

    assert (result.returncode, result.stdout) == (3, "")
    assert CUBLAS in result.stderr
    assert ":0:0" in result.stderr


OVERRIDDEN = ("train-fast", f'env.{CUBLAS}=":4096:8"')


@pytest.mark.parametrize(
    ("profile", "exported", "kept"),
    [
        (OVERRIDDEN, {}, {CUBLAS: ":4096:8"}),
        (OVERRIDDEN, {CUBLAS: ":0:0"}, {CUBLAS: ":0:0"}),  # nothing strict is promised
        (["debug-strict"], both := {CUBLAS: ":16:8", "PYTHONHASHSEED": "42"}, both),  # as good
    ],
)
def test_a_variable_of_the_users_own_is_kept(torchrepro, profile, exported, kept):
    """A profile that is not strict keeps any value, a strict one what serves it as well."""
    result = torchrepro("run", *profile, "--", "printenv", *kept, env=exported)

    assert (result.returncode, result.stdout.split()) == (0, [*kept.values()])
