"""The commands that record, compare and verify, as a shell sees them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from .conftest import CONSOLE_SCRIPT, TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Ended = subprocess.CompletedProcess[str]
PROFILE = "schema: 1\nname: plain\nguarantee: repeatable\nseed: 1\n"
PROGRAM = """
import sys, torch
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    x = torch.ones(2, 3)
    if "fault" in sys.argv and step == 1:
        x = -x
    net(x).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds a program and a plain profile."""
    (tmp_path / "plain.yaml").write_text(PROFILE, encoding="utf-8")
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    return tmp_path


@pytest.fixture
def run(folder: Path, clean_environment: dict[str, str]) -> Callable[..., Ended]:
    """Run the console script in that folder."""

    def start(*words: str, **variables: str) -> Ended:
        return subprocess.run(
            [CONSOLE_SCRIPT, *words],
            cwd=folder,
            env={**clean_environment, **variables},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    return start


@pytest.fixture
def record(run: Callable[..., Ended]) -> Callable[..., Ended]:
    """Record the program into a folder."""

    def start(folder: str, *words: str, options: tuple[str, ...] = ()) -> Ended:
        command = ["--", sys.executable, "train.py", *words]
        return run("run", "./plain.yaml", "--record", folder, *options, *command)

    return start


@pytest.fixture
def browser(tmp_path: Path) -> Path:
    """A browser: a program that notes the address that it is to show."""
    path = tmp_path / "browser"
    path.write_text('#!/bin/sh\nprintf "%s" "$1" > shown\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def test_two_recorded_runs_compare(
    run: Callable[..., Ended], record: Callable[..., Ended], browser: Path, tmp_path: Path
) -> None:
    """The same run twice is the same with status 0; another one differs with status 1.

    The page is shown where there is a browser, and otherwise it is said where it is.
    """
    for folder, words in (("a", ()), ("b", ()), ("c", ("fault",))):
        done = record(folder, *words)
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr

    same = run("compare", "a", "b")
    assert (same.returncode, same.stderr) == (0, "")
    assert same.stdout.startswith("the same: 3 steps, ")
    differs = run("compare", "a", "c", "--json", "--report", "verdict.html")
    assert differs.returncode == 1
    answer = json.loads(differs.stdout)
    assert answer["same"] is False
    first = answer["first"]
    found = {key: first[key] for key in ("rank", "step", "phase", "module", "op")}
    assert found == {"rank": 0, "step": 1, "phase": "forward", "module": "", "op": "aten::neg"}
    assert first["source"].endswith("train.py:9")
    page = tmp_path / "verdict.html"
    named = run("compare", "a", "c", "--report", page.name, "--open", BROWSER=f"{browser} %s")
    assert (named.returncode, named.stderr) == (1, f"torchrepro: the page is in {page.name}\n")
    assert (tmp_path / "shown").read_text(encoding="utf-8") == page.as_uri()
    nowhere = run("compare", "a", "c", "--open", PATH="", TMPDIR=str(tmp_path), DISPLAY="")
    (written,) = tmp_path.glob("torchrepro-*.html")
    assert nowhere.returncode == 1
    assert f"the page is in {written}\n" in nowhere.stderr
    assert "no browser" in nowhere.stderr


def test_verify_runs_and_compares(run: Callable[..., Ended], browser: Path, tmp_path: Path) -> None:
    """`verify` answers on standard output alone, and what the program says is not in it."""
    words = ("./plain.yaml", "--json", "--open", "--", sys.executable, "train.py")
    done = run("verify", *words, BROWSER=f"{browser} %s", TMPDIR=str(tmp_path))
    (page,) = tmp_path.glob("torchrepro-*.html")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["same"] is True
    assert "run 2 of 2" in done.stderr
    assert (tmp_path / "shown").read_text(encoding="utf-8") == page.as_uri()


def test_verify_without_a_profile_says_what_it_certifies(
    run: Callable[..., Ended], tmp_path: Path
) -> None:
    """`verify -- COMMAND` runs the command as it is; numbers that differ are exit status 1."""
    train = "import torch; torch.{}; torch.rand(3).sum(); import torchrepro; torchrepro.end_step()"
    for call, status in (("manual_seed(1)", 0), ("seed()", 1)):
        (tmp_path / "draw.py").write_text(train.format(call), encoding="utf-8")
        done = run("verify", "--no-closer", "--json", "--", sys.executable, "draw.py")
        answer = json.loads(done.stdout)

        assert done.returncode == status, done.stderr
        assert (answer["same"], answer["profile"]) == (status == 0, None)
        assert answer["certifies"] == f"{sys.executable} draw.py"


WRONG = {
    "a folder that is not there": (("compare", "nowhere", "nowhere"), "no such folder"),
    "a folder without a trace": (("compare", ".", "."), "holds no trace"),
    "a file": (("compare", "train.py", "train.py"), "is a file"),
    "an occupied folder": (
        ("run", "./plain.yaml", "--record", ".", "--", "true"),
        "a recording goes into a new or empty folder",
    ),
    "no steps": (
        ("run", "./plain.yaml", "--record", "x", "--steps", "a:b", "--", "true"),
        "legal: 7 or 5:8",
    ),
    "steps the wrong way round": (
        ("run", "./plain.yaml", "--record", "x", "--steps", "8:5", "--", "true"),
        "--steps = 8:5: names no steps",
    ),
    "none of the steps in full": (
        ("run", "./plain.yaml", "--record", "x", "--every", "0", "--", "true"),
        "--every = 0: not a whole number from 1 on",
    ),
    "no number of steps": (
        ("run", "./plain.yaml", "--record", "x", "--every", "x", "--", "true"),
        "--every = 'x': not a whole number from 1 on",
    ),
    "no size": (
        ("run", "./plain.yaml", "--record", "x", "--max-size", "lots", "--", "true"),
        "--max-size = lots: not a size",
    ),
    "a size for no trace": (
        ("run", "./plain.yaml", "--record", "x", "--max-size", "10", "--", "true"),
        "did you mean: 10MB",
    ),
    "every, and nothing recorded": (
        ("run", "./plain.yaml", "--every", "5", "--", "true"),
        "torchrepro: --every: nothing is recorded",
    ),
    "no command to record": (("run", "./plain.yaml", "--record", "x"), "write it after `--`"),
    "no command to verify": (("verify", "./plain.yaml"), "torchrepro verify ./plain.yaml -- "),
    "nothing to verify": (("verify",), "torchrepro verify -- "),
    "an override alone": (("verify", "seed=7", "--", "true"), "an override without a profile"),
    "an unknown profile": (("verify", "debug-strickt", "--", "true"), "did you mean"),
    "a command that is not there": (("verify", "./plain.yaml", "--", "no-such"), "no such command"),
    "a command that computes nothing": (("verify", "./plain.yaml", "--", "true"), "recorded"),
    "a command that fails": (("verify", "./plain.yaml", "--", "false"), "status 1"),
}


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_told_without_a_traceback(
    folder: Path,
    command: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """What is wrong with a request is said on standard error, with status 2."""
    words, said = WRONG[what]
    monkeypatch.chdir(folder)
    status, out, err = command(*words)

    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_recording_needs_no_profile_in_the_program(
    record: Callable[..., Ended], run: Callable[..., Ended]
) -> None:
    """Every level is recorded of an unchanged program, and equal runs compare at each."""
    for level in ("step", "module"):
        for side in ("a", "b"):
            assert record(f"{level}-{side}", options=("--level", level)).returncode == 0
        assert run("compare", f"{level}-a", f"{level}-b").returncode == 0
