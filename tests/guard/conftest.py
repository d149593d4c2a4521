"""A training step, and modules of a library that writes what is not its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from torchrepro.knobs.catalogue import knobs_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FOREIGN = ("TORCHREPRO_", "PYTEST_", "HYDRA_", "COV_")
NAME = "torchrepro_tests_culprit"


@pytest.fixture
def step() -> Callable[[], Any]:
    """Return a function that makes one step of training."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def once() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2, dtype=layer.weight.dtype)).sum().backward()
        optimizer.step()

    return once


@pytest.fixture
def in_thread() -> Callable[[Callable[[], Iterator[None]]], Callable[[], None]]:
    """Return a function that runs a program in another thread up to its `yield`.

    It returns a function that lets the thread go on, and waits for its end.
    """

    def in_thread(program: Callable[[], Iterator[None]]) -> Callable[[], None]:
        ready, go = threading.Event(), threading.Event()

        def run() -> None:
            for _ in program():
                ready.set()
                go.wait(300)

        thread = threading.Thread(target=run)
        thread.start()
        ready.wait(300)

        def finish() -> None:
            go.set()
            thread.join()

        return finish

    return in_thread


@pytest.fixture
def importing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Return a function that imports a library whose second line is the statement it is given.

    It returns the place of that line.
    """
    file = tmp_path / NAME / "__init__.py"
    monkeypatch.syspath_prepend(tmp_path)

    def import_it(statement: str) -> str:
        file.parent.mkdir()
        file.write_text(f"import os, torch, torch.utils.deterministic\n{statement}\n")
        importlib.invalidate_caches()
        importlib.import_module(NAME)
        return f"{file}:2"

    yield import_it
    sys.modules.pop(NAME, None)


@pytest.fixture
def execute_forked(
    tmp_path: Path, fork_python: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a program, whose text it is given, in a fork that has torch.

    Its PYTHONHASHSEED is exported, so that no strict profile has it begin again.
    """

    def execute_forked(program: str, *words: str) -> Any:
        (tmp_path / "program.py").write_text(program)
        return fork_python("program.py", *words, env={"PYTHONHASHSEED": "0"})

    return execute_forked


@pytest.fixture
def execute(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a program, whose text it is given, from a clean environment.

    Words before the program are the command that starts it.
    """
    (tmp_path / "x").mkdir()
    clean = {
        name: value
        for name, value in os.environ.items()
        if f"env.{name}" not in knobs_by_name() and not name.startswith(FOREIGN)
    }

    def execute(program: str, *before: str) -> Any:
        (tmp_path / "x" / "program.py").write_text(program)
        return subprocess.run(
            [*before, sys.executable, "program.py"],
            cwd=tmp_path / "x",
            env=clean,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return execute
