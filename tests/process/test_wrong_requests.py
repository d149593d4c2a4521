"""A wrong request is said on standard error, with status 2 and no traceback, and starts nothing."""

import os
from pathlib import Path

import pytest

PROFILE = "schema: 1\nname: plain\nguarantee: repeatable\nseed: 1\n"
SAID = {
    "explain CUBLAS_WORKSPACE_CONFG": ("CUBLAS_WORKSPACE_CONFG", "env.CUBLAS_WORKSPACE_CONFIG"),
    "explain benchmrk": ("benchmrk", "backends.cudnn.benchmark"),
    "show debug-strikt": ("debug-strikt", "did you mean", "debug-strict"),
    "show debug-strict seed=-1": ("override seed=-1", "4294967295"),
    "show debug-strict sead=1": ("override sead=1", "seed"),
    "show debug-strict seed-only": ("a command takes one profile", "seed-only"),
    "diff seed-only missing.json": ("missing.json",),
    "plan ./missing.yaml": ("no such file", "missing.yaml"),
    "digest": ("FILE",),
    "digest trian.py": ("No such file", "did you mean: train.py"),
    "digest train.py": ("not a checkpoint", "a file of torch.save"),
    "env debug-strict --format csv": ("csv", "dotenv"),
    "env debug-strict --format dockr": ("Did you mean 'docker'?",),
    "verify --relation resum -- touch y": (
        "Invalid value for '--relation': 'resum' is not one of",
        "Did you mean 'resume'?",
    ),
    "doctor debug-strikt": ("debug-strikt", "debug-strict"),
    "list --jsn": ("--jsn",),
    "list -- junk": ("junk",),  # only a command that starts one drops what follows
    "show seed-only -- seed=tru": ("override seed=tru",),
    "lst": ("lst",),
    "show": ("PROFILE",),
    "check train.py": ("nor a lock", "torchrepro lock PROFILE"),
    "run -- true": ("no profile is named",),
    "run seed-only --": ("no command",),
    "run seed-only -- no-such": ("no-such",),
    "run seed-onli -- true": ("seed-only",),
    "run seed-only seed=-1 -- true": ("seed=-1",),
    "run ./plain.yaml --record x": ("write it after `--`",),
    "run ./plain.yaml --record . -- touch y": ("a recording goes into a new or empty folder",),
    "run ./plain.yaml --record x --steps a:b -- touch y": ("legal: 7 or 5:8",),
    "run ./plain.yaml --record x --steps 8:5 -- touch y": ("--steps = 8:5: names no steps",),
    "run ./plain.yaml --record x --every 0 -- touch y": (
        "--every = 0: not a whole number from 1 on",
    ),
    "run ./plain.yaml --record x --every x -- touch y": (
        "--every = 'x': not a whole number from 1 on",
    ),
    "run ./plain.yaml --record x --max-size lots -- touch y": ("--max-size = lots: not a size",),
    "run ./plain.yaml --record x --max-size 10 -- touch y": ("did you mean: 10MB",),
    "run ./plain.yaml --every 5 -- touch y": ("torchrepro: --every: nothing is recorded",),
    "run ./plain.yaml --log-to runs/notes -- touch y": ("contains the manifest of another run",),
    "run ./plain.yaml --log-to train.py/x -- touch y": (
        "cannot be a folder:",
        "train.py is a file",
    ),
    "run --quiet --verbose seed-only -- touch y": ("--quiet and --verbose contradict each other",),
    "compare nowhere nowhere": ("no such folder",),
    "compare . .": ("contains no trace",),
    "compare train.py train.py": ("is a file",),
    "compare runs/baselin runs/a": ("did you mean: runs/baseline",),
    "compare runs/zzz runs/a": ("legal: runs/a, runs/baseline",),
    "verify": ("torchrepro verify -- ",),
    "verify ./plain.yaml": ("torchrepro verify ./plain.yaml -- ",),
    "verify seed=7 -- true": ("an override without a profile",),
    "verify python train.py": ("torchrepro verify -- python train.py",),
    "verify train.py --lr 3": ("torchrepro verify -- python train.py --lr 3",),
    "run debug-strict torchrun -n 2 train.py": ("run debug-strict -- torchrun -n 2 train.py",),
    "verify --level step seed-only bash x.sh": ("--level step seed-only -- bash x.sh",),
    "verify debug-strickt -- true": ("did you mean",),
    "verify ./plain.yaml -- no-such": ("no such command",),
    "verify ./plain.yaml -- true": ("recorded",),
    "verify ./plain.yaml -- false": ("status 1",),
}
"""A request, in a folder with a profile and a program, and parts of what is said of it."""


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("request_", SAID)
def test_a_wrong_request_is_said_on_standard_error(command, monkeypatch, tmp_path, request_):
    """Nothing is on standard output, no command is started, and the message names what is wrong."""
    (tmp_path / "plain.yaml").write_text(PROFILE, encoding="utf-8")
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    for name in ("a", "baseline", "notes"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for name in ("a", "baseline"):
        (tmp_path / "runs" / name / "rank0.sqlite").touch()
    (tmp_path / "runs" / "notes" / "repro.json").write_text("another run's", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*request_.split())
    text = f"{err}\n{' '.join(err.split())}"  # a message of typer is wrapped

    assert (status, out) == (2, "")
    assert [part for part in SAID[request_] if part not in text] == []
    assert "Traceback" not in err
    assert not Path("y").exists()


def test_a_traceback_ends_in_the_line_that_asked(tmp_path, run_python):
    """What the program asked wrongly is seen at once; how that was found out is left out."""
    program = "import torchrepro\ndef main():\n    torchrepro.apply('debug-strickt')\nmain()\n"
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    ended = run_python(tmp_path / "train.py")
    frames = [line for line in ended.stderr.splitlines() if line.startswith("  File ")]

    assert ended.returncode == 1
    assert frames[-1].endswith('train.py", line 3, in main')
    assert "did you mean: debug-strict" in ended.stderr


ODD = {
    "a pipe": lambda folder: os.mkfifo(folder / "odd") or "odd",
    "a device": lambda _: "/dev/zero",
    "a name that no file has": lambda _: "n" * 5000,
    "a zero byte": lambda _: "a\0b",
    "a folder": str,
}
TAKES_A_FILE = (
    "check {}",
    "rerun {}",
    "compare {} {}",
    "diff {} {}",
    "show {}",
    "run --lock {} -- x",
)


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("request_", TAKES_A_FILE)
def test_what_is_no_regular_file_is_refused_at_once(command, monkeypatch, tmp_path, kind, request_):
    """Nothing waits for a pipe, reads a device to its end, or takes a crash for an answer."""
    monkeypatch.chdir(tmp_path)
    name = ODD[kind](tmp_path)
    status, out, err = command(*(word.format(name) for word in request_.split()))

    assert (status, out) == (2, "")
    assert len(err) < 9000
    assert "Traceback" not in err


def test_an_error_of_our_own_is_no_answer(command, monkeypatch):
    """It ends with a status of its own, its traceback, and what to do."""

    def crashes(*_, **__):
        raise IndexError("list index out of range")

    monkeypatch.setattr("torchrepro.cli.app.app", crashes)
    status, out, err = command("show", "debug-strict")

    assert (status, out) == (70, "")
    assert "IndexError" in err
    assert "report it" in err
