"""Devices for tests: the CPU, a simulated accelerator in a separate process, and a GPU."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # pytest's importlib mode leaves sys.path alone

from simulated_npu import MISSING
from simulated_npu.child import Child


@pytest.fixture(scope="session")
def _child() -> Iterator[Child]:
    child = Child()
    yield child
    child.stop()


@pytest.fixture
def on_npu(_child: Child) -> Callable[..., Any]:
    """Run a module-level function of a test file, with arguments, in a process with device "npu".

    The result and the arguments are pickled, so tensors go through ``.cpu()``. Errors are raised
    in this process; a hang, a crash, and a profile or flag left behind are errors too.
    """
    if MISSING:
        pytest.skip(MISSING)
    if importlib.util.find_spec("torch_npu"):
        pytest.skip("torch_npu is installed: it is the npu of this torch")
    return _child.call


@pytest.fixture(
    params=[
        "cpu",
        "npu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """The name of a device, for tests that run on each."""
    return request.param


@pytest.fixture
def run(device: str, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run a module-level function of a test file on a machine with `device`, as `on_npu` does."""
    if device == "npu":
        return request.getfixturevalue("on_npu")
    return lambda function, *args: function(*args)
