"""The workflows and actions of the repository: pinned, with few rights, and run as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[2]
WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))
ACTION = REPO / ".github" / "actions" / "check" / "action.yml"
PINNED = re.compile(r"uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
USES = re.compile(r"^ *(?:- )?(uses: .+)$", re.MULTILINE)


def _read(path):
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # `on` stays a text


RELEASE = _read(REPO / ".github" / "workflows" / "release.yml")


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, ACTION], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_every_action_is_pinned_to_a_commit(path):
    """An action is named by a commit, which nobody can move, and the version of it beside."""
    uses = USES.findall(path.read_text(encoding="utf-8"))

    assert uses
    assert [line for line in uses if not PINNED.fullmatch(line)] == []


def test_an_action_has_one_version_in_all_workflows():
    """Two workflows do not use two commits of one action."""
    lines = {
        line for path in [*WORKFLOWS, ACTION] for line in USES.findall(path.read_text("utf-8"))
    }

    assert len({line.partition("@")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_only_read_the_repository(path):
    """No workflow or job may write, except that the upload may ask the index for a password."""
    workflow = _read(path)
    rights = {name: job.get("permissions") for name, job in workflow["jobs"].items()}

    assert workflow["permissions"] == {"contents": "read"}
    assert {name: asked for name, asked in rights.items() if asked} == (
        {"publish": {"id-token": "write"}} if path.name == "release.yml" else {}
    )


def test_a_release_uploads_the_tested_files_after_a_person_agreed():
    """The files are built once; the upload waits for every test, a tag and a reviewer."""
    jobs = RELEASE["jobs"]
    steps = {name: [str(step) for step in job["steps"]] for name, job in jobs.items()}
    builds = [name for name in steps if "python -m build" in "".join(steps[name])]

    assert RELEASE["on"]["push"] == {"tags": ["v*"]}
    assert builds == ["build"]
    assert (jobs["test"]["needs"], jobs["publish"]["needs"]) == ("build", "test")
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["publish"]["if"] == "github.event_name == 'push'"
    assert "checkout" not in "".join(steps["publish"])
    assert "password" not in "".join(steps["publish"])
    assert "twine check --strict" in "".join(steps["build"])


def test_a_release_is_tested_on_each_python_of_ci():
    """The built files are tried on the versions of Python that CI tries, sdist and wheel."""
    ci = _read(REPO / ".github" / "workflows" / "ci.yml")
    matrix = RELEASE["jobs"]["test"]["strategy"]["matrix"]

    assert matrix["python"] == ci["jobs"]["versions"]["strategy"]["matrix"]["python"]
    assert [Path(name).suffix for name in matrix["file"]] == [".whl", ".gz"]


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_no_text_from_outside_is_pasted_into_a_script(path):
    """A script reads an input as a variable: pasted text could be another command."""
    content = _read(path)
    jobs = content["jobs"].values() if "jobs" in content else [content["runs"]]
    scripts = [step["run"] for job in jobs for step in job["steps"] if "run" in step]

    assert scripts
    assert [s for s in scripts if re.search(r"\$\{\{ *(inputs|github\.(event|head))", s)] == []


def test_the_action_restores_nothing():
    """The action installs in each run: a cache would hide a new version."""
    runs = _read(ACTION)["runs"]

    assert runs["using"] == "composite"
    assert not re.search(r"cache", str(runs))


TRAIN = """
import torch
torch.manual_seed(0)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    net(torch.ones(1, 2)).square().sum().backward()
    optimizer.step()
"""


@pytest.fixture
def check(execute, tmp_path):
    """Run the step of the action that checks, with these inputs; its page is in `tmp_path`."""
    [script] = [step["run"] for step in _read(ACTION)["runs"]["steps"] if step["name"] == "Check"]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"

    def check(command):
        env = {"LOCK": "repro.lock", "COMMAND": command, "PATH": path}
        env["PAGE"] = str(tmp_path / "page.html")
        return execute("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script, env=env)

    return check


@pytest.mark.slow
def test_the_action_checks_a_lock_and_its_command(check, execute, tmp_path):
    """It checks the environment alone, or a command too, and a failed check has its page."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN, encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    torchrepro = Path(sys.executable).with_name("torchrepro")
    locked = execute(torchrepro, "lock", "seed-only", "--", "python", "train.py")
    assert locked.returncode == 0, locked.stderr

    assert "is met" in check("").stdout
    same = check("python 'train.py'")
    assert (same.returncode, "same results" in same.stdout) == (0, True), same.stderr

    program.write_text(TRAIN.replace("square", "exp"), encoding="utf-8")
    changed = check("python train.py")

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert changed.returncode == 1
    assert "results differ from step 0" in changed.stdout
    assert all(line in page for line in changed.stdout.splitlines())
