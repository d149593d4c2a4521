"""Outputs of ops that wait for their batch: each is read before anything writes its memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_npu import MISSING
from torch.utils import _python_dispatch

import torchrepro
from torchrepro.trace import buffer
from torchrepro.trace.buffer import joined
from torchrepro.trace.format import OUTPUT
from torchrepro.trace.reader import read_run
from torchrepro.trace.tensor_reads import fingerprint_of

OnNpu = Callable[..., Any]
Door = Callable[[torch.Tensor, float], Any]

UNREAD = b"not read" * 2
"""The digest of an output that something wrote unseen."""


def _through_a_view(y: torch.Tensor, value: float) -> None:
    y.view(2, 3)[0].add_(value)


def _through_data(y: torch.Tensor, value: float) -> None:
    y.data.mul_(value)


def _through_a_detached_alias(y: torch.Tensor, value: float) -> None:
    y.detach().clamp_(min=value)


def _as_out(y: torch.Tensor, value: float) -> None:
    torch.add(torch.ones(6, device=y.device), value, out=y)


def _after_set(y: torch.Tensor, value: float) -> None:
    memory = y.view(-1)
    y.set_(torch.ones(6, device=y.device))
    y.add_(value)
    memory.add_(value)


def _through_a_capsule(y: torch.Tensor, value: float) -> None:
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(y)).add_(value)


def _in_inference_mode(y: torch.Tensor, value: float) -> None:
    with torch.inference_mode():
        y.add_(value)


def _of_an_inference_tensor(y: torch.Tensor, value: float) -> None:
    with torch.inference_mode():
        z = y * 2
        z.add_(value)


def _after_resize(y: torch.Tensor, value: float) -> None:
    y.resize_(3).fill_(value)


def _in_a_list(y: torch.Tensor, value: float) -> None:
    torch._foreach_add_([torch.ones(2, device=y.device), y], value)


def _by_a_fused_optimizer(y: torch.Tensor, value: float) -> None:
    gradient = torch.full_like(y, value)
    options: dict[str, Any] = {"weight_decay": 0, "momentum": 0, "lr": 1, "dampening": 0}
    flags: dict[str, Any] = {"nesterov": False, "maximize": False, "is_first_step": True}
    torch._fused_sgd_([y], [gradient], [], **options, **flags)


def _by_an_op_that_declares_it(y: torch.Tensor, value: float) -> None:
    _own_op("declared", "(Tensor(a!) y, float value) -> ()")(y, value)


def _by_an_op_that_does_not_declare_it(y: torch.Tensor, value: float) -> None:
    _own_op("undeclared", "(Tensor y, float value) -> Tensor")(y, value)


def _own_op(name: str, signature: str) -> Any:
    def add(y: torch.Tensor, value: float) -> Any:
        y.add_(value)
        return y.clone() if signature.endswith("Tensor") else None

    library = torch.library.Library("torchrepro_doors", "FRAGMENT")
    _kept.append(library)
    if not hasattr(torch.ops.torchrepro_doors, name):
        library.define(f"{name}{signature}")
        library.impl(name, add, "CompositeExplicitAutograd")
    return getattr(torch.ops.torchrepro_doors, name)


_kept: list[Any] = []  # an op is there as long as its library is


def _by_another_thread(y: torch.Tensor, value: float) -> None:
    thread = threading.Thread(target=y.add_, args=(value,))
    thread.start()
    thread.join()


def _while_modes_are_hidden(y: torch.Tensor, value: float) -> None:
    with _python_dispatch._disable_current_modes():
        y.add_(value)


def _hidden_by_a_guard(y: torch.Tensor, value: float) -> None:
    with torch._C._DisableTorchDispatch():
        y.add_(value)


def _under_a_mode_that_hides(y: torch.Tensor, value: float) -> None:
    class Hides(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    with Hides():
        y.add_(value)


def _in_a_backward_pass(y: torch.Tensor, value: float) -> None:
    x = torch.ones(6, device=y.device, requires_grad=True)
    with torch.no_grad():
        x.copy_(y)
    x.register_hook(lambda gradient: y.add_(value))
    (x * 2).sum().backward()


def _write_by_address(tensor: torch.Tensor, value: float) -> None:
    if tensor.is_cuda:
        from cuda.bindings import runtime

        runtime.cudaMemset(tensor.data_ptr(), int(value), tensor.nbytes)
    else:
        ctypes.memset(tensor.data_ptr(), int(value), tensor.nbytes)


def _in_an_optimizer(y: torch.Tensor, value: float) -> None:
    class ByAddress(torch.optim.Optimizer):  # as the kernels of apex
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            _write_by_address(self.param_groups[0]["params"][0], value)

    y.requires_grad_(True)
    ByAddress([y], {}).step()


def _while_a_loader_loads(y: torch.Tensor, value: float) -> None:
    class Changes(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            _write_by_address(y, value)
            yield 1

    next(iter(torch.utils.data.DataLoader(Changes())))


def _through_another_storage(y: torch.Tensor, value: float) -> None:
    torch.from_dlpack(y).add_(value)


def _through_the_interface_of_arrays(y: torch.Tensor, value: float) -> None:
    array = SimpleNamespace(__cuda_array_interface__=y.__cuda_array_interface__)
    torch.as_tensor(array).add_(value)


def _on_another_stream(y: torch.Tensor, value: float) -> None:
    torch.cuda._sleep(10_000_000)  # so that the batch is late, if nothing waits for it
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y.add_(value)
    torch.cuda.current_stream().wait_stream(stream)


def _by_a_graph(y: torch.Tensor, value: float) -> None:
    graph = _captured(y, value)
    torch.mul(torch.arange(6.0, device=y.device), 2, out=y)  # waits, unlike the first product
    graph.replay()


def _captured(y: torch.Tensor, value: float) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.add_(value)
    return graph


def _by_a_compiled_region(y: torch.Tensor, value: float) -> None:
    torch.compile(lambda tensor: tensor.add_(value))(y)


def _by_a_kernel_of_triton(y: torch.Tensor, value: float) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def fill(memory, number):  # type: ignore[no-untyped-def]
        tl.store(memory + tl.arange(0, 4), number)

    fill[(1,)](y, value)


ON_GPU: dict[str, Door] = {
    "another storage": _through_another_storage,
    "the interface of arrays": _through_the_interface_of_arrays,
    "another stream": _on_another_stream,
    "a graph": _by_a_graph,
    "a captured write": _captured,
    "a compiled region": _by_a_compiled_region,
    "a kernel of Triton": _by_a_kernel_of_triton,
}
"""Doors that only a GPU has."""

SEEN: dict[str, Door] = {
    "a view": _through_a_view,
    "data": _through_data,
    "a detached alias": _through_a_detached_alias,
    "out": _as_out,
    "set_": _after_set,
    "a capsule": _through_a_capsule,
    "inference mode": _in_inference_mode,
    "an inference tensor": _of_an_inference_tensor,
    "resize_": _after_resize,
    "a list": _in_a_list,
    "a fused optimizer": _by_a_fused_optimizer,
    "an own op": _by_an_op_that_declares_it,
    "another thread": _by_another_thread,
    "hidden modes": _while_modes_are_hidden,
    "a backward pass": _in_a_backward_pass,
    "an optimizer that writes by address": _in_an_optimizer,
    "a loader that writes by address": _while_a_loader_loads,
}
"""Doors through which memory is written; the recorder sees that it may be, and reads it before."""

UNSEEN: dict[str, Door] = {
    "an own op that does not declare it": _by_an_op_that_does_not_declare_it,
    "a guard": _hidden_by_a_guard,
    "a mode that hides": _under_a_mode_that_hides,
}
"""Doors that the recorder cannot see, but whose write it notices."""


SECOND = {"a graph"}
"""Doors whose program has a second product that waits, of equal value."""


def product(folder: str, door: str, value: float, device: str) -> tuple[bytes, bytes]:
    """Return the recorded fingerprint of a product of six numbers and 2, and the right one.

    Its memory is written through `door` before the recording ends.
    """
    torch.manual_seed(0)
    with torchrepro.record(folder):
        y = torch.arange(6.0, device=device) * 2
        (SEEN | UNSEEN | ON_GPU)[door](y, value)
        torch.ones(1, device=device) * 3
    expected = fingerprint_of_one(torch.arange(6.0, device=device) * 2)
    return products(folder)[door in SECOND], expected


def products(folder: str | Path) -> list[bytes]:
    """Return the fingerprints of all results of `mul`, in order."""
    (trace,) = read_run(Path(folder))
    return [
        record.outputs[-OUTPUT:]
        for step in trace.steps
        for record in trace.records(step)
        if trace.sites[record.site].key[2].startswith("aten::mul.")
    ]


def fingerprint_of_one(tensor: torch.Tensor) -> bytes:
    return joined([fingerprint_of(tensor)], OUTPUT)


@pytest.fixture
def checked(run: OnNpu, device: str, tmp_path: Path) -> Callable[[str], list[tuple[bytes, bytes]]]:
    """Run the program of a door with two values, and return what `product` returns."""

    def check(door: str) -> list[tuple[bytes, bytes]]:
        if device == "cuda" and "address" in door:
            pytest.importorskip("cuda.bindings", reason="nothing here writes by address")
        values = (5.0, 7.0)
        return [run(product, str(tmp_path / str(one)), door, one, device) for one in values]

    return check


Checked = Callable[[str], list[tuple[bytes, bytes]]]


@pytest.mark.parametrize("door", SEEN)
def test_a_write_that_is_seen_does_not_change_an_earlier_output(
    checked: Checked, door: str
) -> None:
    """The record of an op has the value that the op wrote, whoever writes the memory later."""
    assert all(found == expected for found, expected in checked(door))


@pytest.mark.parametrize("door", UNSEEN)
def test_a_write_that_is_not_seen_is_never_taken_for_the_output(
    checked: Checked, door: str
) -> None:
    """The record of an op has the value that the op wrote, or says that it was not read."""
    assert all(found in {expected, UNREAD} for found, expected in checked(door))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("door", ON_GPU)
def test_a_write_that_only_a_gpu_makes_does_not_change_an_earlier_output(
    tmp_path: Path, door: str
) -> None:
    """The record of an op has the value that the op wrote, also where no op shows the write."""
    for value in (5.0, 7.0):
        found, expected = product(str(tmp_path / str(value)), door, value, "cuda")
        assert found == expected


def many_products(
    folder: str, count: int, in_memory: int, device: str
) -> tuple[list[bytes], list[bytes]]:
    """Return the recorded fingerprints of `count` products that nothing writes, and the right."""
    before, buffer.IN_MEMORY = buffer.IN_MEMORY, in_memory
    try:
        with torchrepro.record(folder):
            x = torch.arange(6.0, device=device)
            kept = [x * number for number in range(count)]
    finally:
        buffer.IN_MEMORY = before
    return products(folder), [*map(fingerprint_of_one, kept)]


@pytest.mark.parametrize(("count", "in_memory"), [(5, 1 << 16), (1500, 1 << 16), (300, 100)])
def test_every_output_is_read_at_a_bound_at_a_spill_and_at_the_end(
    run: OnNpu, device: str, tmp_path: Path, count: int, in_memory: int
) -> None:
    """However many outputs wait, and whenever records are moved, each has its own fingerprint."""
    found, expected = run(many_products, str(tmp_path / "run"), count, in_memory, device)

    assert found == expected


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_outputs_of_torchs_own_ops_are_the_same_whether_they_wait(tmp_path: Path) -> None:
    """For each op that torch has samples of, no output is unread, and each digest is the same."""
    program = Path(__file__).with_name("waiting_ops.py")
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(program.parents[1] / "trace")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    print(done.stdout)

    assert "unread: 0\nthe same: " in done.stdout, done.stderr
