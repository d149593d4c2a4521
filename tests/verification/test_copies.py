"""A command runs in a copy of its repository as in the original; no file of the user changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchrepro.application.launch import program_and_recording_environment
from torchrepro.lock.file_notes import noted
from torchrepro.lock.repository import (
    files_now,
    repository_root,
    write_commit,
    write_files,
)
from torchrepro.trace.request import RecordingRequest
from torchrepro.verification.copies import PREFIX, Copy, temporary_folder
from torchrepro.verification.runner import Runner

from .repositories import commit, git, write

SAYS = """
import os, subprocess, sys
import package
print(package.VALUE, package.__file__, open("../data/in.txt").read(), os.getcwd(), sys.argv[1:])
print(subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip())
open("out.txt", "w").write("out")
"""
FILES = {
    "src/package/__init__.py": "VALUE = 'old'\n",
    "work/says.py": SAYS,
    ".gitignore": "data/\nvenv/\n*.txt\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits, an ignored file, and hooks that say that they ran."""
    root = tmp_path / "repository"
    root.mkdir()
    commit(root, FILES)
    write(root, {"data/in.txt": "data", "venv/pyvenv.cfg": ""})
    for hook in ("post-checkout", "post-index-change"):
        path = root / ".git/hooks" / hook
        path.write_text(f"#!/bin/sh\ntouch {tmp_path}/hook-ran\n")
        path.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(root / "src"))
    return root


def _run(copy: Copy, *words: str) -> str:
    request = RecordingRequest("")
    runner = Runner([sys.executable, *words], copy.recordings, request, None, print)
    with copy.entered(runner) as runner_in_copy:
        program, variables = program_and_recording_environment(runner_in_copy.command)
        done = subprocess.run(
            [program, *runner_in_copy.command[1:]],
            env={
                **variables,
                **runner_in_copy.environment.all_variables(),
                "TORCHREPRO_RECORD": '{"folder": "/nowhere"}',
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _everything(folder: Path) -> dict[str, tuple[int, ...]]:
    found = list(folder.rglob("*"))
    states = ((str(path), path.lstat()) for path in found)
    return {path: (its.st_mtime_ns, its.st_size, its.st_ino, its.st_mode) for path, its in states}


@pytest.mark.parametrize("kind", ["a commit", "as it is now"])
def test_a_command_finds_the_copy_in_place_of_the_original(root, tmp_path, kind):
    """Modules, the folder, absolute paths and git's HEAD are the copy's; nothing else changes."""
    old = git(root, "rev-parse", "HEAD")
    new = commit(root, {"src/package/__init__.py": "VALUE = 'new'\n"})
    (tmp_path / "hook-ran").unlink(missing_ok=True)
    before = _everything(root)
    with temporary_folder() as temporary:
        copy = Copy.of(root, root / "work", temporary, root / "recordings")
        if kind == "a commit":
            write_commit(root, old, copy.tree)
        else:
            write_files(root, files_now(root), copy.tree)
        copy.link(["data"])
        said = _run(copy, "says.py", f"--out={root}/outputs", f"{root}/venv/bin/python")
        tree = str(copy.tree)
        strayed, files = copy.strayed(), {Path(use.path).name for use in noted(copy.log)}

    value, head = ("old", old) if kind == "a commit" else ("new", new)
    package = f"{tree}/src/package/__init__.py"
    words = [f"--out={tree}/outputs", f"{root}/venv/bin/python"]
    assert said.splitlines() == [f"{value} {package} data {tree}/work {words}", head]
    assert repository_root(root / "work") == root
    assert strayed == ""
    assert {"__init__.py", "says.py", "in.txt", "out.txt"} <= files
    assert _everything(root) == before
    assert not (tmp_path / "hook-ran").exists()
    assert not Path(tree).exists()


WORDS = {
    "a program outside": ("../../venv/bin/python", "{tmp}/venv/bin/python"),
    "an environment inside": ("../venv/bin/python", "{root}/venv/bin/python"),
    "data outside": ("--data=../../venv/in.txt", "--data={tmp}/venv/in.txt"),
    "a program of the repository": ("./says.py", "./says.py"),
    "another folder of it": ("../src/package", "../src/package"),
    "its own folder by a detour": ("../../repository/work/says.py",) * 2,
    "nothing that is there": ("../../results/new", "../../results/new"),
    "a name": ("python", "python"),
    "code": ("x = '../../venv'" + "/" * 5000,) * 2,
}


@pytest.mark.parametrize("name", WORDS)
def test_a_relative_path_out_of_the_repository_leads_to_the_same_file(root, tmp_path, name):
    """Files in the copy are found in the copy, and all others where the user has them."""
    word, expected = WORDS[name]
    write(tmp_path, {"venv/in.txt": "", "venv/bin/python": ""})
    write(root, {"venv/bin/python": ""})
    with temporary_folder() as temporary:
        copy = Copy.of(root, root / "work", temporary, root / "recordings")
        mapped = copy.command([word])

    assert mapped == [expected.replace("{tmp}", str(tmp_path)).replace("{root}", str(root))]


READS = {
    "its own folder": ("open('{root}/work/says.py').read()", "it read {root}/work/says.py"),
    "a link": ("open('../data/in.txt').read()", ""),
    "what is linked": ("open('{root}/data/in.txt').read()", ""),
    "another folder": ("open('/etc/hostname').read()", ""),
}


@pytest.mark.parametrize("name", READS)
def test_a_run_that_reads_outside_its_copy_is_reported(root, name):
    """A file of the user's own is named; linked files may be read."""
    line, expected = (text.replace("{root}", str(root)) for text in READS[name])
    with _linked(root) as copy:
        _run(copy, "-c", line)
        strayed = copy.strayed()

    assert strayed.startswith(expected) if expected else strayed == ""


WRITES = {
    "append": "open({0!r} + '/in.txt', 'a').write('x')",
    "update": "open({0!r} + '/in.txt', 'r+').write('x')",
    "truncate": "open({0!r} + '/in.txt', 'w')",
    "truncate by name": "os.truncate({0!r} + '/in.txt', 1)",
    "create": "open({0!r} + '/new.txt', 'x')",
    "a descriptor": "os.open({0!r} + '/in.txt', os.O_RDWR)",
    "a map": "numpy.memmap({0!r} + '/in.txt', 'u1', 'r+')[:] = 1",
    "rename over": "open('mine', 'w'); os.replace('mine', {0!r} + '/in.txt')",
    "rename away": "os.rename({0!r} + '/in.txt', 'mine')",
    "move away": "shutil.move({0!r} + '/in.txt', 'mine')",
    "copy over": "shutil.copy('says.py', {0!r} + '/in.txt')",
    "remove": "os.remove({0!r} + '/in.txt')",
    "remove a tree": "shutil.rmtree(os.path.realpath({0!r}))",
    "remove from a folder": "os.remove('in.txt', dir_fd=os.open({0!r}, os.O_RDONLY))",
    "a folder": "os.mkdir({0!r} + '/new')",
    "no folder": "os.rmdir({0!r} + '/empty')",
    "a link": "os.symlink('x', {0!r} + '/new')",
    "a hard link from it": "os.link({0!r} + '/in.txt', 'mine'); open('mine', 'w')",
    "permissions": "os.chmod({0!r} + '/in.txt', 0o777)",
    "times": "os.utime({0!r} + '/in.txt')",
    "a data base": "sqlite3.connect({0!r} + '/in.db').execute('create table t (a)')",
    "a checkpoint": "torch.save([1], {0!r} + '/in.txt')",
    "a checkpoint by a path": "torch.save(f=pathlib.Path({0!r}) / 'in.txt', obj=[1])",
}
BEHIND = ("remove a tree", "remove from a folder")  # they name what a link leads to
TRIES = """
import errno, os, pathlib, shutil, sqlite3, subprocess, sys
import numpy, torch
child = "import sys, errno\\ntry: open(sys.argv[1], 'a')\\nexcept OSError as e: sys.exit(e.errno)"
for name, line in LINES.items():
    try:
        exec(line)
    except OSError as error:
        assert error.errno == errno.EROFS, (name, error)
    except shutil.Error:
        pass
    else:
        print(name)
assert subprocess.run([sys.executable, "-c", child, FILE]).returncode == errno.EROFS
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["../data", "{root}/data", "away"])
def test_no_run_in_a_copy_writes_to_the_users_folder(root, tmp_path, folder):
    """Writes by a link or an absolute path are refused, with any function, and reported."""
    elsewhere = tmp_path / "elsewhere"
    for place in (root / "data", elsewhere):
        write(place, {"in.txt": "mine", "in.db": ""})
        (place / "empty").mkdir()
    (root / "work/away").symlink_to(elsewhere)
    before = _everything(tmp_path)
    name = folder.replace("{root}", str(root))
    skipped = BEHIND if folder == "away" else ()
    lines = {key: line.format(name) for key, line in WRITES.items() if key not in skipped}
    with _linked(root) as copy:
        copy.link(["work/away"])
        tries = f"LINES, FILE = {lines!r}, {name!r} + '/in.txt'{TRIES}"
        not_refused = _run(copy, "-c", tries)
        strayed = copy.strayed()

    assert not_refused == ""
    assert strayed.startswith("it would have written")
    assert _everything(tmp_path) == before


def test_writes_in_a_copy_work_as_in_the_original(root):
    """To its files, its folders, its own links, and files elsewhere."""
    (root / "work/latest").symlink_to("says.py")
    lines = [
        "os.makedirs('../data', exist_ok=True); os.makedirs('a/b', exist_ok=True)",
        "open('a/b/c', 'w').write('x'); os.replace('a/b/c', 'a/c'); os.remove('a/c')",
        "os.remove('latest'); os.symlink('a', 'latest'); os.chmod('says.py', 0o600)",
        "shutil.rmtree('a'); f = tempfile.NamedTemporaryFile(); f.write(b'x')",
    ]
    with _linked(root, files_now(root)) as copy:
        _run(copy, "-c", f"import os, shutil, tempfile; {'; '.join(lines)}")

        assert copy.strayed() == ""


@contextmanager
def _linked(root, names=()):
    """A copy of the last commit, or of some files, with a link to the ignored folder `data`."""
    with temporary_folder() as temporary:
        copy = Copy.of(root, root / "work", temporary, root / "recordings")
        if names:
            write_files(root, names, copy.tree)
        else:
            write_commit(root, "HEAD", copy.tree)
        copy.link(["data"])
        yield copy


def test_only_folders_with_the_mark_are_removed_from_the_temporary_folder(tmp_path, monkeypatch):
    """A folder with the name but without the mark belongs to another program."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others, ours = tmp_path / f"{PREFIX}mine", tmp_path / f"{PREFIX}left"
    write(others, {"thesis.txt": ""})
    with temporary_folder() as folder:
        shutil.copytree(folder, ours)
    with temporary_folder():
        assert not ours.exists()

    assert (others / "thesis.txt").exists()


def test_a_copy_has_the_submodules_of_a_repository(tmp_path):
    """With their present files, or with those of the commit that the parent commit records."""
    inner, root = tmp_path / "inner", tmp_path / "root"
    files = {"part.py": "old", ".gitignore": "*.bin\n"}
    for place, name in ((tmp_path / "other", "deep"), (inner, "sub"), (root, "")):
        commit(place, files)
        if name == "sub":
            _add_submodule(inner, tmp_path / "other", "deep")
        elif not name:
            _add_submodule(root, inner, "sub")
    subs = ("", "sub/", "sub/deep/")
    for sub in subs:
        write(root / sub, {"part.py": "new", "more.py": "", "data.bin": ""})
    now, old = (temporary := tmp_path / "copies") / "now", temporary / "old"
    now.mkdir(parents=True)
    old.mkdir()
    write_files(root, files_now(root), now)
    write_commit(root, git(root, "rev-parse", "HEAD"), old)

    for sub in subs:
        assert {path.name for path in (old / sub).iterdir() if path.is_file()} >= {*files}
        assert (old / sub / "part.py").read_text() == "old"
        assert (now / sub / "part.py").read_text() == "new"
        assert (now / sub / "more.py").exists()
        assert not (now / sub / "data.bin").exists()
        assert git(old / sub, "rev-parse", "HEAD") == git(root / sub, "rev-parse", "HEAD")


def _add_submodule(root, other, name):
    options = ("-c", "protocol.file.allow=always", "submodule", "-q")
    git(root, *options, "add", str(other), name)
    git(root, *options, "update", "--init", "--recursive")
    commit(root, {}, "a submodule")


def test_without_git_the_folder_is_copied(tmp_path):
    """All files except virtual environments are copied."""
    write(tmp_path, {"a/train.py": "", "b.txt": "", "v/pyvenv.cfg": "", "v/lib/x.py": ""})

    assert repository_root(tmp_path) is None
    assert sorted(files_now(tmp_path)) == ["a/train.py", "b.txt"]
