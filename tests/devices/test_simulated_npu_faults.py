"""Ops of the simulated accelerator that alert or vary, as those of real ones do."""

import warnings
from collections.abc import Callable

import pytest
import torch
from simulated_npu import alert_on, vary

import torchrepro

OnNpu = Callable[..., object]


def _deterministic(mode: str) -> torchrepro.Applied:
    return torchrepro.apply({"backends": {"torch": {"deterministic_algorithms": mode}}})


def _alerting(mode: str) -> tuple[list[float], list[str]]:
    """Run cumsum, which alerts, and an op that does not; return the sum and the warnings."""
    alert_on("aten::cumsum")
    with _deterministic(mode):
        ones = torch.ones(2, device="npu").sort().values
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            return torch.cumsum(ones, 0).tolist(), [str(warning.message) for warning in warned]


def test_an_alerting_op_raises_under_deterministic_algorithms_only(on_npu: OnNpu) -> None:
    """It raises where torch's flag is on, warns where that says so, and runs where it is off."""
    calm, warned = on_npu(_alerting, "none"), on_npu(_alerting, "warn")

    assert calm == ([1, 2], [])
    assert warned[0] == [1, 2]
    assert [text.split()[0] for text in warned[1]] == ["cumsum_npu"]
    with pytest.raises(RuntimeError, match="cumsum_npu does not have a deterministic impl"):
        on_npu(_alerting, "error")


def _alerts_of(device: str) -> list[str]:
    """Return how `put_`, for which the CPU has no deterministic kernel either, says so."""
    alert_on("aten::put_")
    tensor, index = torch.zeros(2, device=device), torch.tensor([0], device=device)
    with _deterministic("warn"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tensor.put_(index, tensor[1:].clone())
    with _deterministic("error"), pytest.raises(RuntimeError) as raised:
        tensor.put_(index, tensor[1:].clone())
    said = [str(raised.value), str(warned[0].message).partition(" (Triggered")[0]]
    return [text.replace("put__npu", "put_") for text in said]


def test_an_alert_has_torchs_own_words(on_npu: OnNpu) -> None:
    """The sentences are those of the installed torch, but for the name of the kernel."""
    assert on_npu(_alerts_of, "npu") == on_npu(_alerts_of, "cpu")


def _backward_alerts() -> list[float]:
    alert_on("aten::put_", "aten::index_put_", "aten::_index_put_impl_")
    x = torch.ones(3, device="npu", requires_grad=True)
    with _deterministic("error"):
        x[torch.tensor([0, 0])].sum().backward()
    return x.grad.tolist()


def test_an_op_of_the_backward_pass_alerts_too(on_npu: OnNpu) -> None:
    """An alert in one of autograd's threads reaches the caller of backward."""
    with pytest.raises(RuntimeError, match=r"index_put.*does not have a deterministic"):
        on_npu(_backward_alerts)


def _sums(calls: int, *varying: str) -> list[list[float]]:
    vary(*varying)
    with _deterministic("error"):
        return [torch.ones(3, device="npu").cumsum(0).tolist() for _ in range(calls)]


def test_a_varying_op_gives_another_result_at_every_call_and_says_nothing(on_npu: OnNpu) -> None:
    """Deterministic algorithms or not, its results differ a little; without `vary` they do not."""
    varied = on_npu(_sums, 3, "aten::cumsum")

    assert len({tuple(row) for row in varied}) == 3
    assert all(abs(row[0] - 1) < 1e-5 for row in varied)
    assert on_npu(_sums, 2) == [[1, 2, 3]] * 2


def test_a_fault_can_be_given_to_known_ops_only(on_npu: OnNpu) -> None:
    """A name that is no op is refused, so that no test waits for an alert that cannot come."""
    with pytest.raises(ValueError, match=r"no op called 'cumsum': write it like 'aten::cumsum'"):
        on_npu(alert_on, "cumsum")
