"""Common setup of planted faults: one thread per op, so that tests need one core."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_per_op() -> Iterator[None]:
    """Compute small tensors on the calling thread, because OpenMP threads wait by spinning."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
