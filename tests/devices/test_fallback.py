"""`device.fallback`: handling of ops without a deterministic kernel."""

import re
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_npu import alert_on, log, vary
from torch import nn
from torch.nn import functional

import torchrepro
from torchrepro.policies.deterministic_ops import OPS
from torchrepro.policies.interpose import interposed, ops_named
from torchrepro.policies.policy import effects
from torchrepro.policies.run_on_cpu import on_cpu

OnNpu = Callable[..., Any]
REFUSED = "does not have a deterministic implementation"
ON_CPU = "ran on the CPU"
NATIVELY = "ran non-deterministically, as the profile allows"


def deciding(value: Any = None, algorithms: str = "error") -> AbstractContextManager[Any]:
    """Apply a profile with deterministic algorithms and this value of `device.fallback`."""
    fallback = {} if value is None else {"device": {"fallback": value}}
    flags = {"torch": {"deterministic_algorithms": algorithms}}
    return torchrepro.apply({"backends": flags, **fallback})


def counted() -> dict[str, dict[str, tuple[int, int]]]:
    """Return calls and bytes per op and action."""
    done: dict[str, dict[str, tuple[int, int]]] = {}
    for effect in effects():
        if effect.policy == "device.fallback":
            calls, moved = done.setdefault(effect.subject, {}).get(effect.what, (0, 0))
            done[effect.subject][effect.what] = calls + effect.calls, moved + effect.moved
    return done


def put() -> torch.Tensor:
    """Write twice to one index: torch has no deterministic kernel for it on any device."""
    return torch.zeros(4).put_(torch.tensor([0, 0, 3]), torch.tensor([1.0, 2.0, 5.0]))


def unpool() -> torch.Tensor:
    """Pool and unpool, forward and backward."""
    return CALLS["max_unpool2d"]("cpu")


def test_every_op_that_torch_lists_is_in_the_table() -> None:
    """Every op that raises according to the documentation of torch has a row with advice.

    The table has no ops of Apple devices (MPS), which torchrepro does not support.
    """
    text = str(torch.use_deterministic_algorithms.__doc__)
    listed = text.partition(":class:`RuntimeError` when ``mode=True``")[2].partition("In addition")
    items = [item for item in listed[0].split(" * ") if "CUDA" in item or "MPS" not in item]
    names = {name for item in items for name in re.findall(r"^:(?:class|func):`([^`]+)`", item)}

    assert len(names) > 20
    assert names - {name for row in OPS for name in row.documented} == set()


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in OPS])
def test_every_row_has_an_op_of_torch_and_advice(row: Any) -> None:
    """Every row is for a different op of the installed torch, and has advice."""
    assert row.instead
    assert [other.name for other in OPS].count(row.name) == 1
    assert getattr(torch.ops.aten, row.name).overloads()


def _gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    function(x).square().sum().backward()
    return x.grad


def _image(d: str) -> torch.Tensor:
    return torch.arange(256.0, device=d).sin().view(1, 1, 16, 16)


CALLS: dict[str, Callable[[str], torch.Tensor]] = {
    "_adaptive_avg_pool2d_backward": lambda d: _gradient(
        lambda x: functional.adaptive_avg_pool2d(x, 3), _image(d)
    ),
    "upsample_bicubic2d_backward": lambda d: _gradient(
        lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"), _image(d)
    ),
    "nll_loss2d_forward": lambda d: functional.nll_loss(
        _image(d).expand(1, 3, 16, 16), torch.ones(1, 16, 16, dtype=torch.int64, device=d)
    ),
    "histc": lambda d: torch.histc(_image(d), 10),
    "bincount": lambda d: torch.bincount(
        (torch.arange(60) % 7).to(d), torch.arange(60.0, device=d)
    ),
    "median": lambda d: torch.median(_image(d).view(16, 16), 1).values,
    "put_": lambda d: torch.zeros(4, device=d).put_(
        torch.tensor([0, 0, 3], device=d), torch.tensor([1.0, 2.0, 5.0], device=d)
    ),
    "put_ adding up": lambda d: torch.zeros(4, device=d).put_(
        torch.tensor([0, 0, 3], device=d), torch.ones(3, device=d), accumulate=True
    ),
    "max_unpool2d": lambda d: _gradient(
        lambda x: functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2),
        _image(d),
    ),
}
"""A call of each op that some device refuses; which one does, changes with torch's version."""


def _refusal(name: str, device: str, value: Any = None) -> str:
    if device == "npu":
        alert_on(*(f"aten::{op.partition(' ')[0]}" for op in CALLS))
    with deciding(value):
        try:
            CALLS[name](device)
        except RuntimeError as error:
            return str(error)
    return ""


def _tried(name: str, device: str) -> tuple[list[str], list[torch.Tensor], list[str], set[str]]:
    refused = [_refusal(name, device), _refusal(name, device, "error")]
    with deciding("cpu"):
        results = [CALLS[name](device) for _ in range(3)]
        done = {effect.subject for effect in effects() if effect.policy == "device.fallback"}
        devices = [result.device.type for result in results]
    refused.append(_refusal(name, device))
    return refused, [result.cpu() for result in results], devices, done


@pytest.mark.parametrize("name", CALLS)
def test_a_refused_op_falls_back_and_computes_the_result_of_the_cpu(
    run: OnNpu, device: str, name: str
) -> None:
    """Under `cpu`, an op that raises otherwise runs repeatably, on its device, and is counted.

    Under `error`, the message of torch is followed by advice. Before and after, the op raises.
    """
    (plain, advised, again), results, devices, done = run(_tried, name, device)
    expected = CALLS[name]("cpu")

    assert plain == again
    assert (REFUSED in plain) == bool(plain)
    assert advised.startswith(plain)
    assert advised.count("torchrepro: aten::") == bool(plain)
    assert all(torch.equal(results[0], other) for other in results)
    torch.testing.assert_close(results[0], expected)
    assert set(devices) == {device}
    assert {op.partition(".")[0] for op in done} == (
        {f"aten::{name.partition(' ')[0]}"} if plain else set()
    )


def test_every_device_refuses_something(run: OnNpu, device: str) -> None:
    """The test above has at least one op per device."""
    assert any(run(_refusal, name, device) for name in CALLS)


def test_calls_are_counted_with_their_lines() -> None:
    """The report shows which op did not run natively, how often, and for which line."""
    with deciding("cpu"):
        put()
        put()
    (effect,) = [effect for effect in effects() if effect.policy == "device.fallback"]

    assert (effect.subject, effect.calls) == ("aten::put_", 2)
    assert effect.where.startswith(f"{__file__}:")


@pytest.mark.parametrize("algorithms", ["none", "warn", "error"])
def test_native_lets_one_op_vary_and_counts_it(algorithms: str) -> None:
    """The mode of torch is restored, also after a call that raises; other ops still raise."""
    with deciding({"ops": {"put_": "native"}}, algorithms):
        before = torch.get_deterministic_debug_mode()
        put()
        with pytest.raises(IndexError):
            torch.zeros(1).put_(torch.tensor([7]), torch.ones(1))
        after = torch.get_deterministic_debug_mode()
        if algorithms == "error":
            with pytest.raises(RuntimeError, match=REFUSED):
                unpool()

    assert before == after
    assert counted()["aten::put_"] == {NATIVELY: (1, 0)}


def test_native_calls_in_many_threads_restore_the_mode() -> None:
    """Overlapping calls restore the mode from before the first of them."""

    def many() -> None:
        for _ in range(200):
            put()

    with deciding({"ops": {"put_": "native"}}):
        threads = [threading.Thread(target=many) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        mode = torch.get_deterministic_debug_mode()

    assert mode == 2
    assert counted()["aten::put_"] == {NATIVELY: (800, 0)}


@pytest.fixture
def composed(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return a new op that calls two ops that torch refuses, `put_` first."""
    namespace = f"composed_for_{request.node.name}"
    library = torch.library.Library(namespace, "DEF")
    library.define("again(Tensor x) -> Tensor")

    def again(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().put_(torch.tensor([0, 0]), torch.ones(2))
        return torch.ops.aten.max_unpool2d(x.view(1, 2, 2), torch.zeros(1, 2, 2).long(), [2, 2])

    library.impl("again", again, "CompositeExplicitAutograd")
    yield namespace
    library._destroy()


def test_a_nested_native_op_does_not_end_the_outer_one(composed: str) -> None:
    """torch refuses nothing until the outermost call ends."""
    with deciding({"ops": {f"{composed}::again": "native", "put_": "native"}}):
        result = getattr(torch.ops, composed).again(torch.zeros(4))
        mode = torch.get_deterministic_debug_mode()

    assert result.shape == (1, 2, 2)
    assert mode == 2


def test_advice_is_given_once(composed: str) -> None:
    """If an op of the profile calls another one, the error has the advice of the inner one."""
    ops = {f"{composed}::again": "cpu", "put_": "native"}
    with deciding({"ops": ops}), pytest.raises(RuntimeError, match=REFUSED) as caught:
        getattr(torch.ops, composed).again(torch.zeros(4))

    assert str(caught.value).count("torchrepro:") == 1
    assert "aten::max_unpool2d" in str(caught.value)


def test_if_one_op_cannot_be_interposed_none_is(composed: str) -> None:
    """If another library has a kernel for an op at the same key, the knob fails for all ops."""
    before = tuple(interposed)
    theirs = torch.library.Library(composed, "IMPL")
    theirs.impl("again", lambda keys, x: x, "BackendSelect", with_keyset=True)
    with deciding({"ops": {f"{composed}::again": "cpu"}}) as applied:
        row = next(row for row in applied.report if row.knob == "device.fallback")

        assert (row.outcome, tuple(interposed)) == ("failed", before)
    theirs._destroy()


@pytest.fixture
def always_warning() -> Iterator[None]:
    """Make torch repeat warnings that it shows once per process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("always_warning")
def test_warnings_of_torch_are_not_changed() -> None:
    """With `warn`, torch warns and runs the op; the policy adds and hides nothing."""
    with deciding("error", "warn"), pytest.warns(UserWarning, match=REFUSED) as caught:
        put()

    assert all("torchrepro" not in str(warning.message) for warning in caught)


SPELLINGS = ["put_", "aten::put_", "aten.put_", "aten::put_.default", "put_.default"]


@pytest.mark.parametrize("spelled", SPELLINGS)
def test_an_op_is_known_by_all_its_spellings(spelled: str) -> None:
    """`aten::put_`, `aten.put_` and `put_` are one op."""
    with deciding({"ops": {spelled: "cpu"}}):
        result = put()

    assert result.tolist() == [2, 0, 0, 5]


def test_a_name_overrides_a_pattern_and_a_long_pattern_a_short_one() -> None:
    """The order in a mapping does not matter."""
    entries = {"*": "error", "max_unpool*": "cpu", "put_": "native"}
    for order in (entries, dict(reversed(entries.items()))):
        with deciding({"ops": order}):
            put()
            unpool()
        assert counted()["aten::put_"] == {NATIVELY: (1, 0)}
        assert [calls for calls, _ in counted()["aten::max_unpool2d"].values()] == [1]


def _refused_by_name(device: str) -> str:
    x = torch.ones(3, device=device)
    with deciding({"ops": {"erf": "error"}}):
        x.cumsum(0)
        with pytest.raises(RuntimeError) as caught:
            x.erf()
    return str(caught.value)


def test_error_by_name_refuses_every_call(run: OnNpu, device: str) -> None:
    """An op with `error` raises on a device that would run it; no other op does."""
    assert re.search(r"aten::erf may not run.*\n.*native", run(_refused_by_name, device))


@pytest.mark.parametrize(
    ("op", "says"),
    [
        ("cumsmu", "did you mean `cumsum`?"),
        ("upsmaple_*", "matches none"),
        ("aten::nothing_like_it", "no op"),
        ("matmul", "into other ops"),
        ("view", "view"),
    ],
)
def test_an_op_that_cannot_be_interposed_is_refused(op: str, says: str) -> None:
    """An unknown name, or one without its own kernel, fails and changes nothing.

    The profile then does not count as repeatable.
    """
    before = tuple(interposed)
    with deciding({"ops": {"put_": "native", op: "cpu"}}) as applied:
        row = applied.report["device.fallback"]
        inside = tuple(interposed)
    with pytest.raises(torchrepro.ApplyError, match=re.escape(says)):
        torchrepro.apply({**applied.resolved.values, "guarantee": "repeatable"})

    assert row.outcome == "failed"
    assert says in row.why
    assert before == inside


@pytest.mark.parametrize("value", ["cpu", {"ops": {"*": "cpu"}}, {"ops": {"*": "native"}}])
def test_the_fallback_is_unsupported_without_deterministic_algorithms(
    value: Any,
) -> None:
    """Without deterministic algorithms no op falls back; report and plan give the reason."""
    profile = {"device": {"fallback": value}}
    with torchrepro.apply(profile) as applied:
        row = applied.report["device.fallback"]

    assert row.outcome == "unsupported"
    assert "backends.torch.deterministic_algorithms" in row.why
    assert torchrepro.plan(profile).report["device.fallback"] == row


def test_ops_are_interposed_only_while_a_profile_is_active() -> None:
    """The policy interposes ops only while it is active, also in nested and repeated scopes.

    A second profile with the same value, and its undo, change nothing.
    """
    before = tuple(interposed)
    with deciding("error") as outer:
        advising = set(interposed)
        with deciding("error") as same:
            pass
        with deciding({"ops": {"cumsum": "native"}}):
            result = torch.ones(2).cumsum(0)
        after_inner = set(interposed)
        with pytest.raises(RuntimeError, match="torchrepro:"):
            put()

    outcomes = [applied.report["device.fallback"].outcome for applied in (outer, same)]
    assert outcomes == ["applied", "unchanged"]
    assert result.tolist() == [1, 2]
    assert advising == after_inner != set(before)
    assert tuple(interposed) == before


def test_backward_in_threads_of_torch_falls_back() -> None:
    """An op that autograd calls in another thread falls back like any other."""
    results: list[torch.Tensor] = []
    with deciding("cpu"):
        thread = threading.Thread(target=lambda: results.append(unpool()))
        thread.start()
        thread.join()

    assert torch.equal(unpool(), results[0])


def test_an_op_in_torchscript_falls_back() -> None:
    """Compiled TorchScript calls ops through the same dispatcher."""
    arguments = torch.zeros(4), torch.tensor([0, 0, 3]), torch.tensor([1.0, 2.0, 5.0])
    with warnings.catch_warnings(), deciding("cpu"):
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.trace(lambda x, *written: x.clone().put_(*written), arguments)
        result = scripted(*arguments)

    assert result.tolist() == [2, 0, 0, 5]


@pytest.mark.filterwarnings("ignore:.*quantized:UserWarning", "ignore:.*quantize:UserWarning")
def test_an_op_without_any_deterministic_kernel_raises_with_advice() -> None:
    """An op without a deterministic kernel on the CPU or in torchrepro raises with advice."""
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    with deciding("cpu"), pytest.raises(RuntimeError, match=REFUSED) as caught:
        quantised.resize_(5)

    assert "dequantize, resize and quantize again" in str(caught.value)
    assert "cpu to run it on the CPU" not in str(caught.value)


def test_the_fallback_of_debug_strict_raises_with_advice() -> None:
    """The shipped strict profile has an active `fallback: error`, with its advice.

    The message of torch is followed by a replacement for the op, and by the key that allows the
    op.
    """
    with torchrepro.apply("debug-strict") as applied:
        row = applied.report["device.fallback"]
        with pytest.raises(RuntimeError, match=r"torchrepro: .*index_put.* device\.fallback: cpu"):
            put()

    assert row.outcome == "applied"


COMPILED = """
import sys, torch, torchrepro
from torch.nn import functional

def put(x, places, values):
    return x.clone().put_(places, values) + 1

def scatter(x, places, values):
    return x.scatter_add(0, places, values) * 2

def unpool(x, places, values):
    x = torch.outer(x, x).reshape(1, 4, 4)
    return functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2)

arguments = torch.arange(4.0), torch.tensor([0, 0, 3]), torch.tensor([1.0, 2.0, 5.0])
flags = {"torch": {"deterministic_algorithms": "error"}}
with torchrepro.apply({"backends": flags, "device": {"fallback": "cpu"}}):
    for function in (put, scatter, unpool):
        try:
            result = torch.compile(function, backend=sys.argv[1])(*arguments)
        except RuntimeError as error:
            print("refuses" if "deterministic implementation" in str(error) else error)
        else:
            print("same" if torch.equal(function(*arguments), result) else "differs")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_equals_eager_code_or_raises(
    fork_python: Callable[..., subprocess.CompletedProcess[str]], backend: str, tmp_path: Path
) -> None:
    """Kernels of torch.compile are deterministic too; ops that it cannot trace so raise."""
    # In a process of its own: torch.compile leaves flags and variables behind.
    program = f"import warnings; warnings.simplefilter('ignore'){COMPILED}"
    done = fork_python("-c", program, backend, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    put_into, scattered, unpooled = done.stdout.splitlines()

    assert (put_into, scattered) == ("same", "same")
    assert unpooled in ("same", "refuses")


class Model(nn.Module):
    """A model with refused ops forward (cumsum, 2-d cross entropy) and backward (padding)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shrink, sum along a dimension, and grow."""
        hidden = functional.max_pool2d(self.first(x), 2).cumsum(3)
        return self.last(functional.pad(hidden, (2, 2, 2, 2), mode="reflect"))


TRAINING_ALERTS = ("aten::cumsum", "aten::reflection_pad2d_backward", "aten::nll_loss2d_forward")


def _trained(device: str, value: Any) -> tuple[list[torch.Tensor], Any]:
    alert_on(*TRAINING_ALERTS)
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


def test_training_continues_with_ops_that_torch_refuses(on_npu: OnNpu) -> None:
    """Forward and backward ops fall back: the run repeats, and equals that of the CPU bitwise.

    Each call counts its moved bytes: the arguments to the CPU and the results back.
    """
    hidden, grown = 2 * 4 * 4 * 4 * 4, 2 * 4 * 8 * 8 * 4
    first, done = on_npu(_trained, "npu", "cpu")
    second, _ = on_npu(_trained, "npu", "cpu")
    cpus, nothing = on_npu(_trained, "cpu", "cpu")

    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, cpus))
    assert set(done) == set(TRAINING_ALERTS)
    assert done["aten::cumsum"] == {ON_CPU: (6, 12 * hidden)}  # its gradient is one as well
    assert done["aten::reflection_pad2d_backward"] == {ON_CPU: (3, 3 * (grown + 2 * hidden))}
    assert nothing == {}


def test_native_runs_the_kernel_of_the_device(on_npu: OnNpu) -> None:
    """Under `native` the ops run on the device and are counted, and other ops still raise."""
    ops = dict.fromkeys(TRAINING_ALERTS, "native")
    weights, done = on_npu(_trained, "npu", {"ops": ops})
    cpus, _ = on_npu(_trained, "cpu", "cpu")
    del ops["aten::nll_loss2d_forward"]
    with pytest.raises(RuntimeError, match="nll_loss2d_forward_npu does not have"):
        on_npu(_trained, "npu", {"ops": ops})

    assert {what for each in done.values() for what in each} == {NATIVELY}
    assert all(map(torch.equal, weights, cpus))


def _sums(value: Any) -> tuple[list[list[float]], Any]:
    vary("aten::cumsum", "aten::erf")
    x = torch.arange(6.0, device="npu") / 7
    with deciding(value):
        return [(x.cumsum(0) + x.erf().relu()).tolist() for _ in range(3)], counted()


def test_an_op_that_raises_nothing_runs_on_the_cpu_if_the_profile_names_it(on_npu: OnNpu) -> None:
    """A device that varies without an error becomes repeatable op by op."""
    varying, _ = on_npu(_sums, "cpu")
    half, _ = on_npu(_sums, {"ops": {"cumsum": "cpu"}})
    repeatable, done = on_npu(_sums, {"ops": {"cumsum": "cpu", "aten::erf": "cpu"}})

    assert varying[0] != varying[1]
    assert half[0] != half[1]
    assert repeatable[0] == repeatable[1] == repeatable[2]
    assert done == {"aten::cumsum": {ON_CPU: (3, 144)}, "aten::erf": {ON_CPU: (3, 144)}}


def test_a_pattern_applies_only_to_ops_that_would_raise(on_npu: OnNpu) -> None:
    """`*` moves exactly the ops that torch refuses."""
    _, done = on_npu(_trained, "npu", {"ops": {"*": "cpu"}})
    varying, none = on_npu(_sums, {"ops": {"*": "cpu"}})

    assert set(done) == set(TRAINING_ALERTS)
    assert varying[0] != varying[1]
    assert none == {}


def _other_ops() -> int:
    x = torch.ones(3, device="npu")
    with deciding("cpu"):
        log.clear()
        (x + x).relu()
        return len(log)


def test_other_ops_do_no_additional_work(on_npu: OnNpu) -> None:
    """An op outside the table reaches its kernel without a copy or another op."""
    assert on_npu(_other_ops) == 2


NPU = "npu"
FORMS: dict[str, Callable[[str], Any]] = {
    "in place": lambda d: _through(torch.arange(6.0, device=d), lambda x: x.cumsum_(0)),
    "in place on a view": lambda d: _through(
        torch.arange(6.0, device=d).view(2, 3), lambda x: x.t()[1].cumsum_(0)
    ),
    "in place on a slice with gaps": lambda d: _through(
        torch.arange(9.0, device=d), lambda x: x[1::3].cumsum_(0)
    ),
    "into an empty output": lambda d: _through(
        torch.empty(0, device=d), lambda x: torch.cumsum(torch.ones(2, 3, device=d), 1, out=x)
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
    returned = change(x)
    return x, returned


def _form(name: str, device: str, ops: tuple[str, ...]) -> tuple[list[Any], int, int]:
    with deciding({"ops": dict.fromkeys(ops, "cpu")}) if ops else deciding("error"):
        results = FORMS[name](device)
        results = results if isinstance(results, tuple | list) else [results]
        calls = sum(calls for each in counted().values() for calls, _ in each.values())
        facts = [(each.dtype, each.stride(), each.device.type) for each in results]
    values = [(each.cpu().tolist(), *fact) for each, fact in zip(results, facts, strict=True)]
    return values, len({id(each) for each in results}), calls


@pytest.mark.parametrize("name", FORMS)
def test_a_moved_op_returns_what_the_device_returns(on_npu: OnNpu, name: str) -> None:
    """Values, type, layout and device of a moved op equal those of the kernel of the device.

    If the kernel returns an argument, the moved op returns the same object.
    """
    *moved, calls = on_npu(_form, name, NPU, MOVED_OPS)
    *kept, _ = on_npu(_form, name, NPU, ())

    assert calls > 0
    assert moved == kept


def _written_where_it_is_read() -> None:
    x = torch.arange(6.0, device=NPU)
    with deciding({"ops": {"copy_": "cpu"}}):
        x[:4].copy_(x[2:])


def test_overlapping_tensors_overlap_on_the_cpu_too(on_npu: OnNpu) -> None:
    """A write that torch refuses because of overlapping tensors is refused on the CPU too."""
    with pytest.raises(RuntimeError, match="single memory location"):
        on_npu(_written_where_it_is_read)


def _short_of_a_kernel(kind: torch.dtype) -> tuple[list[float], torch.dtype, str]:
    x = torch.ones(4, dtype=kind, device=NPU)

    def only_float32(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("\"cumsum_cpu\" not implemented for 'Half'")
        return torch.cumsum(x, *args, **kwargs)

    only_float32._schema = torch.ops.aten.cumsum.default._schema
    result, _ = on_cpu(only_float32, (x, 0), {})
    return result.tolist(), result.dtype, result.device.type


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_a_short_type_without_a_cpu_kernel_is_computed_in_float32(
    on_npu: OnNpu, kind: torch.dtype
) -> None:
    """If the CPU has no kernel for half precision, a float32 result is rounded."""
    assert on_npu(_short_of_a_kernel, kind) == ([1, 2, 3, 4], kind, NPU)


def _sparse() -> tuple[list[list[float]], str, int]:
    indices = torch.tensor([[0, 1], [1, 0]])
    matrix = torch.sparse_coo_tensor(indices, torch.tensor([2.0, 3.0]), (2, 2)).coalesce()
    (mm,) = ops_named("aten::mm")
    result, moved = on_cpu(mm, (matrix, torch.eye(2, device=NPU)), {})
    return result.tolist(), result.device.type, moved


def test_a_result_goes_to_the_device_of_the_tensors(on_npu: OnNpu) -> None:
    """Arguments on the CPU, also sparse ones, are not moved."""
    assert on_npu(_sparse) == ([[0, 2], [3, 0]], NPU, 32)
