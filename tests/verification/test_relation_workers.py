"""A program computes the same with any number of loader workers, or the line that has a say is
named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from torchrepro.relations.relation import relate

pytestmark = pytest.mark.usefixtures("own_temporary")

HEAD = """
import os, random, time
import numpy as np
import torch
from concurrent.futures import ThreadPoolExecutor, as_completed
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
np.random.seed(0); random.seed(0); torch.manual_seed(0)
"""
TRAINING = """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for batch in loader:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
DATASET = """
class Rows(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)
    def __len__(self):
        return 8
    def __getitem__(self, index):
        row = torch.full((2,), float(index))
        {}
loader = DataLoader(Rows(), batch_size=2{})
"""
STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        {}
        for number in range(first, 8, step):
            yield torch.full((2,), float(number))
loader = DataLoader(Stream(), batch_size=None)
"""
NO_LOADER = "loader = [torch.rand(2) for _ in range(2)]"
BY_WORKER = (
    "info = get_worker_info(); first, step = (info.id, info.num_workers) if info else (0, 1)"
)
FAULTS = {
    "global numpy": (DATASET, "return row + np.random.rand()  # here", "numpy.random.rand"),
    "order by completion": (
        DATASET.replace("{})", "{}, in_order=False)  # here"),
        "time.sleep(0.5 * (index < 2)); return row",
        "in_order=False",
    ),
    "a generator shared by fork": (DATASET, "return row + self.rng.random()  # here", "self.rng"),
    "the worker's number": (
        DATASET,
        "return row + (0 if get_worker_info() is None else get_worker_info().id)  # here",
        "get_worker_info",
    ),
    "the order of files": (
        DATASET,
        """Path("seen").mkdir(exist_ok=True)
        Path("seen", f"{os.getpid()}-{index}").touch()
        mine = [name for name in os.listdir("seen") if name.startswith(str(os.getpid()))]  # here
        return row + len(mine)""",
        "os.listdir",
    ),
    "not split by worker": (
        STREAM.replace("(IterableDataset):", "(IterableDataset):  # here"),
        "first, step = 0, 1",
        "does not split itself by worker",
    ),
}
CLEAN = {
    "shuffled": (DATASET.format("return row", ", shuffle=True"), None),
    "a generator for each sample": (
        DATASET.format("return row + np.random.default_rng(index).random()", ", num_workers=1"),
        "seed-only",
        "dataloader.num_workers=1",
    ),
    "a stream that splits itself": (STREAM.format(BY_WORKER), None),
    "global numpy, seeded for each sample": (
        DATASET.format("return row + np.random.rand()", ", shuffle=True"),
        "seed-only",
    ),
}


def _program(text: str) -> list[str]:
    Path("train.py").write_text(f"{HEAD}from pathlib import Path\n{text}{TRAINING}")
    return [sys.executable, "train.py"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", FAULTS)
def test_what_the_workers_change_is_named_by_its_line(name: str) -> None:
    """The line of the dataset, or of the loader, is named through which workers have a say."""
    template, line, called = FAULTS[name]
    command = _program(template.format(line, ""))
    lines = Path("train.py").read_text().splitlines()
    here = next(number for number, text in enumerate(lines, 1) if "# here" in text)

    found = relate("workers", None, command)

    assert found.status == 1
    assert found.verdict.first.source.endswith(f"train.py:{here}")
    assert called in found.verdict.advice.cause


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", CLEAN)
def test_what_does_not_depend_on_workers_agrees(name: str) -> None:
    """A program that computes the same with 0 and with 2 workers is no cause for alarm."""
    text, profile, *overrides = CLEAN[name]

    found = relate("workers", profile, _program(text), overrides=overrides)

    assert (found.status, [side.name for side in found.sides]) == (0, ["0 workers", "2 workers"])
    assert all(side.verdict.compared.steps >= 8 for side in found.sides)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("relation", "line", "why"),
    [
        ("workers", NO_LOADER, "iterates no loader"),
        ("compile", NO_LOADER, "compiles nothing"),
        ("workers", f"{DATASET.format('return row', '')}torch.seed()", "not agree with itself"),
    ],
)
def test_where_nothing_can_be_said_the_status_is_4(
    command, relation: str, line: str, why: str
) -> None:
    """Without a loader, a compiled region, or a plain program that agrees with itself."""
    words = ["verify", "--relation", relation, "--", *_program(line)]

    status, out, _ = command(*words)
    to_bisect, *_ = command(*words[:3], "--bisect", *words[3:])

    assert (status, to_bisect) == (4, 125)
    assert out.startswith("cannot tell: ")
    assert why in out


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_answer_is_one_json_document(command) -> None:
    """--json has the verdict that decides, the relation, and each side."""
    program = _program(DATASET.format("return row + torch.initial_seed() % 7", ""))

    status, out, _ = command("verify", "--relation", "workers", "--json", "--", *program)

    found = json.loads(out)
    assert (status, found["same"], found["relation"]) == (1, False, "workers")
    assert found["first"]["phase"] == "data"
    assert found["advice"]["cause"].startswith("torch.initial_seed at train.py:")
    assert [side["same"] for side in found["sides"]][-1] is False


@pytest.mark.parametrize(
    "words",
    [
        ("--relation", "workers", "--stress"),
        ("--relation", "workers", "--checkpoint", "*.pt"),
        ("--checkpoint", "*.pt"),
        ("--relation", "worker"),
        ("--relation", "resume", "--rtol", "0.1"),
        ("--relation", "compile", "--ignore", "train.py:3"),
    ],
)
def test_options_of_another_question_are_refused(command, words: tuple[str, ...]) -> None:
    """An option that the relation asked for has no use for is a wrong request."""
    status, *_ = command("verify", *words, "--", sys.executable, "-c", "pass")

    assert status == 2
