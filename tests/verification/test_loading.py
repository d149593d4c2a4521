"""A divergence in the batches of worker processes is followed into the dataset."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchrepro.ground.console import as_text
from torchrepro.trace.reader import read_run
from torchrepro.verdict.value import Kind
from torchrepro.verification.result import verification_parts
from torchrepro.verification.verifier import verify

HEAD = """
import os, random, time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
"""
TRAINING = """
if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader():
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
DIGITS = """
class Digits(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return {}
"""
LOADER = """
def loader():
    return DataLoader(Digits(), batch_size=4, {})
"""
ROWS = "np.arange(4, dtype='float32') + index"
CLOCK = """
def jitter(row):
    rng = np.random.default_rng(time.time_ns())  # here
    return row + rng.normal(size=4).astype("float32")
"""
STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        for number in range(12):
            row = np.full(4, number, dtype="float32")
            yield row + np.float32(random.SystemRandom().random())  # here
def loader():
    return DataLoader(Stream(), batch_size=4, num_workers=2)
"""
GIVEN = """
def scaled(row, factor):
    return row * np.float32(factor)
"""
COLLATED = """
def drawn():
    return np.random.default_rng(time.time_ns()).normal()  # here
def gathered(rows):
    return torch.from_numpy(np.float32(drawn()) + np.stack(rows))
"""
WORKERS = "num_workers=2, shuffle=True"


def program(*parts):
    """Write a program of these parts; return its command and the line that says `here`."""
    text = "\n".join([HEAD, *parts, TRAINING])
    Path("train.py").write_text(text, encoding="utf-8")
    lines = [number for number, line in enumerate(text.split("\n"), 1) if "# here" in line]
    return [sys.executable, "train.py"], lines[0] if lines else None


JITTER = DIGITS.format(f"jitter({ROWS})")
DRAWN = DIGITS.format(f"scaled({ROWS}, random.SystemRandom().uniform(1, 2))  # here")
COLLATING = LOADER.format("num_workers=2, collate_fn=gathered, persistent_workers=True")
STATEFUL = "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"
LIVING_ON = LOADER.format(f"{WORKERS}, persistent_workers=True, prefetch_factor=3, timeout=300")
SPAWNED = LOADER.format(f"{WORKERS}, multiprocessing_context='spawn'")
CASES = {
    "a helper function": (CLOCK, JITTER, LOADER.format(WORKERS)),
    "an iterable dataset": (STREAM,),
    "a collate_fn": (COLLATED, DIGITS.format(ROWS), COLLATING),
    "without workers": (CLOCK, JITTER, LOADER.format("num_workers=0")),
    "numbers drawn before": (GIVEN, DRAWN, LOADER.format(WORKERS)),
    "a stateful loader": (STATEFUL, CLOCK, JITTER, LIVING_ON),
    "workers that are spawned": (
        CLOCK,
        JITTER,
        LOADER.format(f"{WORKERS}, multiprocessing_context='spawn'"),
    ),
}
"""The parts of a program, of which one line is that at which its batches begin to differ."""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("case", CASES)
def test_the_line_in_the_dataset_is_named(verified, case):
    """In the main process, and in workers of any start method."""
    parts = CASES[case]
    if STATEFUL in parts:
        pytest.importorskip("torchdata")
    command, line = program(*parts)
    verification = verified(command)

    assert not verification.same
    assert (verification.verdict.first.phase, verification.verdict.first.kind) == (
        "data",
        Kind.DATA,
    )
    assert verification.verdict.origin.where == f"{Path.cwd() / 'train.py'}:{line}"
    assert verification.verdict.advice.closer == ""
    if CLOCK in parts:
        assert f"time.time_ns at train.py:{line}" in verification.verdict.advice.cause
    assert len(verification.runs) + sum(trial.runs for trial in verification.tried) + 2 <= 8, (
        verification.tried
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_another_order_of_samples_is_attributed_to_the_line_that_made_the_loader(verified):
    """The digest of a loader contains its sampler, so it differs as soon as the loader is made."""
    # From so many samples that two runs never begin with the same one.
    others = "sampler=random.SystemRandom().sample(range(10**9), 12), num_workers=2"
    command, line = program(DIGITS.format(ROWS), f"{LOADER.format(others).rstrip()}  # here")
    verdict = verified(command).verdict

    assert verdict.first.kind is Kind.DATA
    assert verdict.origin.where.endswith(f"train.py:{line}")
    assert f"random.SystemRandom at train.py:{line}" in verdict.advice.cause


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_worker_init_fn_that_seeds_differently_is_the_cause(verified, tmp_path):
    """If batches differ only in workers, the seeding line is named, with an edit."""
    seeding = "def by_pid(worker):\n    torch.manual_seed(os.getpid())"
    loader = LOADER.format("num_workers=2, worker_init_fn=by_pid")
    command, _ = program(seeding, DIGITS.format("torch.randn(4)"), loader)
    verification = verified(command)
    advice = verification.verdict.advice
    place = f"by_pid at {Path.cwd() / 'train.py'}:7"

    assert verification.verdict.first.op == "DataLoader"
    assert advice.cause.startswith("The number of the process: os.getpid at train.py:8")
    assert (advice.edit.before, advice.edit.after) == (
        "torch.manual_seed(os.getpid())",
        "torch.manual_seed(1234)",
    )
    assert (
        f"  becomes     {advice.edit.after}"
        in as_text(*verification_parts(verification)).splitlines()
    )
    (its,) = read_run(tmp_path / "out" / "run-1", records=False)[0].meta["loaders"]
    assert its == {
        "where": verification.verdict.first.source,
        "workers": 2,
        "dataset": "Digits",
        "iterable": False,
        "worker_init_fn": place,
    }


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_read_of_the_worker_is_named_without_a_worker_init_fn(verified):
    """Without a worker_init_fn the line is named that reads a property of the worker."""
    command, _ = program(
        DIGITS.format("torch.full((4,), float(os.getpid() if torch.utils.data.get_worker_info()"
                      " else 1))"),
        LOADER.format("num_workers=2"),
    )  # fmt: skip
    advice = verified(command).verdict.advice

    assert advice.cause.startswith("The number of the process: os.getpid at train.py:12")
    assert advice.edit is None


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_dataset_op_in_the_main_process_is_the_first_divergence(verified):
    """If an op of the dataset differs there, its line is where the difference began."""
    loading = "torch.roll(torch.arange(4.), random.SystemRandom().randrange(1 << 30) % 1000003)"
    command, _ = program(DIGITS.format(loading), LOADER.format("num_workers=0"))
    verification = verified(command)

    assert verification.verdict.first.op == "aten::roll"
    assert verification.verdict.first.kind is Kind.ARGUMENT
    assert verification.verdict.origin.where == verification.verdict.first.source


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_lines_are_followed_too_if_the_program_applies_a_profile_itself(plain, tmp_path):
    """A command that applies a profile itself is followed like any other."""
    own = "import torchrepro\ntorchrepro.apply('./plain.yaml', ['dataloader.seeding=auto'])"
    command, line = program(CLOCK, own, JITTER, LOADER.format(WORKERS))
    verification = verify(None, command, folder=tmp_path / "out")

    assert verification.verdict.origin.where.endswith(f"train.py:{line}")
