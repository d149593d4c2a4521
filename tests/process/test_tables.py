"""What commands print at every width: no column is lost, and no line number."""

import fcntl
import json
import os
import pty
import re
import struct
import termios
import threading
from contextlib import contextmanager, suppress

import pytest

from torchrepro.ground.errors import shortened, shown

TEAM = "defaults: [{}, _self_]\ndropout: zero\ndescription: {}\n"
TRAIN = "import torch, torchrepro\ndef train(x):\n    y = x * x\n    torchrepro.end_step()\n"
PROGRAM = """
import json, os, sys
from torchrepro.cli import main
for name, words in json.loads(open("commands.json").read()).items():
    for form in ([], ["--json"]):
        print(f"\\0{name}{''.join(form)}\\0", flush=True)
        try:
            main([*words, *form])
        except SystemExit:
            pass
        sys.stdout.flush()
"""
RECORDING = """
import sys, torch, torchrepro
sys.path[:0] = [sys.argv[1]]
import train
for number in (1, 2):
    with torchrepro.record(f"run-{number}"):
        train.train(torch.ones(2) * number)
"""

COMMANDS = {
    "list": ("list",),
    "show": ("show", "{team}", "--origin"),
    "plan": ("plan", "{team}"),
    "diff": ("diff", "{team}", "{other}"),
    "check": ("check", "team.lock"),
    "doctor": ("doctor", "{team}"),
    "explain": ("explain", "backends.cudnn.benchmark"),
    "compare": ("compare", "run-1", "run-2"),
}
CELLS = {
    "list": ("name", "guarantee", "origin", "description"),
    "show": ("key", "value", "origin", "package"),
    "plan": ("outcome", "knob", "after", "why"),
    "diff": ("key", "left", "right"),
    "check": ("key", "locked", "here"),
    "doctor": ("what", "to_do"),
    "compare": ("source",),
}
"""The keys whose values the table of a command has; for other commands all of them."""
ROWS = {"plan": "knobs", "diff": "differences", "check": "differences", "doctor": "findings"}
PLACE = re.compile(r"[\w.-]+\.(?:py|yaml):\d+")
LAID_OUT = ("list", "show", "diff")  # nothing but a table, which keeps within a terminal


@pytest.fixture
def commands(tmp_path, fork, clean_environment):
    """Write what the commands are about, in a folder with a long name; return the environment."""
    deep = tmp_path / ("a folder with a long name " * 3).strip().replace(" ", "-") / ("deep" * 12)
    deep.mkdir(parents=True)
    for name, base in (("team", "debug-strict"), ("other", "train-fast")):
        text = TEAM.format(base, f"{name} " * 30)
        (deep / f"{name}.yaml").write_text(text, encoding="utf-8")
    (deep / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "record.py").write_text(RECORDING, encoding="utf-8")
    paths = {name: str(deep / f"{name}.yaml") for name in ("team", "other")}
    words = {name: [word.format(**paths) for word in its] for name, its in COMMANDS.items()}
    (tmp_path / "commands.json").write_text(json.dumps(words), encoding="utf-8")
    locked = (deep / "team.yaml").read_text(encoding="utf-8")
    lock = f"from torchrepro.cli import main; main(['lock', {paths['team']!r}, '-o', 'team.lock'])"
    for program in (("record.py", deep), ("-c", lock)):
        log = tmp_path / "log"
        log.touch()
        status = fork(program, clean_environment, tmp_path, (os.devnull, log, log))
        assert not status, log.read_text(encoding="utf-8")
    (deep / "team.yaml").write_text(locked.replace("zero", "keep"), encoding="utf-8")
    sizes = ("COLUMNS", "LINES")  # they would go before the size of the terminal
    kept = {name: value for name, value in clean_environment.items() if name not in sizes}
    return {**kept, "TERM": "xterm-256color"}


@contextmanager
def terminal(columns):
    """Open a terminal of so many columns; yields its path and what is printed to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    printed = bytearray()

    def read():
        with suppress(OSError):  # nobody has the terminal open any more
            while piece := os.read(ours, 1 << 16):
                printed.extend(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield os.ttyname(theirs), printed
    finally:
        os.close(theirs)
        reader.join(60)
        os.close(ours)


def answers(text):
    """Return the text of each command, and its answer as JSON."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).replace("\r\n", "\n")
    pieces = dict(zip(*[iter(plain.split("\0")[1:])] * 2, strict=True))
    return {name: (pieces[name], json.loads(pieces[f"{name}--json"])) for name in COMMANDS}


def cells(name, answer):
    """Return the values that a command is to show of its answer."""
    rows = answer.get(ROWS.get(name), [answer]) if isinstance(answer, dict) else answer
    if name == "compare":
        rows = [answer["first"]]
    if name == "plan":
        assert len(rows) > 30
        rows = [row for row in rows if not row["absent"]]  # one line for all of these
    found = [row[key] for row in rows for key in CELLS.get(name, row) if row.get(key) is not None]
    # A place is shown as it is seen from the present folder.
    return [each.rpartition("/")[2] if name == "compare" else each for each in found]


def is_there(value, text):
    """Whether a value is in a text whole, or as far as an ellipsis says."""
    words = " ".join((value if isinstance(value, str) else shown(value)).split())
    return words in text or any(shortened(words, n) in text for n in range(40, len(words)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("columns", [60, 80, 120, None])
def test_no_table_loses_a_column_or_a_line_number(columns, commands, fork, tmp_path):
    """At every width, and through a pipe, each value of an answer is shown, and each line number.

    A table keeps within the terminal; off a terminal each of its rows is one line.
    """
    path, talk = tmp_path / "printed", tmp_path / "talk"
    for file in (path, talk):
        file.touch()
    if columns:
        with terminal(columns) as (tty, printed):
            assert not fork(("-c", PROGRAM), commands, tmp_path, (os.devnull, tty, talk))
        text = printed.decode()
    else:
        assert not fork(("-c", PROGRAM), commands, tmp_path, (os.devnull, path, talk))
        text = path.read_text(encoding="utf-8")
    for name, (shown_text, answer) in answers(text).items():
        words = " ".join(shown_text.split())
        its = cells(name, answer)
        assert its, (name, answer)
        for value in its:
            assert is_there(value, words), (name, value, shown_text)
            for place in PLACE.findall(str(value)):
                assert place in shown_text, (name, place)
        if columns and name in LAID_OUT:
            wide = [line for line in shown_text.splitlines() if len(line) > columns]
            assert not any(line.split()[1:] for line in wide), (name, wide)  # one word stays whole
        if not columns and name in ("list", "show"):
            assert len(shown_text.splitlines()) == 2 + len(answer), name  # what begins, headings
