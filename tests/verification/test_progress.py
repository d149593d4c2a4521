"""A command reports its progress while it works, and its answer contains none of it."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from torchrepro.cli import main
from torchrepro.trace.reader import steps_so_far
from torchrepro.verification import runner

STEPS = 40
WAITING = f"""
import os, time, torch
os.path.exists("seen") and os.remove("seen")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({STEPS}):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    while step == {STEPS // 2} and not os.path.exists("seen"):
        time.sleep(0.01)
"""
"""A program that waits until its progress was read."""


def on_a_terminal(words, monkeypatch):
    """Run a command with standard error on a terminal; return its status and what that showed.

    A thread reads it, because a terminal holds a few kilobytes and then makes the writer wait.
    """
    ours, theirs = os.openpty()
    shown = []

    def read():
        with suppress(OSError):  # the other end was closed
            while some := os.read(ours, 4096):
                shown.append(some)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        with pytest.raises(SystemExit) as ended:
            main(words)
    reader.join(300)
    os.close(ours)
    return ended.value.code or 0, b"".join(shown).decode()


def left_on_screen(written):
    """What a terminal shows in the end: a backspace goes back, and what follows overwrites."""
    screen = []
    for line in written.replace("\r", "").split("\n"):
        cells, at = [], 0
        for letter in line:
            if letter == "\b":
                at -= 1
            else:
                cells[at : at + 1] = [letter]
                at += 1
        screen.append("".join(cells).rstrip())
    return "\n".join(screen).strip()


def test_verify_reports_the_number_of_ended_steps(monkeypatch, plain, capsys):
    """A terminal shows the count while a run goes on, and it is erased when the run ends."""

    def look(folder):
        verification = steps_so_far(folder)
        if verification:
            Path("seen").touch()
        return verification

    monkeypatch.setattr(runner, "steps_so_far", look)
    monkeypatch.setattr(runner, "BETWEEN_LOOKS", 0.02)
    Path("waiting.py").write_text(WAITING, encoding="utf-8")
    words = ["verify", plain, "--json", "--", sys.executable, "waiting.py"]
    status, written = on_a_terminal(words, monkeypatch)
    runs = [
        [int(number) for number in re.findall(r" (\d+) steps? so far", each)]
        for each in written.split("of 2 ...")[1:]
    ]

    assert (status, json.loads(capsys.readouterr().out)["same"]) == (0, True)
    assert len(runs) == 2
    for seen in runs:
        assert seen == sorted(seen)
        assert 0 < seen[0] < STEPS
        assert seen[-1] <= STEPS
    assert re.fullmatch(
        rf"(run \d of 2 \.\.\. [\d.]+ s, {STEPS} steps\n?){{2}}", left_on_screen(written)
    )


@pytest.mark.parametrize("words", [("plan", "debug-strict"), ("doctor", "seed-only", "--json")])
def test_a_command_reports_that_it_imports_torch(words, capsys, monkeypatch):
    """A terminal shows it during the import, and it is erased afterwards."""
    status, written = on_a_terminal(words, monkeypatch)

    assert (status, "importing torch ..." in written) == (0, True)
    assert left_on_screen(written) == ""
    assert "importing" not in capsys.readouterr().out


@pytest.mark.usefixtures("forked")
def test_without_a_terminal_no_trace_of_a_running_program_is_read(
    monkeypatch, plain, training, capsys
):
    """No trace is opened while its run goes on, and nothing is erased."""
    opened = []
    monkeypatch.setattr(runner, "steps_so_far", opened.append)
    monkeypatch.setattr(runner, "BETWEEN_LOOKS", 0.01)
    with pytest.raises(SystemExit) as ended:
        main(["verify", plain, "--", *training()])
    err = capsys.readouterr().err

    assert not ended.value.code
    assert opened == []
    assert len(re.findall(r"run \d of 2 \.\.\. [\d.]+ s, 3 steps\n", err)) == 2
    assert "\b" not in err
