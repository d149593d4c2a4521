"""In a program's folder, only the program itself changes anything.

Each program has an effect on existing files. The state of the folder after all runs and trials is
one that the effect alone can reach, applied any number of times; files that the effect does not
name keep their modification time and inode.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import chdir, nullcontext
from pathlib import Path  # noqa: TC003 - pytest reads the annotations

import pytest

from torchrepro.ground.errors import TraceError
from torchrepro.lock.repository import repository_root
from torchrepro.verification.relations.relation import relate
from torchrepro.verification.runner import RunRequest
from torchrepro.verification.verifier import verify

from .repositories import git

TRAIN = """
{effect}
import os, random, time, torch
{seed}
carried = int(open("n").read()) if os.path.exists("n") else 0
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    loss = model(torch.ones(8, 4)).square().mean() * (1 + {factor})
    loss.backward()
    optimizer.step()
open("n", "w").write(str(carried + 1)) if {carries} else None
"""
RESUMES = """
{effect}
import os, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
begin = 0
if os.path.exists("state.pt"):
    begin, saved = torch.load("state.pt")
    model.load_state_dict(saved)
for step in range(begin, 5):
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save((step + 1, model.state_dict()), "state.pt") if step == 2 else None
"""
KINDS = {
    "carries a file": {"seed": "torch.manual_seed(0)", "factor": "carried", "carries": True},
    "reads a clock": {"seed": "torch.manual_seed(0)", "factor": "time.time() % 1", "carries": 0},
    "draws a seed": {
        "seed": "torch.manual_seed(random.getrandbits(30))",
        "factor": 0,
        "carries": 0,
    },
    "is unseeded": {"seed": "", "factor": 0, "carries": 0},
}
EFFECTS = {
    "nothing": "",
    "append": "open('log.txt', 'a').write('x')",
    "append to what git ignores": "open('data/big.bin', 'ab').write(b'x')",
    "update": "f = open('log.txt', 'r+'); f.seek(1); f.write('y'); f.close()",
    "update what is large": "f = open('data/big.bin', 'r+b'); f.seek(5); f.write(b'y'); f.close()",
    "truncate": "open('log.txt', 'w').close()",
    "truncate what is large": "import os; os.truncate('data/big.bin', 9)",
    "rename over": "import os; open('.new', 'w').write('z'); os.replace('.new', 'log.txt')",
    "rename over what is large": (
        "import os; open('.new', 'wb').write(bytes(2_000_000)); os.replace('.new', 'data/big.bin')"
    ),
    "rename away": "import os; os.path.exists('log.txt') and os.rename('log.txt', 'log.old')",
    "remove": "import os; os.path.exists('log.txt') and os.remove('log.txt')",
    "remove a tree": "import shutil; shutil.rmtree('old', ignore_errors=True)",
    "copy over": "import shutil; shutil.copy('train.py', 'log.txt')",
    "a folder anew": "import os, shutil; shutil.rmtree('old', True); os.makedirs('old/in/it')",
    "a map": "import numpy; numpy.memmap('data/big.bin', 'u1', 'r+', shape=(9,))[:] = 7",
    "a map of what is new": (
        "import numpy; numpy.memmap('data/new.bin', 'u1', 'w+', shape=(9,))[:] = 7"
    ),
    "an array": "import numpy; numpy.save('data/array.npy', numpy.arange(5))",
    "a data base": (
        "import sqlite3; c = sqlite3.connect('runs.db'); "
        "c.execute('create table if not exists t (a)'); c.execute('insert into t values (1)'); "
        "c.commit(); c.close()"
    ),
    "a checkpoint": "import torch; torch.save([1], 'ck/last.pt')",
    "a checkpoint through a file": (
        "import torch; f = open('ck/last.pt', 'wb'); torch.save([1], f); f.close()"
    ),
    "a checkpoint renamed": (
        "import os, torch; torch.save([1], 't'); os.replace('t', 'ck/last.pt')"
    ),
    "an absolute path": "import os; open(os.path.join(ROOT, 'log.txt'), 'a').write('x')",
    "an absolute path to what is large": "open(ROOT + '/data/big.bin', 'r+b').write(b'ab')",
    "through a link to a file": "open('latest.txt', 'a').write('x')",
    "through a link to a folder": "open('away/in.txt', 'a').write('x')",
    "through an absolute link": "open('back.txt', 'a').write('x')",
    "a link anew": "import os; os.remove('latest.txt'); os.symlink('data/small.txt', 'latest.txt')",
    "a hard link": "import os; os.path.exists('ck/hard') or os.link('ck/last.pt', 'ck/hard')",
    "a file at home": "import os; open(os.path.expanduser('~/settings'), 'a').write('x')",
    "permissions": "import os; os.chmod('log.txt', 0o600)",
    "by a child": "import subprocess; subprocess.run(['sh', '-c', 'echo x >> log.txt'])",
    "a child renames": (
        "import subprocess; subprocess.run(['sh', '-c', 'cp log.txt t; mv t log.txt'])"
    ),
    "a child and what is large": (
        "import subprocess; subprocess.run(['sh', '-c', 'echo x >> data/big.bin'])"
    ),
    "from a folder": (
        "import os; os.chdir('data'); open('small.txt', 'a').write('x'); os.chdir('..')"
    ),
}
"""What a program does to its files: each can be applied to the same folder again and again."""

State = dict[str, tuple[object, ...]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with files that git tracks, files that it ignores, links, and a home beside."""
    root = tmp_path / "user/work"
    for name in ("home", "elsewhere", "work/data", "work/ck", "work/old/deep"):
        (tmp_path / "user" / name).mkdir(parents=True)
    contents = {
        "log.txt": "abc\n",
        "mine.txt": "mine",
        ".gitignore": "data\nck\nruns.db\n",
        "data/small.txt": "s",
        "data/kept.txt": "kept",
        "ck/kept.pt": "kept",
        "old/deep/file": "old",
        "../elsewhere/in.txt": "in",
        "../home/settings": "set",
    }
    for name, text in contents.items():
        (root / name).write_text(text, encoding="utf-8")
    for name in ("data/big.bin", "data/untouched.bin", "ck/last.pt"):
        (root / name).write_bytes(bytes(range(256)) * 8192)
    (root / "latest.txt").symlink_to("data/small.txt")
    (root / "away").symlink_to("../elsewhere")
    git(root, "init", "-q")
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(tmp_path / "user/home"))
    return root


def _states(user: Path) -> State:
    """Contents, links and permissions of all below a folder but git's and the carried file."""
    verification: State = {}
    for path in sorted(user.rglob("*")):
        name = str(path.relative_to(user))
        if "/.git/" in name or name.endswith(("/.git", "/n", "train.py")):
            continue
        its: object = path.is_dir()
        if path.is_symlink():
            its = os.path.relpath(path.resolve(), user)
        elif path.is_file():
            its = path.read_bytes()
        verification[name] = its, path.lstat().st_mode
    return verification


def _kept(user: Path) -> dict[str, tuple[int, int]]:
    """Times of change and inodes of what no effect names."""
    names = ("mine.txt", "data/kept.txt", "data/untouched.bin", "ck/kept.pt")
    states = ((name, (user / "work" / name).lstat()) for name in names)
    return {name: (its.st_mtime_ns, its.st_ino) for name, its in states}


def _reachable(user: Path, effect: str, most: int, monkeypatch: pytest.MonkeyPatch) -> list[State]:
    """The states of a twin of the folder after its effect, applied from no time to `most` times."""
    twin = user.with_name("twin")
    shutil.copytree(user, twin, symlinks=True)
    if (twin / "work/back.txt").is_symlink():
        (twin / "work/back.txt").unlink()
        (twin / "work/back.txt").symlink_to(twin / "work/data/small.txt")
    verification = [_states(twin)]
    with chdir(twin / "work"), monkeypatch.context() as patch:
        patch.setenv("HOME", str(twin / "home"))
        for _ in range(most):
            exec(effect, {"ROOT": str(twin / "work")})
            verification.append(_states(twin))
    return verification


def _write(root: Path, text: str, effect: str, **words: object) -> None:
    effect = f"ROOT = {str(root)!r}\n{effect}"
    (root / "train.py").write_text(text.format(effect=effect, **words), encoding="utf-8")
    if "back.txt" in effect:  # no copy is made of a folder that has such a link
        (root / "back.txt").symlink_to(root / "data/small.txt")


KIND_OF = {name: [*KINDS][at % len(KINDS)] for at, name in enumerate(EFFECTS)}
CASES = {*KIND_OF.items(), *((name, "carries a file") for name in EFFECTS)}


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("effect", "kind"), sorted(CASES))
def test_trials_change_a_folder_only_as_the_program_does(
    effect, kind, folder, tmp_path, monkeypatch
):
    """The folder is as the program alone would have left it."""
    user, text = folder.parent, EFFECTS[effect]
    _write(folder, TRAIN, text, **KINDS[kind])
    reachable, kept = _reachable(user, text, 40, monkeypatch), _kept(user)
    verification = verify(None, [sys.executable, "train.py"], folder=tmp_path / "out")

    assert repository_root(folder) == folder
    assert not verification.same
    assert verification.tried
    assert _kept(user) == kept
    assert _states(user) in reachable


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_relation_changes_nothing_in_the_users_folder(effect, folder):
    """Its runs are in copies; only files outside of the folder are written as the program does."""
    user = folder.parent
    _write(folder, RESUMES, EFFECTS[effect])
    before, kept = _states(user), _kept(user)
    refused = any(word in effect for word in ("absolute", "link to a folder"))
    with pytest.raises(TraceError, match=r"in your own|to your own") if refused else nullcontext():
        relate("resume", RunRequest([sys.executable, "train.py"]))
    after = _states(user)
    if effect == "a file at home":
        del before["home/settings"], after["home/settings"]

    assert _kept(user) == kept
    assert after == before
    assert not (folder / "state.pt").exists()


RUNS = ("run 2 of 3", "in a new folder", "killed 1")
"""What a run is called as it starts: in the folder of the user, of a trial, of a relation."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "number"),
    [
        *[(run, number) for run in RUNS for number in (signal.SIGINT, signal.SIGKILL)],
        *[("in a new folder", number) for number in (signal.SIGTERM, signal.SIGQUIT)],
    ],
)
def test_a_signal_between_and_within_trials_changes_nothing(number, run, folder, monkeypatch):
    """Whatever it interrupts: a run in the folder or in a copy, of a trial or a relation."""
    effect, user = EFFECTS["update what is large"], folder.parent
    is_relation = run.startswith("killed")
    _write(
        folder, *((RESUMES, effect) if is_relation else (TRAIN, effect)), **KINDS["carries a file"]
    )
    reachable, kept = _reachable(user, effect, 10, monkeypatch), _kept(user)
    words = ["verify", *(["--relation", "resume"] if is_relation else []), "--", sys.executable]
    line = [sys.executable, "-m", "torchrepro", *words, "train.py"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as ours:
        assert ours.stderr is not None
        assert any(run in text for text in iter(ours.stderr.readline, ""))
        ours.send_signal(number)
        ours.stderr.read()

    assert ours.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert _kept(user) == kept
    assert _states(user) in reachable


@pytest.fixture(params=["a small file system", "a limit of file size"])
def little_room(request, tmp_path, monkeypatch):
    """Run a command with little room in the temporary folder, or for any file that grows."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    limit = 2**20, 2**20
    if request.param == "a limit of file size":
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield lambda: None
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_a_full_disk_prevents_a_trial_and_damages_no_file(
    folder, little_room, tmp_path, monkeypatch
):
    """A trial without a copy is not run, and reported; the folder is as the program left it."""
    effect, user = EFFECTS["update what is large"], folder.parent
    _write(folder, TRAIN, effect, **KINDS["carries a file"])
    reachable, kept = _reachable(user, effect, 10, monkeypatch), _kept(user)
    words = ["-m", "torchrepro", "verify", "--verbose", "--folder", tmp_path / "out", "--"]
    done = subprocess.run(
        [sys.executable, *words, sys.executable, "train.py"],
        preexec_fn=little_room,
        capture_output=True,
        text=True,
        check=False,
    )

    assert "Traceback" not in done.stderr
    assert (done.returncode, "the files cannot be copied: " in done.stdout) == (1, True)
    assert _kept(user) == kept
    assert _states(user) in reachable
