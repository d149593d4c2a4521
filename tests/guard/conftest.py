"""A training step, and modules of a library that changes knobs."""

import importlib
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

NAME = "torchrepro_tests_culprit"


@pytest.fixture
def step():
    """Return a function that makes one training step."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def once():
        optimizer.zero_grad()
        model(torch.ones(1, 2, dtype=layer.weight.dtype)).sum().backward()
        optimizer.step()

    return once


@pytest.fixture
def in_thread():
    """Return a function that calls others in another thread, always the same, and waits for it."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda call, *args: pool.submit(call, *args).result(300)


@pytest.fixture
def importing(tmp_path, monkeypatch):
    """Return a function that imports a library with the given statement as its second line.

    It returns the source line of the statement.
    """
    file = tmp_path / NAME / "__init__.py"
    monkeypatch.syspath_prepend(tmp_path)

    def import_it(statement):
        file.parent.mkdir()
        file.write_text(f"import os, torch, torch.utils.deterministic\n{statement}\n")
        importlib.invalidate_caches()
        importlib.import_module(NAME)
        return f"{file}:2"

    yield import_it
    sys.modules.pop(NAME, None)


@pytest.fixture
def execute_forked(tmp_path, fork_python):
    """Return a function that runs a program, given as text, in a fork that has imported torch.

    `under` are the words of a `torchrepro run` that starts it, if any. PYTHONHASHSEED is exported,
    so that no strict profile relaunches it.
    """

    def execute_forked(program, *words, under=()):
        (tmp_path / "program.py").write_text(program)
        run = ("-m", "torchrepro", "run", *under, "--", sys.executable) if under else ()
        return fork_python(*run, "program.py", *words, env={"PYTHONHASHSEED": "0"})

    return execute_forked


@pytest.fixture
def run_program(tmp_path, execute):
    """Return a function that runs a program, given as text, in a clean environment.

    Words before the program are the command that starts it.
    """

    def run_program(program, *before):
        (tmp_path / "program.py").write_text(program)
        return execute(*before, sys.executable, "program.py")

    return run_program
