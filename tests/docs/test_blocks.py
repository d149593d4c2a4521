"""What the README and the documentation tell a reader to type does what they say.

A page is a program: its blocks run in order, in a folder of their own. `blocks.py` says which
comments steer that.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .blocks import KEYS, PAGES, REPO, RUN, SHOWN, block_named, blocks, every_block

TIMEOUT = 600
_RUN_BY_CI = re.findall(r" run_block (\S+)", (REPO / ".ci" / "run").read_text(encoding="utf-8"))
_TESTS = "\n".join(
    path.read_text(encoding="utf-8")
    for path in (REPO / "tests").rglob("test_*.py")
    if path != Path(__file__)
)
SETUP = "main"
"""The name of the block that a newcomer runs, as the README tells; CI installs another way."""

PIECES = {
    "a model": """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    "a loader": """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0).reshape(16, 4), torch.arange(16.0).reshape(16, 1))
loader = DataLoader(data, batch_size=4)
""",
    "train": """
import torch
def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
""",
    "a profile": """
import torchrepro
torchrepro.apply("seed-only")
""",
    "a writer": """
from torch.utils.tensorboard import SummaryWriter
writer = SummaryWriter("tensorboard")
""",
}
"""What a block of Python may take as given, by name; each piece is a program in itself."""


def _pages():
    """Return each page with something to run; one that starts processes is slow."""
    found = []
    for page in PAGES:
        to_run = [block for block in blocks(page) if block.is_run_with_its_page]
        starts = any(block.language in ("sh", "console") for block in to_run)
        if any(block.language in RUN for block in to_run):
            name = str(page.relative_to(REPO))
            found.append(pytest.param(page, id=name, marks=[pytest.mark.slow] * starts))
    return found


@pytest.fixture
def reader(clean_environment, tmp_path):
    """Run a shell command as a reader who has installed torchrepro, in the folder of the page."""
    home = tmp_path.parent / f"{tmp_path.name}-home"
    home.mkdir()
    own = {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), clean_environment["PATH"]]),
        "HOME": str(home),
        "COLUMNS": "100",
        "CI": "",  # a reader sits at a terminal, wherever this runs
    }

    def run(command):
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env={**clean_environment, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )

    return run


def _python(block):
    names = [name.strip() for name in block.marks.get("given", "").split(",") if name]
    return "\n".join([*(PIECES[name] for name in names), block.text])


def without_gaps(text):
    """Return the lines without blank ones: a longer path can take the gaps out of an answer."""
    return [line for line in text if line.strip()]


def shows(expected, printed):
    """Whether lines are those expected, where `...` stands for anything and a number for any."""
    if not expected:
        return not printed
    first, *rest = expected
    if first.strip() == "...":
        return any(shows(rest, printed[at:]) for at in range(len(printed) + 1))
    number = r"[0-9a-f]*[0-9][0-9a-f.,:]*(?:(?<=e)-[0-9]+[.,:]*)?"
    pattern = "".join(
        ".*" if part == "..." else number if re.fullmatch(number, part) else re.escape(part)
        for part in re.split(rf"(\.\.\.|\b{number})", first.rstrip())
    )
    return bool(printed and re.fullmatch(pattern, printed[0].rstrip())) and shows(rest, printed[1:])


def _dialogue(block):
    pairs: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            pairs.append((line[2:], []))
        elif pairs[-1][0].endswith("\\"):
            command, said = pairs.pop()
            pairs.append((f"{command}\n{line}", said))
        else:
            pairs[-1][1].append(line)
    return pairs


def _check(block, status, output):
    assert status == int(block.marks.get("ends", 0)), f"{block.place}\n{output}"


@pytest.mark.parametrize("page", _pages())
def test_a_page_does_what_it_says(page, reader, fork_python, tmp_path):
    """Each block ends with the status that the page tells, and prints what the page shows."""
    for block in blocks(page):
        if not block.is_run_with_its_page:
            continue
        if "folder" in block.marks:
            shutil.copytree(REPO / block.marks["folder"], tmp_path, dirs_exist_ok=True)
        if "file" in block.marks:
            path = tmp_path / block.marks["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{block.text}\n", encoding="utf-8")
        elif "steps" in block.marks:
            jobs = yaml.safe_load(block.text)["jobs"].values()
            for step in (step for job in jobs for step in job["steps"]):
                if "run" in step and not step["run"].startswith("pip "):
                    done = reader(step["run"])
                    _check(block, done.returncode, done.stdout)
        elif block.language == "python":
            done = fork_python("-c", _python(block))
            _check(block, done.returncode, done.stdout + done.stderr)
        elif block.language == "sh":
            done = reader(block.text)
            _check(block, done.returncode, done.stdout)
        else:
            for command, expected in _dialogue(block):
                done = reader(command)
                _check(block, done.returncode, done.stdout)
                said = without_gaps(done.stdout.splitlines())
                assert shows(without_gaps(expected), said), f"{block.place}\n{done.stdout}"


def test_every_block_is_run_or_says_why_not():
    """Each block has a language and marks that exist, and each mark is one that something obeys."""
    for block in every_block():
        assert block.language in (*RUN, *SHOWN), f"{block.place}: language {block.language!r}"
        assert set(block.marks) <= set(KEYS), f"{block.place}: {sorted(block.marks)}"
        if "test" in block.marks:
            name = block.marks["test"]
            assert block_named(name) == block
            assert f'documented("{name}")' in _TESTS, f"{block.place}: no test runs it"
        if "run" in block.marks:
            name = block.marks["run"]
            assert name == SETUP or name in _RUN_BY_CI, f"{block.place}: CI runs it not"


def test_every_block_that_ci_runs_is_there():
    """`.ci/run` finds each block that it names, once, where it looks for it."""
    places = (REPO / "README.md", REPO / "CONTRIBUTING.md")
    named = [block.marks.get("run") for place in places for block in blocks(place)]

    assert _RUN_BY_CI
    assert [named.count(name) for name in [SETUP, *_RUN_BY_CI]] == [1] * (len(_RUN_BY_CI) + 1)


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        (["loss 0.25", "..."], ["loss 0.5", "more"], True),
        (["A 0.25, B 0.5"], ["A 2.5e-05, B 0.5"], True),
        (["...", "done"], ["a", "b", "done"], True),
        (["not the same"], ["the same"], False),
        (["in ... of them"], ["in some of them"], True),
        (["one"], ["one", "two"], False),
    ],
)
def test_a_page_that_shows_other_output_is_found(expected, printed, same):
    """Words have to be those that are printed; numbers and `...` stand for others."""
    assert shows(expected, printed) == same
