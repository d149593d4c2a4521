"""If results differ from a lock, running the locked code shows the cause."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from torchrepro.lock.repository import commit_with

from ..verification.repositories import git
from .training import COMMAND

pytestmark = pytest.mark.slow

LAYERS = "        self.first = torch.nn.Linear(1024, 8)\n"
SECOND = "        self.second = torch.nn.Linear(8, 1)\n"
CODE = {
    "one op": ("model.py", "(batch).tanh()", "(batch).relu()", "model.py:15"),
    "an order of layers": ("model.py", LAYERS + SECOND, SECOND + LAYERS, "model.py:"),
    "a learning rate": ("model.py", "LR = 0.1", "LR = 0.2", "train.py:13"),
    "a seed": ("model.py", "SEED = 3", "SEED = 4", ""),
    "a reduction": ("model.py", "square().mean()", "square().sum()", "model.py:19"),
    "a step more": ("train.py", "range(3)", "range(4)", ""),
    "a renamed variable": ("model.py", "hidden", "renamed", None),
    "a comment": ("model.py", "# sums of", "# a comment, and sums of", None),
    "other ops, equal numbers": ("model.py", "score.square()", "(score * score)", None),
    "a file that nothing reads": ("README.md", "", "text", None),
}
"""A file, a text in it, what replaces it, and the line that is named; None where numbers stay."""

OF_EACH_KIND = ("an order of layers", "a seed", "a renamed variable")
"""Numbers change at a line, numbers change before any op, and numbers stay."""

ENVIRONMENTS = {
    "as it is": ({}, None),
    "other kernels": ({"ATEN_CPU_CAPABILITY": "default"}, "environment"),
    "another number of threads": ({"OMP_NUM_THREADS": "1"}, "environment"),
    "another folder of modules": ({"PYTHONPATH": "{outside}/other"}, "unknown"),
    "a variable that changes nothing": ({"OMP_PROC_BIND": "false"}, None),
}
"""Variables, and who changed the numbers of the same code; a folder of modules is in no lock."""


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_changes_of_code_and_environment_are_distinguished(training, monkeypatch, environment):
    """Ten changes: none, code, environment, or both; three changes in other environments."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    training.lock()
    training.commit({"README.md": ""})
    variables, changed_by = ENVIRONMENTS[environment]
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("{outside}", str(training.folder.parent)))
    found, expected, places = {}, {}, {}
    for name in CODE if environment == "as it is" else OF_EACH_KIND:
        file, before, after, line = CODE[name]
        training.change(file, before, after)
        training.commit()
        status, said = training.check()
        training.git("reset", "-q", "--hard", "HEAD~1")
        found[name] = status, said["same"], said.get("who")
        who = changed_by
        if line is not None:
            who = {None: "code", "environment": "both"}.get(changed_by, changed_by)
        expected[name] = 1 if who else 0, who is None, who
        if line:
            places[name] = line, said["where"]["source"]

    assert found == expected
    wrong = {name: place for name, place in places.items() if place[0] not in place[1]}
    assert wrong == {}


def _squash(training):
    training.git("checkout", "-q", "-b", "feature")
    training.change("model.py", "SEED = 3", "SEED = 5")
    training.commit()
    training.lock()
    training.commit({"notes.md": "more"})
    training.git("checkout", "-q", "main")
    training.git("merge", "-q", "--squash", "feature")
    training.commit()
    training.git("branch", "-q", "-D", "feature")


def _merge(training):
    training.git("checkout", "-q", "-b", "feature")
    training.change("model.py", "SEED = 3", "SEED = 5")
    training.lock()
    training.commit()
    training.git("checkout", "-q", "main")
    training.commit({"notes.md": "more"})
    training.git("merge", "-q", "--no-edit", "feature")


def _same(training):
    training.lock()
    training.commit()


def _untracked(training):
    training.write({"lying/about.txt": "text", "about.py": ""})
    training.lock()
    training.git("add", "repro.lock")
    training.git("commit", "-qm", "lock")


def _uncommitted(training):
    """The commit of the locked code exists, and the lock itself is not committed."""
    training.lock()


HISTORIES = (_same, _merge, _squash, _untracked, _uncommitted)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda each: each.__name__.strip("_"))
def test_the_commit_of_a_lock_is_found_by_its_content(training, history):
    """The locked code is found after squashes, rebases and merges of its commit."""
    history(training)
    (section,) = training.contents["machines"].values()
    training.change("model.py", "LR = 0.1", "LR = 0.2")
    training.commit()
    training.change("model.py", "LR = 0.2", "LR = 0.3")
    found = commit_with(training.folder, section["files"])

    assert set(section["files"]) == {"train.py", "model.py", "plain.yaml"}
    blobs = {name: training.git("rev-parse", f"{found}:{name}") for name in section["files"]}
    assert blobs == section["files"]
    if history in (_squash, _untracked):
        status, said = training.check()
        assert (status, said["who"], said["why"]) == (1, "code", "")


LAYOUTS = {
    "a src layout": ("src", ".", "python", "train.py"),
    "a subfolder": (".", "work", "python", "train.py"),
    "an absolute path": (".", ".", "python", "{folder}/train.py"),
    "a relative interpreter": (".", "work", "relative python", "train.py"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_locked_code_runs_with_its_own_modules_and_paths(training, monkeypatch, layout):
    """Modules, the working directory and absolute paths belong to the locked code."""
    place, folder, python, script = LAYOUTS[layout]
    inside = training.folder / folder
    inside.mkdir(exist_ok=True)
    (training.folder / place).mkdir(exist_ok=True)
    training.git("mv", "-k", "model.py", f"{place}/model.py")
    for name in ("train.py", "plain.yaml"):
        training.git("mv", "-k", name, f"{folder}/{name}")
    training.commit()
    monkeypatch.chdir(inside)
    path = [os.environ["PYTHONPATH"], str(training.folder / place)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    program = sys.executable if python == "python" else os.path.relpath(sys.executable)
    command = (program, script.replace("{folder}", str(training.folder)))
    lock = training.lock(command=command)
    assert lock[0] == 0, lock
    training.commit()
    before = {path: path.stat().st_mtime_ns for path in training.folder.rglob("*.*")}
    training.change(f"{place}/model.py", "LR = 0.1", "LR = 0.2")
    status, said = training.check(command=command)
    after = {path: path.stat().st_mtime_ns for path in before}

    assert (status, said["who"], said["why"]) == (1, "code", "")
    changed = {path.name for path in before if before[path] != after[path]}
    assert {name for name in changed if not name.endswith(".pyc")} == {"model.py"}


def _no_git(training):
    shutil.rmtree(training.folder / ".git")
    training.lock()


def _nobody_has_it(training):
    training.change("model.py", "SEED = 3", "SEED = 5")
    training.lock()
    training.git("checkout", "-q", "model.py")


def _shallow(training):
    training.lock()
    training.commit()
    training.change("model.py", "SEED = 3", "SEED = 5")
    training.commit()
    clone = training.folder.parent / "clone"
    git(training.folder.parent, "clone", "-q", "--depth", "1", f"file://{training.folder}", "clone")
    training.folder = clone
    os.chdir(clone)


def _cannot_run(training):
    training.change("model.py", "import torch", "import torch, gone")
    training.write({"../library/gone.py": ""})
    training.lock()
    training.commit()
    training.change("model.py", "import torch, gone", "import torch")
    (training.folder.parent / "library/gone.py").unlink()


def _reads_its_own_folder(training):
    training.change("train.py", "import acme", f"open('{training.folder}/model.py')\nimport acme")
    training.lock()
    training.commit()


def _writes_what_is_linked(training):
    training.write({"data.log": "0"})
    read = "open('data.log').read()"
    training.change("train.py", "import acme", f"{read}\nimport acme")
    training.lock()
    training.change("train.py", read, f"{read}; open('data.log', 'a').write('x')")
    training.lock()
    training.commit()
    training.change("train.py", "; open('data.log', 'a').write('x')", "")


def _with_submodule(training):
    """Let the program read two files of a submodule; git ignores one of them."""
    other = training.folder.parent / "other-repository"
    training.git("init", "-q", str(other))
    (other / "rate.txt").write_text("0.1")
    (other / ".gitignore").write_text("*.bin\n")
    git(other, "add", "-A")
    git(other, "commit", "-qm", "part")
    training.git("-c", "protocol.file.allow=always", "submodule", "-q", "add", str(other), "sub")
    (training.folder / "sub/data.bin").write_text("ignored")
    training.change("model.py", "LR = 0.1", "LR = float(open('sub/rate.txt').read())")
    training.change("train.py", "import acme", "open('sub/data.bin')\nimport acme")
    training.commit()
    training.lock()
    training.commit()


def _submodule_not_there(training):
    _with_submodule(training)
    training.git("submodule", "-q", "deinit", "-f", "sub")
    training.change("model.py", "float(open('sub/rate.txt').read())", "0.1")
    training.change("train.py", "open('sub/data.bin')", "")


CANNOT_TELL = {
    _no_git: "git finds no repository here",
    _nobody_has_it: "no commit here has the files of the lock",
    _shallow: "the clone is shallow; git fetch --unshallow",
    _cannot_run: "cannot run here: ModuleNotFoundError: No module named 'gone'",
    _reads_its_own_folder: "did not stay in its checkout: it read",
    _writes_what_is_linked: "which is linked to your own",
    _submodule_not_there: "the submodule sub is not checked out; git submodule update --init",
}


@pytest.mark.parametrize("case", CANNOT_TELL, ids=lambda each: each.__name__.strip("_"))
def test_an_unknown_cause_is_reported_with_the_reason(training, case):
    """The results differ, so the status is 1; the cause is unknown, and a reason is given."""
    case(training)
    training.change("model.py", "(batch).tanh()", "(batch).relu()")
    status, said = training.check()

    assert (status, said["same"], said["who"]) == (1, False, "unknown")
    assert CANNOT_TELL[case] in said["why"]


@pytest.mark.parametrize("change", ["the submodule", "model.py"])
def test_the_locked_code_has_its_submodules(training, change):
    """Submodules have the commits that the locked commit names; ignored files are linked."""
    _with_submodule(training)
    if change == "the submodule":
        training.write({"sub/rate.txt": "0.2"})
        git(training.folder / "sub", "commit", "-qam", "faster")
        training.commit()
    else:
        training.change("model.py", "(batch).tanh()", "(batch).relu()")
    status, said = training.check()

    (section,) = training.contents["machines"].values()
    assert "sub/rate.txt" in section["files"]
    assert "sub/data.bin" not in section["files"]
    assert (status, said["who"], said["why"]) == (1, "code", "")


def test_the_cause_is_printed(training, monkeypatch):
    """The answer names the cause, the line, and the likeliest difference of the environment."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    training.lock()
    training.commit()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    environment = training.run("check", "repro.lock", "--", *COMMAND)[1].splitlines()
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    training.change("model.py", "(batch).tanh()", "(batch).relu()")
    code = training.run("check", "repro.lock", "--", *COMMAND)[1].splitlines()

    assert environment[0].startswith("results differ from step 0: ")
    assert environment[1].split(maxsplit=1)[1].startswith("the environment: the locked code")
    assert environment[2].strip().startswith("exported ATEN_CPU_CAPABILITY (not set -> default) is")
    assert code[1].split(maxsplit=1)[1].startswith("your change: the locked code gives")
    assert code[2].split(maxsplit=1) == ["where", "model.py:15  Net  aten::relu, forward of step 0"]
