"""The fixture `repro_numbers` checks results of a test against a file beside it."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch._dynamo  # noqa: F401 - can be imported once only, and each run below imports it

from torchrepro.lock.locked_results import check_test_results, numbers_of_training
from torchrepro.manifest.environment import platform_name

pytest_plugins = ("pytester",)

TRAINING = """
import torch

LR = 0.1

def test_training(repro_numbers):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    repro_numbers(losses, model)
    repro_numbers(losses[-1])
"""
OTHER = "*results differ from step 1: loss * in the lock, * here*"


def test_results_are_written_once_and_checked_afterwards(pytester, monkeypatch):
    """A difference fails with its first step and both values; CI does not write missing results."""
    monkeypatch.delenv("CI", raising=False)
    file = pytester.makepyfile(TRAINING)
    lock = pytester.path / "repro_numbers" / f"{file.stem}.lock"
    monkeypatch.setenv("CI", "true")
    missing = pytester.inline_run("-q")
    nothing_written = not lock.parent.exists()
    monkeypatch.delenv("CI")
    pytester.inline_run("-q").assertoutcome(passed=1)
    monkeypatch.setenv("CI", "true")
    pytester.inline_run("-q").assertoutcome(passed=1)
    file.write_text(file.read_text().replace("LR = 0.1", "LR = 0.2"))
    differs = pytester.runpytest_inprocess("-q")
    pytester.inline_run("-q", "--repro-update", "a larger rate").assertoutcome(passed=1)
    pytester.inline_run("-q").assertoutcome(passed=1)
    refused = pytester.runpytest_inprocess("-q", "--repro-update", "  ")

    missing.assertoutcome(failed=1)
    assert nothing_written
    differs.stdout.fnmatch_lines([OTHER, "*--repro-update*"])
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    tests = json.loads(lock.read_text())["machines"][platform_name()]
    assert [*tests] == ["test_training", "test_training 2"]
    assert tests["test_training"]["reason"] == "a larger rate"
    assert len(tests["test_training"]["steps"]) == 3


def test_results_of_another_platform_are_not_used(tmp_path, monkeypatch):
    """In CI missing results fail with a message on how to add them; elsewhere they are added."""
    path, numbers = tmp_path / "repro_numbers" / "a.lock", numbers_of_training([0.5, float("nan")])
    check = partial(check_test_results, path, "test_a", None, numbers)
    monkeypatch.delenv("CI", raising=False)
    written = check("")
    contents = json.loads(path.read_text())
    machines = contents["machines"]
    machines["H100"] = machines.pop(platform_name())
    path.write_text(json.dumps(contents))
    monkeypatch.setenv("CI", "1")
    missing = check("")
    added = check("CI, too"), check("")

    assert (written, added) == ("", ("", ""))
    assert "has no results of test_a" in missing
    assert "it has results for H100" in missing
    assert set(json.loads(path.read_text())["machines"]) == {"H100", platform_name()}
