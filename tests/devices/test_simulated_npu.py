"""Laws of the simulated accelerator itself, so that what fails on it is torchrepro."""

import copy
import os
import time
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_npu import alert_on, log, vary
from simulated_npu.child import Child, ChildError
from torch import nn

import torchrepro

OnNpu = Callable[..., object]


def _drawn(seed: int, device: str) -> list[float]:
    torch.manual_seed(seed)
    return torch.randn(8, device=device).tolist()


def test_a_seed_repeats_on_the_device_and_gives_other_numbers_than_on_the_cpu(
    on_npu: OnNpu,
) -> None:
    """One seed is one sequence of numbers per kind of device."""
    first, cpus = on_npu(_drawn, 7, "npu"), on_npu(_drawn, 7, "cpu")

    assert first == on_npu(_drawn, 7, "npu")
    assert first != on_npu(_drawn, 8, "npu")
    assert first != cpus
    assert cpus == _drawn(7, "cpu")


def _second_devices_numbers_after(others: int) -> list[float]:
    torch.manual_seed(3)
    torch.rand(others, device="npu:0")
    return torch.rand(4, device="npu:1").tolist() + torch.rand(4).tolist()


def test_each_device_has_a_stream_of_its_own(on_npu: OnNpu) -> None:
    """What one device draws moves neither the other device's generator nor the CPU's."""
    assert on_npu(_second_devices_numbers_after, 100) == on_npu(_second_devices_numbers_after, 0)


DRAWS: dict[str, Callable[[torch.Tensor], object]] = {
    "rand": lambda x: torch.rand(6, device=x.device),
    "rand_like": torch.rand_like,
    "normal_ on a view": lambda x: x.clone()[1:].normal_(),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "multinomial": lambda x: torch.multinomial(x, 4),
    "randperm": lambda x: torch.randperm(9, device=x.device),
    "randint": lambda x: torch.randint(99, (6,), device=x.device),
    "dropout": lambda x: nn.functional.dropout(x, 0.5),
    "rrelu": lambda x: nn.functional.rrelu(-x, training=True),
    "gamma": lambda x: torch.distributions.Gamma(x, x).sample(),
}


def _three_draws(name: str) -> list[list[float]]:
    torch.manual_seed(6)  # or two draws may come to be the same
    ones = torch.ones(64, device="npu")
    hosts, state = torch.get_rng_state(), torch.npu.get_rng_state()
    first, second = (DRAWS[name](ones).tolist() for _ in range(2))
    torch.npu.set_rng_state(state)
    again = DRAWS[name](ones).tolist()
    assert state.dtype == torch.uint8
    assert len(state) == 16
    assert torch.equal(hosts, torch.get_rng_state())
    return [first, second, again]


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_goes_on_and_goes_back(on_npu: OnNpu, name: str) -> None:
    """Every way to draw moves the device's generator alone; its 16 bytes of state bring it back."""
    first, second, again = on_npu(_three_draws, name)

    assert first != second
    assert first == again


def _after_snapshot() -> tuple[list[float], ...]:
    state = torchrepro.rng_state()
    drawn = [torch.rand(2, device=f"npu:{index}").tolist() for index in range(2)]
    torchrepro.set_rng_state(state)
    again = [torch.rand(2, device=f"npu:{index}").tolist() for index in range(2)]
    torch.manual_seed(5)
    return drawn, again, [torch.npu.initial_seed(), len(state["devices"]["npu"])]


def test_a_snapshot_holds_every_device(on_npu: OnNpu) -> None:
    """torchrepro finds the devices' generators, and torch.manual_seed reaches them."""
    drawn, again, facts = on_npu(_after_snapshot)

    assert drawn == again
    assert facts == [5, 2]


EDITS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda x: x.view(6, 4)[1:3].add_(2),
    lambda x: x.t()[1].mul_(3),
    lambda x: x[::2, 1].fill_(7),
    lambda x: x.unfold(1, 2, 2)[..., 0].neg_(),
    lambda x: x.masked_fill_(x > 5, 1),
    lambda x: x.index_put_(
        (torch.tensor([0, 2]), torch.tensor([1, 1])), x[0, :2] + 1, accumulate=True
    ),
    lambda x: torch.cumsum(x.clone(), 1, out=x),
    lambda x: x[2].copy_(x[0]),
    lambda x: x.flatten().sort().values.cumsum(0).sqrt_(),
    lambda x: torch.mul(x[0, :4].clone(), 2, out=x.diagonal()),
)


def _edited(edits: list[int], device: str) -> tuple[list[object], list[float]]:
    start = torch.arange(24.0, device=device).view(4, 6).requires_grad_()
    edited = (start * 1).clone()
    for edit in edits:
        EDITS[edit](edited.detach())
    differentiable = start * edited
    differentiable[1:3, 2].mul_(4)  # autograd finds the view's place in its base by the offset
    differentiable.view(-1)[5:].pow_(2).sum().backward()
    return edited.tolist(), start.grad.tolist()


@settings(max_examples=25)
@given(edits=st.lists(st.integers(0, len(EDITS) - 1), max_size=6))
def test_views_alias_and_ops_write_in_place(on_npu: OnNpu, edits: list[int]) -> None:
    """Whatever is done to views of a tensor, the tensor and its gradient are the CPU's."""
    assert on_npu(_edited, edits, "npu") == on_npu(_edited, edits, "cpu")


def _shapes() -> None:
    tensor = torch.arange(6.0, device="npu")
    assert tensor[2:].storage_offset() == 2
    assert tensor[2:].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert tensor.clone().resize_(2).resize_(4).tolist() == [0, 1, 2, 3]
    assert tensor.clone().resize_(8)[:6].tolist() == tensor.tolist()
    empty = torch.empty(0, device="npu")
    assert torch.add(tensor, 1, out=empty).data_ptr() == empty.data_ptr()
    assert empty.tolist() == [1, 2, 3, 4, 5, 6]
    assert copy.deepcopy(tensor[2:]).tolist() == [2, 3, 4, 5]
    with torch.inference_mode():
        plain = torch.ones(2, device="npu")
        assert plain.add_(1) is plain
    imaginary = (tensor * 1j)[1].conj()
    assert (imaginary.cpu(), imaginary.imag.item()) == (-1j, -1)


def test_memory_is_real(on_npu: OnNpu) -> None:
    """Views know their offset; resizing, outputs, copies and conjugates behave as on the CPU."""
    on_npu(_shapes)


MIXED: dict[str, tuple[Callable[[], object], str]] = {
    "cpu": (lambda: torch.ones(2, device="npu") + torch.ones(2), "cpu and npu:0"),
    "devices": (
        lambda: torch.ones(2, 2, device="npu:0") @ torch.ones(2, 2, device="npu:1"),
        "npu:0 and npu:1",
    ),
    "out": (lambda: torch.exp(torch.ones(2), out=torch.ones(2, device="npu")), "cpu and npu:0"),
    "generator": (
        lambda: torch.rand(2, device="npu", generator=torch.Generator()),
        "Expected a 'npu' device type for generator but found 'cpu'",
    ),
}


def _mix(name: str) -> None:
    MIXED[name][0]()


@pytest.mark.parametrize("name", MIXED)
def test_devices_do_not_mix(on_npu: OnNpu, name: str) -> None:
    """Tensors and generators of several devices in one op are an error, as on any accelerator."""
    with pytest.raises(RuntimeError, match=MIXED[name][1]):
        on_npu(_mix, name)


def _scalar_and_indices_from_the_host() -> list[float]:
    tensor = torch.arange(3.0, device="npu") * torch.tensor(2.0)
    return tensor[torch.tensor([2, 0])].tolist()


def test_scalars_and_indices_may_come_from_the_host(on_npu: OnNpu) -> None:
    """What every accelerator takes from the host, this one takes too."""
    assert on_npu(_scalar_and_indices_from_the_host) == [4, 0]


def _logged() -> tuple[list[str], int]:
    ones = torch.ones(2, device="npu")
    log.clear()
    (ones + 1).mul_(ones).mul_(2)
    torch.ones(2).exp()
    return list(log), log.counts["aten::mul_.Tensor"]


def test_the_log_names_what_ran_on_the_device(on_npu: OnNpu) -> None:
    """Every op on the device is in the log, in order, and none of the CPU."""
    names, multiplied = on_npu(_logged)

    assert names == ["aten::add.Tensor", "aten::mul_.Tensor", "aten::mul_.Tensor"]
    assert multiplied == 2


def _below_another_kernel() -> list[object]:
    """Draw with a kernel above the device's, at the key where policies sit, and without it."""
    seen, after = [], torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def kernel(keyset: object, *args: object, **kwargs: object) -> object:
        seen.append(args[0].device.type)
        return torch.ops.aten.uniform_.default.redispatch(keyset & after, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    library.impl("uniform_", kernel, "BackendSelect", with_keyset=True)
    torch.manual_seed(2)
    through = torch.rand(3, device="npu").tolist()
    del library
    torch.manual_seed(2)
    return [through == torch.rand(3, device="npu").tolist(), seen]


def test_a_kernel_above_the_devices_can_hand_down_to_it(on_npu: OnNpu) -> None:
    """An override at a higher dispatch key sees the call once, and can be taken away again."""
    assert on_npu(_below_another_kernel) == [True, ["npu"]]


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
