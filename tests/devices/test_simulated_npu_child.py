"""The process that has the simulated accelerator: what it sends back, and how it ends."""

import os
import time
from collections.abc import Callable

import pytest
import torch
from simulated_npu.child import Child, ChildError

import torchrepro

OnNpu = Callable[..., object]


def _loaded_by_workers() -> list[float]:
    loader = torch.utils.data.DataLoader(torch.arange(4.0), num_workers=1, batch_size=2)
    return [value for batch in loader for value in (batch.to("npu") * 2).tolist()]


def test_data_may_be_loaded_by_workers(on_npu: OnNpu) -> None:
    """The process with the device can have worker processes of its own."""
    assert on_npu(_loaded_by_workers) == [0, 2, 4, 6]


def _leave_a_profile() -> None:
    torchrepro.apply({"backends": {"torch": {"deterministic_algorithms": "error"}}})


def _failed_assert() -> None:
    assert torch.ones(2, device="npu").sum().item() == 3, "two is not three"


def _process() -> int:
    return os.getpid()


def test_an_error_comes_over_with_its_place(on_npu: OnNpu) -> None:
    """An assertion that fails in the child fails here, names its line, and ends nothing."""
    before = on_npu(_process)

    with pytest.raises(AssertionError, match="two is not three") as raised:
        on_npu(_failed_assert)
    assert "in _failed_assert" in "".join(raised.value.__notes__)
    assert on_npu(_process) == before


@pytest.mark.slow
def test_a_child_that_is_spoiled_or_lost_is_said_and_replaced(on_npu: OnNpu) -> None:
    """A trace left behind, a crash and a hang are errors; the next call has a new process."""
    assert on_npu(_process)  # skips where there is no device
    child = Child()
    try:
        first = child.call(_process)
        with pytest.raises(ChildError, match=r"_hang\(\): no answer in 0.5 s"):
            child.call(_hang, timeout=0.5)
        with pytest.raises(ChildError, match=r"a profile in force.*deterministic_algorithms: none"):
            child.call(_leave_a_profile)
        with pytest.raises(ChildError, match="the child ended with -6"):
            child.call(_abort)
        assert child.call(_process) != first
    finally:
        child.stop()


def _hang() -> None:
    time.sleep(60)


def _abort() -> None:
    os.abort()
