"""A command runs in a copy of its repository as in its own, and nothing of the user's changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchrepro.launch import prepared_as_it_is
from torchrepro.verification.file_notes import noted
from torchrepro.verification.repository import (
    Copy,
    files_now,
    repository_root,
    temporary_folder,
    write_commit,
    write_files,
)

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
    with copy.entered():
        program, variables = prepared_as_it_is(copy.command([sys.executable, *words]))
        done = subprocess.run(
            [program, *copy.command(words)],
            env={
                **variables,
                **copy.environment.all_variables(),
                "TORCHREPRO_RECORD": '{"folder": "/nowhere"}',
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _everything(folder: Path) -> dict[str, tuple[int, int]]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in found}


@pytest.mark.parametrize("kind", ["a commit", "as it is now"])
def test_a_command_finds_the_copy_where_its_own_would_be(root, tmp_path, kind):
    """Modules, the folder, absolute paths and git's HEAD are the copy's; nothing else changes."""
    old = git(root, "rev-parse", "HEAD")
    new = commit(root, {"src/package/__init__.py": "VALUE = 'new'\n"})
    (tmp_path / "hook-ran").unlink(missing_ok=True)
    before = _everything(root)
    with temporary_folder() as temporary:
        copy = Copy.of(root, root / "work", temporary)
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
    """What the copy has is found in the copy, and all else where the user has it."""
    word, expected = WORDS[name]
    write(tmp_path, {"venv/in.txt": "", "venv/bin/python": ""})
    write(root, {"venv/bin/python": ""})
    with temporary_folder() as temporary:
        copy = Copy.of(root, root / "work", temporary)
        mapped = copy.command([word])

    assert mapped == [expected.replace("{tmp}", str(tmp_path)).replace("{root}", str(root))]


STRAYING = {
    "reads its own folder": ("open('{root}/work/says.py').read()", "it read {root}/work/says.py"),
    "writes its own folder": ("open('{root}/x', 'w').write('')", "it wrote {root}/x in your own"),
    "writes a link": ("open('../data/in.txt', 'a').write('')", "it wrote data/in.txt, which is"),
    "removes in a link": ("__import__('os').remove('../data/in.txt')", "it wrote data/in.txt"),
    "reads a link": ("open('{root}/data/in.txt').read()", ""),
    "reads another folder": ("open('/etc/hostname').read()", ""),
}


@pytest.mark.parametrize("name", STRAYING)
def test_a_run_that_leaves_the_copy_is_heard(root, name):
    """What it reads or writes of the user's own is named; what is linked may be read."""
    line, expected = (text.replace("{root}", str(root)) for text in STRAYING[name])
    with temporary_folder() as temporary:
        copy = Copy.of(root, root / "work", temporary)
        write_commit(root, "HEAD", copy.tree)
        copy.link(["data"])
        _run(copy, "-c", line)
        strayed = copy.strayed()

    assert strayed.startswith(expected) if expected else strayed == ""


def test_a_copy_has_the_submodules_of_a_repository(tmp_path):
    """It has their files as they are now, or those of the commit that the commit names."""
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
    """All files but those of virtual environments are the folder's."""
    write(tmp_path, {"a/train.py": "", "b.txt": "", "v/pyvenv.cfg": "", "v/lib/x.py": ""})

    assert repository_root(tmp_path) is None
    assert sorted(files_now(tmp_path)) == ["a/train.py", "b.txt"]
