"""A wrong request is said on standard error, with status 2 and no traceback, and starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

PROFILE = "schema: 1\nname: plain\nguarantee: repeatable\nseed: 1\n"
SAID = {
    "explain CUBLAS_WORKSPACE_CONFG": ("CUBLAS_WORKSPACE_CONFG", "env.CUBLAS_WORKSPACE_CONFIG"),
    "explain benchmrk": ("benchmrk", "backends.cudnn.benchmark"),
    "show debug-strikt": ("debug-strikt", "did you mean", "debug-strict"),
    "show debug-strict seed=-1": ("override seed=-1", "4294967295"),
    "show debug-strict sead=1": ("override sead=1", "seed"),
    "show debug-strict seed-only": ("one profile at a time", "seed-only"),
    "diff seed-only missing.json": ("missing.json",),
    "plan ./missing.yaml": ("no such file", "missing.yaml"),
    "env debug-strict --format csv": ("csv", "dotenv"),
    "doctor debug-strikt": ("debug-strikt", "debug-strict"),
    "list --jsn": ("--jsn",),
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
    "run --quiet --verbose seed-only -- touch y": ("--quiet and --verbose contradict each other",),
    "compare nowhere nowhere": ("no such folder",),
    "compare . .": ("holds no trace",),
    "compare train.py train.py": ("is a file",),
    "compare runs/baselin runs/a": ("did you mean: runs/baseline",),
    "compare runs/zzz runs/a": ("legal: runs/a, runs/baseline",),
    "verify": ("torchrepro verify -- ",),
    "verify ./plain.yaml": ("torchrepro verify ./plain.yaml -- ",),
    "verify seed=7 -- true": ("an override without a profile",),
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
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*request_.split())
    text = f"{err}\n{' '.join(err.split())}"  # a message of typer is wrapped

    assert (status, out) == (2, "")
    assert [part for part in SAID[request_] if part not in text] == []
    assert "Traceback" not in err
    assert not Path("y").exists()
