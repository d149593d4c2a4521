"""`device.fallback` on the simulated accelerator: single ops on the CPU, the rest on the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated_npu import alert_on, log, vary
from torch import nn
from torch.nn import functional

import torchrepro
from torchrepro.policies.interpose import ops_named
from torchrepro.policies.on_cpu import on_cpu
from torchrepro.policies.policy import effects

OnNpu = Callable[..., Any]
ALGORITHMS = {"torch": {"deterministic_algorithms": "error"}}
ON_CPU = "ran on the CPU"


def deciding(value: Any) -> torchrepro.Applied:
    """Put a profile in force that asks for deterministic algorithms and decides so."""
    return torchrepro.apply({"backends": ALGORITHMS, "device": {"fallback": value}})


def counted() -> dict[str, dict[str, tuple[int, int]]]:
    """Return calls and bytes per op and what was done."""
    done: dict[str, dict[str, tuple[int, int]]] = {}
    for effect in effects():
        if effect.policy == "device.fallback":
            calls, moved = done.setdefault(effect.subject, {}).get(effect.what, (0, 0))
            done[effect.subject][effect.what] = calls + effect.calls, moved + effect.moved
    return done


class Model(nn.Module):
    """A model with refused ops forward (cumsum, 2-d cross entropy) and backward (bicubic)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shrink, add up along a dimension, and grow."""
        hidden = functional.max_pool2d(self.first(x), 2).cumsum(3)
        return self.last(functional.interpolate(hidden, scale_factor=2, mode="bicubic"))


REFUSED = ("aten::cumsum", "aten::upsample_bicubic2d_backward", "aten::nll_loss2d_forward")


def _trained(device: str, value: Any) -> tuple[list[torch.Tensor], Any]:
    alert_on(*REFUSED)
    torch.manual_seed(0)
    model = Model().to(device)
    images = torch.arange(128.0).sin().view(2, 1, 8, 8).to(device)
    targets = (torch.arange(128) % 3).view(2, 8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with deciding(value):
        for _ in range(3):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), targets).backward()
            optimizer.step()
    return [each.detach().cpu() for each in model.parameters()], counted()


def test_training_goes_on_where_torch_would_stop_it(on_npu: OnNpu) -> None:
    """Forward and backward ops fall back: the run repeats, and equals the CPU's bit for bit."""
    first, done = on_npu(_trained, "npu", "cpu")
    second, _ = on_npu(_trained, "npu", "cpu")
    cpus, nothing = on_npu(_trained, "cpu", "cpu")

    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, cpus))
    assert set(done) == set(REFUSED)
    assert nothing == {}


def test_calls_and_bytes_are_counted(on_npu: OnNpu) -> None:
    """Each call counts what it moved: the arguments to the CPU and the results back."""
    _, done = on_npu(_trained, "npu", "cpu")
    hidden, grown = 2 * 4 * 4 * 4 * 4, 2 * 4 * 8 * 8 * 4

    assert done["aten::cumsum"] == {ON_CPU: (6, 12 * hidden)}  # its gradient is one as well
    assert done["aten::upsample_bicubic2d_backward"] == {ON_CPU: (3, 3 * (grown + hidden))}


@pytest.mark.parametrize("value", ["error", {"ops": {"*": "error"}}])
def test_error_stops_training_with_advice(on_npu: OnNpu, value: Any) -> None:
    """Under `error` the first refused op raises torch's own error, and says what to do."""
    with pytest.raises(RuntimeError, match="cumsum_npu does not have") as caught:
        on_npu(_trained, "npu", value)

    assert "torchrepro: aten::cumsum: " in str(caught.value)
    assert "device.fallback: cpu" in str(caught.value)


def _backward_only() -> str:
    alert_on("aten::upsample_bicubic2d_backward")
    x = torch.ones(1, 1, 4, 4, device="npu", requires_grad=True)
    with deciding("error"):
        result = functional.interpolate(x, scale_factor=2, mode="bicubic").sum()
        try:
            result.backward()
        except RuntimeError as error:
            return str(error)
    return ""


def test_error_in_backward_says_what_to_do(on_npu: OnNpu) -> None:
    """The advice also reaches whoever called backward, through autograd's threads."""
    assert "mode='nearest'" in on_npu(_backward_only)


def test_native_goes_on_with_the_devices_kernel(on_npu: OnNpu) -> None:
    """Under `native` the ops run on the device, are recorded, and the others still raise."""
    ops = dict.fromkeys(REFUSED, "native")
    weights, done = on_npu(_trained, "npu", {"ops": ops})
    cpus, _ = on_npu(_trained, "cpu", "cpu")
    del ops["aten::nll_loss2d_forward"]
    with pytest.raises(RuntimeError, match="nll_loss2d_forward_npu does not have"):
        on_npu(_trained, "npu", {"ops": ops})

    assert {what for each in done.values() for what in each} == {
        "ran non-deterministically, as the profile allows"
    }
    assert all(map(torch.equal, weights, cpus))


def _sums(value: Any) -> tuple[list[list[float]], Any]:
    vary("aten::cumsum", "aten::erf")
    x = torch.arange(6.0, device="npu") / 7
    with deciding(value):
        return [(x.cumsum(0) + x.erf().relu()).tolist() for _ in range(3)], counted()


def test_an_op_that_raises_nothing_runs_on_the_cpu_if_the_profile_names_it(on_npu: OnNpu) -> None:
    """A device that varies without a word becomes repeatable op by op."""
    varying, _ = on_npu(_sums, "cpu")
    half, _ = on_npu(_sums, {"ops": {"cumsum": "cpu"}})
    repeatable, done = on_npu(_sums, {"ops": {"cumsum": "cpu", "aten::erf": "cpu"}})

    assert varying[0] != varying[1]
    assert half[0] != half[1]
    assert repeatable[0] == repeatable[1] == repeatable[2]
    assert done == {"aten::cumsum": {ON_CPU: (3, 144)}, "aten::erf": {ON_CPU: (3, 144)}}


def test_a_pattern_decides_for_ops_that_would_raise(on_npu: OnNpu) -> None:
    """`*` moves what torch refuses and nothing else."""
    _, done = on_npu(_trained, "npu", {"ops": {"*": "cpu"}})
    varying, none = on_npu(_sums, {"ops": {"*": "cpu"}})

    assert set(done) == set(REFUSED)
    assert varying[0] != varying[1]
    assert none == {}


def _refused_by_name(op: str) -> None:
    with deciding({"ops": {op: "error"}}):
        torch.ones(3, device="npu").erf()


def test_an_op_that_raises_nothing_is_refused_if_the_profile_says_so(on_npu: OnNpu) -> None:
    """`error` by name stops a call that torch and the device would let pass."""
    on_npu(_refused_by_name, "cumsum")
    with pytest.raises(RuntimeError, match="aten::erf may not run"):
        on_npu(_refused_by_name, "erf")


def _other_ops() -> int:
    x = torch.ones(3, device="npu")
    with deciding("cpu"):
        log.clear()
        (x + x).relu()
        return len(log)


def test_other_ops_do_nothing_more(on_npu: OnNpu) -> None:
    """An op that is not in the table reaches its kernel as ever: no copy, no other op."""
    assert on_npu(_other_ops) == 2


def _replaced() -> tuple[list[float], Any, list[str]]:
    alert_on("aten::cumsum")

    def matrix(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        ones = torch.ones(len(x), len(x), device=x.device).tril()
        return ones @ x

    torchrepro.register_replacement("cumsum", matrix)
    try:
        with deciding("cpu"):
            log.clear()
            result = torch.arange(4.0, device="npu").cumsum(0).tolist()
            return result, counted(), [name for name in log if "cumsum" in name]
    finally:
        torchrepro.unregister_replacement("cumsum")


def test_a_replacement_goes_before_the_fallback(on_npu: OnNpu) -> None:
    """A program's own deterministic implementation runs on the device, and the kernel does not."""
    result, done, kernels = on_npu(_replaced)

    assert result == [0, 1, 3, 6]
    assert kernels == []
    assert [what.rpartition(".")[2] for what in done["aten::cumsum"]] == ["matrix"]


NPU = "npu"
FORMS: dict[str, Callable[[str], Any]] = {
    "in place": lambda d: torch.arange(6.0, device=d).cumsum_(0),
    "in place on a view": lambda d: _through(
        torch.arange(6.0, device=d).view(2, 3), lambda x: x.t()[1].cumsum_(0)
    ),
    "in place on a slice with gaps": lambda d: _through(
        torch.arange(9.0, device=d), lambda x: x[1::3].cumsum_(0)
    ),
    "into an empty output": lambda d: torch.cumsum(
        torch.ones(2, 3, device=d), 1, out=torch.empty(0, device=d)
    ),
    "into an output of the size": lambda d: torch.cumsum(
        torch.ones(2, 3, device=d), 1, out=torch.empty(2, 3, device=d)
    ),
    "into a part of a tensor": lambda d: _through(
        torch.zeros(3, 4, device=d), lambda x: torch.cumsum(torch.ones(4, device=d), 0, out=x[1])
    ),
    "into its own input": lambda d: _through(
        torch.ones(4, device=d), lambda x: torch.cumsum(x, 0, out=x)
    ),
    "two results": lambda d: tuple(torch.median(torch.arange(6.0, device=d).view(2, 3), 1)),
    "two outputs": lambda d: torch.median(
        torch.arange(6.0, device=d).view(2, 3),
        1,
        out=(torch.empty(0, device=d), torch.empty(0, dtype=torch.int64, device=d)),
    ),
    "one tensor twice": lambda d: torch.dot(*[torch.arange(3.0, device=d)] * 2),
    "a list of tensors": lambda d: torch.cat([torch.ones(2, device=d), torch.zeros(1, device=d)]),
    "an optional tensor": lambda d: torch.bincount(torch.tensor([0, 2, 2], device=d)),
    "weights": lambda d: torch.bincount(
        torch.tensor([0, 2, 2], device=d), torch.tensor([0.5, 1, 2], device=d)
    ),
    "nothing": lambda d: torch.ones(0, 3, device=d).cumsum(0),
    "a number": lambda d: torch.tensor(3.0, device=d).cumsum(0),
    "half": lambda d: torch.ones(5, dtype=torch.float16, device=d).cumsum(0),
    "another type": lambda d: torch.ones(5, device=d).cumsum(0, dtype=torch.float64),
    "whole numbers": lambda d: torch.ones(5, dtype=torch.int32, device=d).cumsum(0),
    "complex": lambda d: torch.ones(5, dtype=torch.complex64, device=d).mul(1j).cumsum(0),
    "transposed": lambda d: torch.arange(6.0, device=d).view(2, 3).t().cumsum(0),
    "expanded": lambda d: torch.arange(3.0, device=d).expand(4, 3).cumsum(0),
    "channels last": lambda d: (
        torch.arange(48.0, device=d).view(2, 3, 2, 4).to(memory_format=torch.channels_last)
    ).cumsum(1),
    "made on the device": lambda d: torch.zeros(2, device=d).new_ones(3).cumsum(0),
    "moved to the CPU": lambda d: torch.ones(2, device=d).cumsum(0).cpu(),
    "resized": lambda d: torch.ones(2, 2, device=d).resize_(1, 3),
}
MOVED_OPS = ("cumsum", "cumsum_", "median", "dot", "cat", "bincount", "copy_", "resize_")


def _through(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> tuple[torch.Tensor, ...]:
    """Return both a tensor after a change in place and what the change returned."""
    returned = change(x)
    return x, returned


def _form(name: str, device: str, ops: tuple[str, ...]) -> tuple[list[Any], int]:
    with deciding({"ops": dict.fromkeys(ops, "cpu")}) if ops else deciding("error"):
        results = FORMS[name](device)
        results = results if isinstance(results, tuple | list) else [results]
        calls = sum(calls for each in counted().values() for calls, _ in each.values())
        facts = [(each.dtype, each.stride(), each.device.type) for each in results]
    return [(each.cpu().tolist(), *fact) for each, fact in zip(results, facts, strict=True)], calls


@pytest.mark.parametrize("name", FORMS)
def test_a_call_of_any_form_gives_what_the_device_gives(on_npu: OnNpu, name: str) -> None:
    """Values, type, layout and device of a moved op are those of the device's own kernel."""
    moved, calls = on_npu(_form, name, NPU, MOVED_OPS)
    kept, _ = on_npu(_form, name, NPU, ())

    assert calls > 0
    assert moved == kept


def _written_where_it_is_read() -> None:
    x = torch.arange(6.0, device=NPU)
    with deciding({"ops": {"copy_": "cpu"}}):
        x[:4].copy_(x[2:])


def test_tensors_that_overlap_overlap_on_the_cpu(on_npu: OnNpu) -> None:
    """What torch refuses to write, because it reads from there as well, it refuses there too."""
    with pytest.raises(RuntimeError, match="single memory location"):
        on_npu(_written_where_it_is_read)


def _identities() -> list[bool]:
    x, output = torch.arange(3.0, device=NPU), torch.empty(0, device=NPU)
    with deciding({"ops": {"cumsum": "cpu", "cumsum_": "cpu"}}):
        return [x.cumsum_(0) is x, torch.cumsum(x, 0, out=output) is output]


def test_in_place_calls_return_their_own_tensor(on_npu: OnNpu) -> None:
    """The caller gets the very tensor that it gave, not another with the same numbers."""
    assert on_npu(_identities) == [True, True]


def _short_of_a_kernel(kind: torch.dtype) -> tuple[list[float], torch.dtype, str]:
    (op,) = ops_named("aten::cumsum")
    x = torch.ones(4, dtype=kind, device=NPU)

    def only_float32(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("\"cumsum_cpu\" not implemented for 'Half'")
        return torch.cumsum(x, *args, **kwargs)

    result, _ = on_cpu(op, (x, 0), {}, run=only_float32)
    return result.tolist(), result.dtype, result.device.type


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_short_type_without_a_cpu_kernel_is_computed_in_float32(
    on_npu: OnNpu, kind: torch.dtype
) -> None:
    """Where the CPU lacks a kernel for half precision the result is rounded from float32."""
    assert on_npu(_short_of_a_kernel, kind) == ([1, 2, 3, 4], kind, NPU)


def _sparse() -> tuple[list[list[float]], str, int]:
    indices = torch.tensor([[0, 1], [1, 0]])
    matrix = torch.sparse_coo_tensor(indices, torch.tensor([2.0, 3.0]), (2, 2)).coalesce()
    (mm,) = ops_named("aten::mm")
    result, moved = on_cpu(mm, (matrix, torch.eye(2, device=NPU)), {})
    return result.tolist(), result.device.type, moved


def test_a_result_goes_where_the_tensors_on_a_device_are(on_npu: OnNpu) -> None:
    """Arguments that are on the CPU already, sparse ones too, move nothing."""
    assert on_npu(_sparse) == ([[0, 2], [3, 0]], NPU, 32)
