"""A step of GitHub Actions shows the line of a divergence in the pull request, and a summary."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as some

from torchrepro.cli.github_step import annotation, show_in_step

COMMAND = re.compile(r"(?:^|\r\n?|\n)\s*(?:::|##\[)")
"""What begins a command for the step: https://github.com/actions/runner trims the line."""

hostile = some.text() | some.lists(
    some.sampled_from(["::", "error", "\n", "\r", "%0A", "%", ",", ":", "##[", "`" * 4, "x.py"])
).map("".join)


@given(text=hostile, path=hostile, number=some.integers(1, 99))
def test_no_text_or_name_of_a_file_makes_a_second_command(
    text: str, path: str, number: int
) -> None:
    """Whatever a program is called and prints, the annotation is one command on one line."""
    path = path.replace("\0", "")
    line = annotation(text, f"{path}:{number}")

    assert len(COMMAND.findall(line)) == 1
    assert not {"\n", "\r"} & {*line}
    properties = line.removeprefix("::error ").partition("::")[0]
    assert all(re.fullmatch("(file|line|title)=[^:,]*", one) for one in properties.split(","))


def test_a_file_outside_of_the_repository_is_not_annotated(tmp_path, monkeypatch):
    """Paths are relative to the repository; a library outside has no line in the pull request."""
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "repo"))
    inside, outside = (f"{tmp_path}/{name}/src/a.py:7" for name in ("repo", "other"))

    assert annotation("no", inside) == "::error file=src/a.py,line=7,title=no::no"
    assert annotation("no", outside) == "::error title=no::no"
    assert annotation("no\nmore", "") == "::error title=no::more"


def test_nothing_is_written_outside_of_github(monkeypatch, capsys, tmp_path):
    """Without GITHUB_ACTIONS there is no command and no summary."""
    summary = tmp_path / "summary.md"
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    show_in_step({}, ["not the same"], passed=False)

    assert capsys.readouterr() == ("", "")
    assert not summary.exists()


def test_a_secret_is_hidden(monkeypatch, capsys, tmp_path):
    """The value of a variable that sounds secret is neither annotated nor in the summary."""
    summary = tmp_path / "summary.md"
    secret = "hunter2-and-a-longer-secret"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("MY_API_TOKEN", secret)
    show_in_step({}, [f"not the same: {secret}", "````"], passed=False)
    written = summary.read_text(encoding="utf-8")

    assert secret not in capsys.readouterr().err + written
    assert written.count("`````") == 2


@pytest.mark.slow
def test_a_divergence_is_annotated_at_its_line(tmp_path, clean_environment):
    """A hostile program that differs gives one command at its line, a summary, and one document."""
    name = "::error::x.py"
    (tmp_path / name).write_text(
        "import torch\ntorch.manual_seed(0)\nprint('::warning::loss')\n"
        "x = torch.ones(3) * torch.seed()  # ::error::here\n",
        encoding="utf-8",
    )
    summary = tmp_path / "summary.md"
    verify = ["-m", "torchrepro", "verify", "--no-closer", "--json"]
    done = subprocess.run(
        [sys.executable, *verify, "--", sys.executable, name],
        cwd=tmp_path,
        env={
            **clean_environment,
            "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(tmp_path),
            "GITHUB_STEP_SUMMARY": str(summary),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(done.stderr)

    assert done.returncode == 1
    assert json.loads(done.stdout)["same"] is False
    commands = [line for line in done.stderr.splitlines() if line.lstrip().startswith("::")]
    assert len(commands) == 1
    assert commands[0].startswith("::error file=%3A%3Aerror%3A%3Ax.py,line=4,title=not the same")
    assert summary.read_text(encoding="utf-8").startswith("### torchrepro\n\n```text\nnot the same")
