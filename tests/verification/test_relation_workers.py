"""A program computes the same with any number of loader workers, or the cause is named.

Faults and clean programs are each a dataset and a call of `main`, for every start method.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from torchrepro.application.launch import program_and_recording_environment
from torchrepro.trace.reader import read_run
from torchrepro.trace.request import VARIABLE, RecordingRequest
from torchrepro.verification import runner
from torchrepro.verification.at_start import OBSERVED
from torchrepro.verification.perturbations import RunEnvironment
from torchrepro.verification.relations.relation import relate
from torchrepro.verification.runner import RunRequest

pytestmark = pytest.mark.usefixtures("own_temporary")

PROGRAM = """
import os, random, time
import numpy as np
import numpy.random
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info
scale = 1.0
class Rows(Dataset):
    gain = 1.0
    def __init__(self):
        draw = np.random.RandomState(0)  # of no worker
        self.rows = torch.from_numpy(draw.rand(8, 2)).float()
        self.level, self.table = 1.0, [1.0]
        self.rng = np.random.default_rng(0)
    def __len__(self):
        return 8
    def __getitem__(self, i):
        row = self.rows[i] * scale * self.gain
        {sample}
class Stream(IterableDataset):
    def __iter__(self):
        {stream}
        for number in range(first, 8, step):
            yield torch.full((2,), float(number))
def seed_numpy(worker):
    np.random.seed(torch.initial_seed() % 2**32)
def raise_level(worker):  # init
    get_worker_info().dataset.level = 3.0
def main(dataset, change=lambda epoch: None, **options):
    np.random.seed(0); random.seed(0); torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    how = dict(batch_size=4, num_workers={workers}, multiprocessing_context="{method}")
    loader = DataLoader(dataset, **how | options)
    for epoch in range(2):
        change(epoch)
        for batch in loader:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
if __name__ == "__main__":
    {run}
"""
BY_WORKER = (
    "info = get_worker_info(); first, step = (info.id, info.num_workers) if info else (0, 1)"
)
PLAIN = "return row"
RUN = "main(Rows())  # run"
CLEAN = {
    "shuffled": (PLAIN, "main(Rows(), shuffle=True)"),
    "workers that live on": (PLAIN, "main(Rows(), persistent_workers=True)"),
    "batches that are all equal, in any order": (
        "return torch.ones(2)",
        "main(Rows(), in_order=False)",
    ),
    "numpy seeded for each sample": ("return row + np.random.default_rng(i).random()", RUN),
    "torch seeded for each sample": (
        "return row + torch.randn(2, generator=torch.Generator().manual_seed(i))",
        RUN,
    ),
    "Python seeded for each sample": ("return row + random.Random(i).random()", RUN),
    "a stream that splits itself": (PLAIN, "main(Stream(), batch_size=None)"),
    "an attribute set before new workers": (
        "return row * self.level",
        "main(data := Rows(), lambda epoch: setattr(data, 'level', 1.0 + epoch))",
    ),
    "a subset, and workers that seed numpy": (
        PLAIN,
        "main(Subset(Rows(), [3, 1, 2, 0]), batch_size=2, worker_init_fn=seed_numpy)",
    ),
    "the clock and the process, to no effect": ("time.time(), os.getpid(); return row", RUN),
}
"""Programs that do not depend on workers: a sample, and a call of `main`."""

FAULTS = {
    "global numpy": ("return row + np.random.rand()", RUN, "numpy's global generator at", "sample"),
    "global Python": ("return row + random.random()", RUN, "Python's global generator", "sample"),
    "global torch": ("return row + torch.rand(())", RUN, "torch's global generator at", "sample"),
    "a generator that is copied": ("return row + self.rng.random()", RUN, "rng of Rows", "sample"),
    "numpy, which workers seed": (
        *("return row + np.random.rand()", "main(Rows(), worker_init_fn=seed_numpy)"),
        *("numpy's global generator at", "sample"),
    ),
    "an attribute set while workers live": (
        "return row * self.level",
        "data = Rows(); main(data, lambda epoch: setattr(data, 'level', 1.0 + epoch),"
        " persistent_workers=True)",
        *("after the persistent workers began", "run"),
    ),
    "a worker_init_fn that changes the data": (
        *("return row * self.level", "main(Rows(), worker_init_fn=raise_level)"),
        *("worker_init_fn: raise_level at", "init"),
    ),
    "the worker's number": (
        "return row + (0 if get_worker_info() is None else get_worker_info().id + 1)",
        *(RUN, "torch.utils.data.get_worker_info at", "sample"),
    ),
    "a seed of each worker": (
        *("return row + torch.initial_seed() % 7", RUN, "torch.initial_seed at", "sample"),
    ),
    "the process that loads": (
        "return row + (os.getpid() == int(os.environ['MAIN']))",
        *("os.environ['MAIN'] = str(os.getpid()); main(Rows())", "os.getpid at", "sample"),
    ),
    "not split by worker": (
        *(PLAIN, "main(Stream(), batch_size=None)", "does not split itself by worker", ""),
    ),
    "what each copy of the dataset keeps": (
        *("self.table.append(1.0); return row * len(self.table)", RUN, "Not known.", ""),
    ),
}
"""Programs that depend on workers: likewise, with words of the cause, and the named line."""

NOT_FORKED = {
    "a global of the main process": (
        *("return row", "scale = 2.0; main(Rows())", "another value of scale than", ""),
    ),
    "an attribute of the class": (
        *("return row", "Rows.gain = 2.0; main(Rows())", "gain of Rows", ""),
    ),
}

NO_LOADER = "torch.ones(2).sum()"

START_METHODS = ("fork", "spawn", "forkserver")


def _program(sample: str, run: str, method: str = "fork", stream: str = BY_WORKER) -> list[str]:
    preload = "import multiprocessing; multiprocessing.set_forkserver_preload(['torch']); "
    run = preload * (method == "forkserver") + run
    workers = 2 if method == "fork" else 1  # others import torch, which takes seconds
    text = PROGRAM.format(sample=sample, run=run, method=method, stream=stream, workers=workers)
    Path("train.py").write_text(text, encoding="utf-8")
    return [sys.executable, "train.py"]


def _line(of: str) -> str:
    text = {"sample": "{sample}", "init": "# init", "run": "{run}"}[of]
    lines = PROGRAM.splitlines()
    return f"train.py:{next(at for at, each in enumerate(lines, 1) if text in each)}"


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "fork") for name in FAULTS),
        *((name, "forkserver") for name in ("a generator that is copied", *NOT_FORKED)),
        ("an attribute of the class", "spawn"),
    ],
)
def test_the_effect_of_workers_is_named_by_the_trial_that_removes_it(
    name: str, method: str
) -> None:
    """The cause is a change that made runs agree, or a note of the runs, or unknown."""
    sample, run, words, of = (FAULTS | NOT_FORKED)[name]
    undivided = {"stream": "first, step = 0, 1"} if name == "not split by worker" else {}

    related = relate("workers", RunRequest(_program(sample, run, method, **undivided)))

    assert related.status == 1
    assert related.verdict.advice, str(related)
    cause = related.verdict.advice.cause
    assert words in cause
    if of:
        assert re.search(rf"{_line(of)}\b", cause)
        assert related.verdict.first.source.endswith(_line(of))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "fork") for name in CLEAN),
        *(("workers that live on", method) for method in START_METHODS[1:]),
    ],
)
def test_a_program_that_does_not_depend_on_workers_agrees(name: str, method: str) -> None:
    """It computes the same with 0 and with 2 workers, and there is no false alarm."""
    sample, run = CLEAN[name]

    related = relate("workers", RunRequest(_program(sample, run, method)))

    assert (related.status, [variant.name for variant in related.variants]) == (
        0,
        ["0 workers", "2 workers"],
    )
    assert all(variant.verdict.compared.steps >= 4 for variant in related.variants)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("options", ["", ", persistent_workers=True, in_order=False"])
@pytest.mark.parametrize("method", START_METHODS)
def test_loader_workers_are_not_compared_as_processes(method: str, options: str) -> None:
    """Recordings and notes are from the main process, for every start method."""
    command = _program("return torch.nn.Identity()(row)", f"main(Rows(){options})", method)
    request = RecordingRequest(str(Path("traces").absolute()))
    folder = Path("noted").absolute()
    folder.mkdir()
    noted = {
        "verification.relations.state_observer:note_state": {
            "folder": str(folder),
            "tree": str(Path.cwd()),
        },
        "verification.relations.region_observer:note_regions": {"folder": str(folder)},
    }
    program, variables = program_and_recording_environment(command)
    environment = RunEnvironment(in_process={OBSERVED: noted})
    variables |= {**environment.all_variables(), VARIABLE: request.to_variable()}

    status = runner.run_to_end(program, command, variables, Path("log"), None)

    assert status == 0, Path("log").read_text(encoding="utf-8")
    assert [trace.meta["process"] for trace in read_run("traces")] == ["MainProcess"]
    assert len(list(folder.iterdir())) == 1


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("relation", "line", "why"),
    [
        ("workers", NO_LOADER, "iterates no torch DataLoader"),
        ("compile", NO_LOADER, "never calls torch.compile"),
        (
            "workers",
            "main(Rows(), lambda epoch: torch.seed(), shuffle=True)",
            "not agree with itself",
        ),
    ],
)
def test_without_an_answer_the_status_is_4(command, relation: str, line: str, why: str) -> None:
    """Without a loader, a compiled region, or a plain program that agrees with itself."""
    words = ["verify", "--relation", relation, "--", *_program(PLAIN, line)]

    status, out, _ = command(*words)
    to_bisect, *_ = command(*words[:3], "--bisect", *words[3:])

    assert (status, to_bisect) == (4, 125)
    assert out.startswith("cannot tell: ")
    assert why in out


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_answer_is_one_json_document(command) -> None:
    """--json has the deciding verdict, the relation, and each variant."""
    program = _program("return row + torch.initial_seed() % 7", RUN)

    status, out, _ = command("verify", "--relation", "workers", "--json", "--", *program)

    answer = json.loads(out)
    assert (status, answer["same"], answer["relation"]) == (1, False, "workers")
    assert answer["first"]["phase"] == "data"
    assert answer["advice"]["cause"].endswith(f"torch.initial_seed at {_line('sample')}.")
    assert [variant["same"] for variant in answer["sides"]][-1] is False


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
def test_options_that_a_relation_does_not_use_are_refused(command, words: tuple[str, ...]) -> None:
    """They are a wrong request."""
    status, *_ = command("verify", *words, "--", sys.executable, "-c", "pass")

    assert status == 2


def test_a_line_to_ignore_is_checked_before_a_relation_runs(command) -> None:
    """A text that is not FILE:LINE is a wrong request, as without --relation."""
    words = ["verify", "--relation", "workers", "--ignore", "train.py", "--", sys.executable]

    status, _, err = command(*words, "-c", "open('ran', 'w')")

    assert (status, Path("ran").exists()) == (2, False)
    assert "train.py: not a line" in err
