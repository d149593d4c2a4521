"""Whatever changed, `check` blames nobody who did not change it: it names who did, or cannot tell.

One program depends on all that a program may depend on: code, data that Python, C and a child read,
what is there and how large it is, listings, links, variables, a sibling on the path. It is locked
once. Each case changes one thing.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from torchrepro.checking import locked_command
from torchrepro.manifest.contents import seal_of

from ..verification.repositories import commit, write
from .training import COMMAND, MODEL, Training

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

TRAIN = r"""
import os, subprocess, sys, torch
from safetensors.torch import load_file

import generated, model, sibling

def text(path):
    with open(path) as file:
        return float(file.read())

def child(*words):
    return float(subprocess.run(words, capture_output=True, check=True).stdout)

raw = [torch.from_file(path, size=4) for path in ("raw.bin", "ignored.bin", "../outside/raw.bin")]
weights = load_file("weights.safetensors")["w"]
total = sum(float(each.sum()) for each in (*raw, weights))
total += sum(map(text, ("data.txt", "ignored.log", "../outside/data.txt", "latest/v.txt")))
total += sum(map(text, ("d/x.txt", "pointer.txt", "odd\nname.txt")))
total += child("cat", "child.txt") + child("cat", "../outside/child.txt")
total += os.stat("sized.txt").st_size + len(os.listdir("listed")) + len(os.listdir("scratch"))
total += os.access("tool.sh", os.X_OK) + len(open("lines.txt", "rb").read())
total += os.path.exists("there.log") + os.path.exists("../outside/there") + generated.VALUE
total += float(os.environ.get("MODE", "0")) + float(os.getenv("LEVEL", "0")) + sibling.VALUE
total += "SWITCH" in os.environ

text(".env"), text("../outside/api_key.txt"), os.environ.get("MY_PASSWORD"), dict(os.environ)

torch.manual_seed(model.SEED)
net = model.Net()
optimizer = torch.optim.SGD(net.parameters(), lr=model.LR)
for step in range(2):
    batch = torch.randn(64, 1024)
    loss = net(batch) * (1 + total / 64)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
FILES = {
    "train.py": TRAIN,
    "model.py": MODEL,
    "plain.yaml": "name: plain\nseed: 1\n",
    ".gitignore": "*.log\nignored.*\ngenerated.py\nscratch/\n.env\n",
    "README.md": "",
    "data.txt": "1",
    "child.txt": "1",
    "sized.txt": "1",
    "listed/a.txt": "",
    "tool.sh": "#!",
    "lines.txt": "1\n2\n",
    "v1/v.txt": "1",
    "v2/v.txt": "2",
    "a.txt": "1",
    "b.txt": "2",
    "odd\nname.txt": "1",
    ".gitattributes": "",
}
NOT_IN_GIT = {
    "ignored.log": "1",
    "generated.py": "VALUE = 1\n",
    "scratch/a": "",
    "../outside/data.txt": "1",
    "../outside/child.txt": "1",
    "../outside/d/x.txt": "1",
    ".env": "1",
    "../outside/api_key.txt": "1",
    "../sibling/sibling.py": "VALUE = 1\n",
    "../other/sibling.py": "VALUE = 2\n",
}
SECRET = "swordfishes-11"
VARIABLES = {"OMP_NUM_THREADS": "2", "MODE": "1", "MY_PASSWORD": SECRET}


def _raw(value: float, path: Path) -> None:
    path.write_bytes(torch.full((4,), float(value)).numpy().tobytes())


@pytest.fixture(scope="module")
def locked(tmp_path_factory):
    """The folder of the program, which the first case locks, and a copy of its locked state."""
    place = tmp_path_factory.mktemp("locked")
    folder = place / "here" / "work"
    folder.mkdir(parents=True)
    write(folder, NOT_IN_GIT | FILES)
    for path in ("raw.bin", "ignored.bin", "../outside/raw.bin"):
        _raw(1, folder / path)
    save_file({"w": torch.ones(4)}, folder / "weights.safetensors")
    for name, target in (("latest", "v1"), ("d", "../outside/d"), ("pointer.txt", "a.txt")):
        (folder / name).symlink_to(target)
    (folder / "tool.sh").chmod(0o755)
    commit(folder, {})
    return folder, place / "as locked"


@pytest.fixture
def program(locked, forked, command, monkeypatch):
    """The program as it was locked, and the commands about its lock."""
    folder, as_locked = locked
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent / "sibling"))
    monkeypatch.setenv("TORCHREPRO_QUIET", "1")
    if as_locked.exists():
        shutil.rmtree(folder.parent)
        shutil.copytree(as_locked, folder.parent, symlinks=True)
    monkeypatch.chdir(folder)
    its = Training(folder, command)
    if not as_locked.exists():
        said = its.lock("--json")
        assert said[0] == 0, said
        (folder / "../said.json").write_text(said[1])
        its.git("add", "repro.lock")
        its.git("commit", "-qm", "lock")
        shutil.copytree(folder.parent, as_locked, symlinks=True)
    return its


CODE, OUTSIDE, ENVIRONMENT, BOTH = "code", "outside", "environment", "both"


def _text(name: str, value: str = "2") -> Callable[..., None]:
    return lambda its, _: its.write({name: value})


def _code(name: str, before: str, after: str) -> Callable[..., None]:
    return lambda its, _: its.change(name, before, after)


def _variable(**variables: str) -> Callable[..., None]:
    return lambda its, patch: [patch.setenv(name, value) for name, value in variables.items()]


def _all(*changes: Callable[..., None]) -> Callable[..., None]:
    return lambda its, patch: [change(its, patch) for change in changes]


def _committed(*changes: Callable[..., None]) -> Callable[..., None]:
    return _all(*changes, lambda its, _: its.git("commit", "-qam", "changed"))


def _link(name: str, target: str) -> Callable[..., None]:
    def change(its: Training, _: object) -> None:
        (its.folder / name).unlink()
        (its.folder / name).symlink_to(target)

    return change


def _link_new(name: str, target: str) -> Callable[..., None]:
    return lambda its, _: (its.folder / name).symlink_to(target)


def _bytes(name: str) -> Callable[..., None]:
    return lambda its, _: _raw(2, its.folder / name)


def _weights(its: Training, _: object) -> None:
    save_file({"w": torch.full((4,), 2.0)}, its.folder / "weights.safetensors")


def _edited(its: Training, _: object) -> None:
    text = (its.folder / "repro.lock").read_text()
    (step,) = [line for line in text.splitlines() if '"0: 0x' in line]
    (its.folder / "repro.lock").write_text(text.replace(step, step.replace("0: 0x1.", "0: 0x1.0")))


def _attributes(its: Training, _: object) -> None:
    its.write({".gitattributes": "lines.txt text eol=crlf\n", "lines.txt": "1\r\n2\r\n"})


def _renamed(its: Training, _: object) -> None:
    (its.folder / "odd\nname.txt").rename(its.folder / "other\nname.txt")
    its.change("train.py", r"odd\nname", r"other\nname")
    its.write({"other\nname.txt": "2"})
    its.git("add", "-A")


def _version(library: str) -> Callable[..., None]:
    """The lock is of another version of a library."""

    def change(its: Training, _: object) -> None:
        contents = its.contents
        (section,) = contents["machines"].values()
        section["versions"][library] = "0.1"
        its.write({"repro.lock": json.dumps(_sealed(contents))})
        its.git("commit", "-qam", "lock")

    return change


def _sealed(contents: dict[str, Any]) -> dict[str, Any]:
    (section,) = contents["machines"].values()
    shared = {key: its for key, its in contents.items() if key != "machines"}
    section["seal"] = seal_of(shared | section)
    return contents


KERNELS = _variable(ATEN_CPU_CAPABILITY="default")
ONE_THREAD = _variable(OMP_NUM_THREADS="1")
NOT_IN_EFFECT = _variable(OMP_PROC_BIND="false")

CHANGES: Mapping[str, tuple[Callable[..., object], str, str, str]] = {
    # Those of the fourth trials.
    "tracked safetensors": (_weights, CODE, "code", ""),
    "committed safetensors": (_committed(_weights), CODE, "code", ""),
    "tracked from_file": (_bytes("raw.bin"), CODE, "code", ""),
    "tracked, by a child": (_text("child.txt"), CODE, "code", ""),
    "tracked stat": (_text("sized.txt", "11"), CODE, "code", ""),
    "listing": (_text("listed/b.txt"), CODE, "code", ""),
    "access": (lambda its, _: (its.folder / "tool.sh").chmod(0o644), CODE, "code", ""),
    "mode, committed": (
        _committed(lambda its, _: (its.folder / "tool.sh").chmod(0o644)),
        *(CODE, "code", ""),
    ),
    "ignored data": (_text("ignored.log"), OUTSIDE, "unknown", "ignored.log"),
    "ignored data and the environment": (
        _all(_text("ignored.log"), NOT_IN_EFFECT),
        *(OUTSIDE, "unknown", "ignored.log"),
    ),
    "ignored data, by C": (_bytes("ignored.bin"), OUTSIDE, "unknown", "ignored.bin"),
    "outside data": (_text("../outside/data.txt"), OUTSIDE, "unknown", "~/outside/data.txt"),
    "outside data, by C": (_bytes("../outside/raw.bin"), OUTSIDE, "unknown", "~/outside/raw.bin"),
    "outside data, by a child": (
        _text("../outside/child.txt"),
        *(OUTSIDE, "unknown", "~/outside/child.txt"),
    ),
    "a variable": (_variable(MODE="2"), OUTSIDE, "unknown", "MODE"),
    "a sibling": (
        _text("../sibling/sibling.py", "VALUE = 2\n"),
        *(OUTSIDE, "unknown", "~/sibling/sibling.py"),
    ),
    "another sibling": (
        lambda its, patch: patch.setenv("PYTHONPATH", str(its.folder.parent / "other")),
        *(OUTSIDE, "unknown", "~/other/sibling.py"),
    ),
    "edited by hand": (_edited, OUTSIDE, "unknown", "edited by hand"),
    "edited by hand, other kernels": (_all(_edited, KERNELS), OUTSIDE, "unknown", "by hand"),
    "generated before": (_text("generated.py", "VALUE = 2\n"), OUTSIDE, "unknown", "generated.py"),
    "attributes later": (_attributes, CODE, "code", ""),
    "attributes later, committed": (_committed(_attributes), CODE, "code", ""),
    "a link to a folder": (_link("latest", "v2"), CODE, "code", ""),
    "a link to a file": (_link("pointer.txt", "b.txt"), CODE, "code", ""),
    "what a link leads to": (_text("a.txt"), CODE, "code", ""),
    "what a link to a folder leads to": (_text("v1/v.txt"), CODE, "code", ""),
    "outside, through a link": (
        _text("../outside/d/x.txt"),
        *(OUTSIDE, "unknown", "~/outside/d/x.txt"),
    ),
    "an odd name": (_text("odd\nname.txt"), CODE, "code", ""),
    "an odd name that is another": (_renamed, CODE, "code", ""),
    "code": (_code("model.py", ".tanh()", ".relu()"), CODE, "code", "model.py:15"),
    "committed code": (
        _committed(_code("model.py", ".tanh()", ".relu()")),
        *(CODE, "code", "model.py:15"),
    ),
    "other kernels": (KERNELS, ENVIRONMENT, "environment", "ATEN_CPU_CAPABILITY"),
    "another number of threads": (ONE_THREAD, ENVIRONMENT, "environment", "OMP_NUM_THREADS"),
    "code and kernels": (
        _all(_code("model.py", ".tanh()", ".relu()"), KERNELS),
        *(BOTH, "both", "ATEN_CPU_CAPABILITY"),
    ),
    # Others.
    "tracked data": (_text("data.txt"), CODE, "code", ""),
    "a seed": (_code("model.py", "SEED = 3", "SEED = 4"), CODE, "code", ""),
    "a new untracked file in a listing": (_text("listed/new.txt"), CODE, "code", ""),
    "an ignored listing": (_text("scratch/b"), OUTSIDE, "unknown", "scratch"),
    "an ignored file that is there now": (_text("there.log"), OUTSIDE, "unknown", ""),
    "an outside file that is there now": (_text("../outside/there"), OUTSIDE, "unknown", ""),
    "a variable by getenv": (_variable(LEVEL="1"), OUTSIDE, "unknown", "LEVEL"),
    "a variable that is there now": (_variable(SWITCH=""), OUTSIDE, "unknown", "SWITCH"),
    "a variable that is gone": (
        lambda its, patch: patch.delenv("MODE"),
        *(OUTSIDE, "unknown", "MODE"),
    ),
    "a variable and another of the environment": (
        _all(_variable(LEVEL="1"), NOT_IN_EFFECT),
        *(OUTSIDE, "unknown", "LEVEL"),
    ),
    "the value of a variable, and another of the environment": (
        _all(_variable(MODE="2"), NOT_IN_EFFECT),
        *(OUTSIDE, "unknown", "LEVEL, MODE, SWITCH"),
    ),
    "an outside file that is there now, and another of the environment": (
        _all(_text("../outside/there"), NOT_IN_EFFECT),
        *(OUTSIDE, "unknown", "does not record all files outside of git"),
    ),
    "a new untracked file, and kernels": (
        _all(_text("listed/new.txt"), KERNELS),
        *(BOTH, "unknown", "ATEN_CPU_CAPABILITY"),
    ),
    "an untracked file that nothing reads, and kernels": (
        _all(_text("notes.txt"), KERNELS),
        *(ENVIRONMENT, "environment", "ATEN_CPU_CAPABILITY"),
    ),
    "the value of a variable, and another version": (
        _all(_version("numpy"), _variable(MODE="2")),
        *(OUTSIDE, "unknown", "LEVEL, MODE, SWITCH"),
    ),
    "outside data, and another version of torch": (
        _all(_version("torch"), _text("../outside/data.txt")),
        *(OUTSIDE, "unknown", "~/outside/data.txt"),
    ),
    "another version of torch, and kernels": (
        _all(_version("torch"), KERNELS),
        *(ENVIRONMENT, "environment", "torch"),
    ),
    "code, and another version of torch": (
        _all(_version("torch"), _code("model.py", ".tanh()", ".relu()")),
        *(CODE, "code", "model.py:15"),
    ),
    "a file through a link, and another link": (
        _all(_link("d", "../outside/e"), _text("../outside/e/x.txt")),
        *(CODE, "code", ""),
    ),
    "ignored data and code": (
        _all(_text("ignored.log"), _code("model.py", ".tanh()", ".relu()")),
        *(OUTSIDE, "unknown", "ignored.log"),
    ),
    "outside data and kernels": (
        _all(_text("../outside/data.txt"), KERNELS),
        *(OUTSIDE, "unknown", "~/outside/data.txt"),
    ),
    "tracked data by C, and kernels": (_all(_weights, KERNELS), BOTH, "both", "ATEN_CPU"),
    "a profile's other seed": (
        _all(
            _code("plain.yaml", "seed: 1", "seed: 2"),
            _code("model.py", "SEED = 3", "SEED = torch.initial_seed()"),
        ),
        *(CODE, "code", ""),
    ),
    "the profile, and outside data": (
        _all(_code("plain.yaml", "seed: 1", "seed: 2"), _text("../outside/child.txt")),
        *(OUTSIDE, "unknown", "~/outside/child.txt"),
    ),
    "ignored data that is gone from a link": (
        _all(
            _text("data.log"),
            lambda its, _: (its.folder / "ignored.log").unlink(),
            _link_new("ignored.log", "data.log"),
            _text("data.log", "3"),
        ),
        *(OUTSIDE, "unknown", "ignored.log"),
    ),
    "another sibling's cache": (
        _all(_text("../sibling/sibling.py", "VALUE = 3\n"), _code("model.py", "0.1", "0.2")),
        *(OUTSIDE, "unknown", "~/sibling/sibling.py"),
    ),
}
"""A change, where it truly is, who is said to have made it, and what the answer names."""

TRUE = {CODE: {"code"}, OUTSIDE: set(), ENVIRONMENT: {"environment"}, BOTH: {"both"}}
"""Answers that are no false conviction, besides that nobody can tell."""


@pytest.mark.parametrize("change", CHANGES)
def test_check_never_names_a_wrong_cause(program, monkeypatch, change):
    """A reported cause is the true one, and known differences are named."""
    act, truth, expected, named = CHANGES[change]
    act(program, monkeypatch)
    status, said = program.check()
    print(f"{change} -> {expected} -> {said}")

    assert (status, said["same"]) == (1, False)
    assert said["who"] in TRUE[truth] | {"unknown"}
    assert said["who"] == expected
    assert named in json.dumps(said)


def test_a_lock_contains_digests_and_names_but_no_secrets(program):
    """Files outside of git, folders and variables that the program used, none that sounds secret;
    `lock --json` has shown the same."""
    (section,) = program.contents["machines"].values()
    text = (program.folder / "repro.lock").read_text()
    said = json.loads((program.folder / "../said.json").read_text())
    outside = ("child.txt", "d/x.txt", "data.txt", "raw.bin")
    inside = ("generated.py", "ignored.bin", "ignored.log")

    assert {*section["data"]} == {*inside, *(f"~/outside/{name}" for name in outside)} | {
        "~/sibling/sibling.py"
    }
    assert {*section["listed"]} == {"listed", "scratch"}
    assert section["variables"] == {"LEVEL": "not set", "MODE": "set", "SWITCH": "not set"}
    assert [word for word in (SECRET, "MY_PASSWORD", ".env", "api_key") if word in text] == []
    assert all(said[key] == section[key] for key in ("data", "listed", "variables"))


BOUNDS = {"MOST_FILES": (2, "2 files"), "MOST_BYTES": (2, "0 GB"), "MOST_SECONDS": (-1, "-1 s")}


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_reached_limit_is_reported(program, monkeypatch, bound):
    """In the answer and in the lock; a new dependency is then no longer known to be new."""
    value, words = BOUNDS[bound]
    monkeypatch.setattr(locked_command, bound, value)
    status, out, _ = program.lock()
    (section,) = program.contents["machines"].values()

    assert status == 0
    assert words in section["left_out"]
    assert f"limit of {section['left_out']} outside of git reached" in out


ZEROS = "0" * 40
DAMAGED = {
    "an absolute path": ("files", {"/etc/hostname": ZEROS}),
    "a path that leads out": ("files", {"a/../../b": ZEROS}),
    "an empty path": ("files", {"": ZEROS}),
    "a blob that is no text": ("files", {"model.py": 5}),
    "a blob of other characters": ("files", {"model.py": "--help"}),
    "files that are no names": ("files", ["model.py"]),
    "data that is no digest": ("data", {"model.py": 5}),
    "variables that are a list": ("variables", ["MODE"]),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_are_refused_before_the_command_runs(program, damage):
    """With status 2 and the key, without a traceback."""
    contents, (key, value) = program.contents, DAMAGED[damage]
    (section,) = contents["machines"].values()
    section[key] = value
    program.write({"repro.lock": json.dumps(_sealed(contents)), "train.py": "raise SystemExit(7)"})
    status, out, err = program.run("check", "repro.lock", "--", *COMMAND)

    assert (status, out) == (2, "")
    assert "damaged" in err
    assert key in err
    assert len(err) < 600
    assert "Traceback" not in err


TYPED = """
import torch
net = torch.nn.Linear(2, 1)
torch.nn.init.constant_(net.weight, 0.5)
net(torch.ones(1, 2)).sum().backward()
torch.optim.SGD([net.weight], lr=0.1).step()
"""


@pytest.mark.parametrize("how", ["-c", "standard input"])
def test_code_without_a_file_cannot_be_attributed(tmp_path, monkeypatch, command, how):
    """Code from `-c` or standard input cannot be checked out again, so the cause is unknown."""
    python = f"{sys.executable} -"
    words = (sys.executable, "-c") if how == "-c" else ("sh", "-c", f"{python} < other.txt")
    commit(tmp_path, {"plain.yaml": "name: plain\nseed: 1\n", "other.txt": TYPED})
    monkeypatch.chdir(tmp_path)
    its = Training(tmp_path, command)
    its.lock(command=(*words, TYPED)[:3])
    its.git("add", "-A")
    its.git("commit", "-qm", "lock")
    its.write({"other.txt": TYPED.replace("lr=0.1", "lr=0.2")})
    status, said = its.check("--quiet", command=(*words, TYPED.replace("lr=0.1", "lr=0.2"))[:3])

    assert (status, said["who"]) == (1, "unknown")
    assert "`python -c` or standard input" in said["why"]


COUNTS = """
import os, torch
n = int(open("n.log").read()) if os.path.exists("n.log") else 0
open("n.log", "w").write(str(n + 1))
net = torch.nn.Linear(2, 1)
torch.nn.init.constant_(net.weight, 1 + (n > 3))
net(torch.ones(1, 2)).square().sum().backward()
torch.optim.SGD([net.weight], lr=0.1).step()
"""


@pytest.mark.parametrize("edited", [False, True])
def test_files_that_runs_leave_behind_are_not_a_code_change(training, edited):
    """A counter in an ignored file changes results; no cause is named for that alone."""
    training.commit({"train.py": COUNTS})
    assert training.lock()[0] == 0
    training.commit()
    training.write({"n.log": "7"})
    if edited:
        training.change("train.py", "lr=0.1", "lr=0.2")
    status, said = training.check()

    assert (status, said["who"]) == (1, "unknown")
    assert "n.log" in json.dumps(said)
