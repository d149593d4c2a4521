"""The commands that record, compare and verify, as a shell sees them."""

import json
import sys

import pytest

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
def record(write, fork_under):
    """Record the program under a plain profile into a folder."""
    write({"plain.yaml": PROFILE, "train.py": PROGRAM})

    def record(folder, *words, options=()):
        return fork_under(["./plain.yaml", "--record", folder, *options], "train.py", *words)

    return record


@pytest.fixture
def browser(tmp_path):
    """A browser: a program that writes the address that it should show to a file."""
    path = tmp_path / "browser"
    path.write_text('#!/bin/sh\nprintf "%s" "$1" > shown\n', encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_two_recorded_runs_compare(torchrepro, command, answer, record, browser, tmp_path):
    """The same run twice is the same with status 0; another one differs with status 1.

    The page is opened in a browser if there is one; otherwise its path is printed.
    """
    for folder, words in (("a", ()), ("b", ()), ("c", ("fault",))):
        done = record(folder, *words)
        assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr

    status, out, err = command("compare", tmp_path / "a", tmp_path / "b")
    assert (status, err) == (0, "")
    assert out.startswith("the same: 3 steps, ")
    status, verdict = answer("compare", tmp_path / "a", tmp_path / "c")
    assert (status, verdict["same"]) == (1, False)
    first = verdict["first"]
    found = {key: first[key] for key in ("rank", "step", "phase", "module", "op")}
    assert found == {"rank": 0, "step": 1, "phase": "forward", "module": "", "op": "aten::neg"}
    assert first["source"].endswith("train.py:9")
    page = tmp_path / "verdict.html"
    named = torchrepro(
        "compare", "a", "c", "--report", page.name, "--open", env={"BROWSER": f"{browser} %s"}
    )
    assert (named.returncode, named.stderr) == (1, f"torchrepro: the page is in {page.name}\n")
    assert (tmp_path / "shown").read_text(encoding="utf-8") == page.as_uri()
    nowhere = torchrepro(
        "compare", "a", "c", "--open", env={"PATH": "", "TMPDIR": str(tmp_path), "DISPLAY": ""}
    )
    (written,) = tmp_path.glob("torchrepro-*.html")
    assert nowhere.returncode == 1
    assert f"the page is in {written}\n" in nowhere.stderr
    assert "no browser" in nowhere.stderr


@pytest.mark.slow
def test_verify_runs_and_compares(torchrepro, record, browser, tmp_path):
    """Standard output of `verify` has only its answer, without the output of the program."""
    words = ("./plain.yaml", "--json", "--open", "--", sys.executable, "train.py")
    done = torchrepro("verify", *words, env={"BROWSER": f"{browser} %s", "TMPDIR": str(tmp_path)})
    (page,) = tmp_path.glob("torchrepro-*.html")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["same"] is True
    assert "run 2 of 2" in done.stderr
    assert "\b" not in done.stderr  # nothing is erased where nobody watches
    assert (tmp_path / "shown").read_text(encoding="utf-8") == page.as_uri()


@pytest.mark.slow
def test_recording_needs_no_profile_in_the_program(record, command, tmp_path):
    """An unchanged program is recorded at another level, and equal runs compare as the same."""
    for side in ("a", "b"):
        assert record(side, options=("--level", "module")).returncode == 0
    assert command("compare", tmp_path / "a", tmp_path / "b")[0] == 0
