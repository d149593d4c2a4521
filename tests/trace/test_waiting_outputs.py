"""Tensors that wait for their batch: their bounds, their life, streams, and writes in between."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from weakref import ref

import pytest
import torch

from torchrepro.trace import waiting_outputs as module
from torchrepro.trace.device_fingerprint import (
    PendingDigest,
    device_fingerprint,
    fetch,
    launch,
    stream_of,
)
from torchrepro.trace.digests import UNREAD, digest_of_unfinished
from torchrepro.trace.fingerprint import fingerprint
from torchrepro.trace.hooks import before_unrecorded_writes
from torchrepro.trace.op_facts import facts_of
from torchrepro.trace.waiting_outputs import MOST, MOST_BYTES, WaitingOutputs

if TYPE_CHECKING:
    from collections.abc import Callable


def _bytes(*digests: PendingDigest) -> list[bytes | None]:
    fetch(digests)
    return [digest.bytes for digest in digests]


def _expected(*tensors: torch.Tensor) -> list[bytes | None]:
    return _bytes(*map(device_fingerprint, tensors))


def test_a_tensor_that_waits_has_the_fingerprint_that_it_has_alone() -> None:
    """Tensors of any dtype, layout and length wait, or are read at once, with equal results."""
    base = torch.arange(24.0).view(4, 6)
    tensors = [
        *(base, base.t(), base[:, 1:], torch.empty(0), torch.tensor(3.0), base.to_sparse()),
        *(torch.ones(3, dtype=torch.bool), torch.ones(5, dtype=torch.bfloat16)),
        *(torch.ones(1 << 21, dtype=torch.uint8), torch.view_as_complex(base.view(-1, 2)).conj()),
        *(torch.ones(7, dtype=torch.float8_e5m2), torch.ones(3, dtype=torch.uint16), base),
    ]
    waiting = WaitingOutputs()

    digests = [waiting.add(tensor, tensor._version) for tensor in tensors]

    assert _bytes(*digests) == _expected(*tensors)
    assert not waiting.storages
    assert not waiting.unread


def test_what_waits_is_bounded() -> None:
    """No more tensors or bytes wait on a device than the two bounds."""
    waiting = WaitingOutputs()
    for number in range(3 * MOST):
        waiting.add(torch.full((3,), float(number)), 0)
        assert len(waiting.storages) <= MOST
    waiting.launch()
    for _ in range(3 * MOST_BYTES // (1 << 20)):
        waiting.add(torch.empty(1 << 20, dtype=torch.uint8), 0)
        assert len(waiting.storages) <= MOST_BYTES >> 20


def test_a_tensor_that_waits_keeps_no_graph_alive() -> None:
    """The program can free a tensor that waits, and with the tensor the graph of autograd."""
    waiting = WaitingOutputs()
    result = torch.ones(3, requires_grad=True) * 2
    digest = waiting.add(result, 0)
    reference = ref(result)

    del result

    assert reference() is None
    assert _bytes(digest) == _expected(torch.full((3,), 2.0))


def _freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def _written(tensor: torch.Tensor) -> None:
    tensor.add_(1)


@pytest.mark.parametrize("change", [_freed, _written])
def test_a_change_that_nobody_announced_is_noticed(
    change: Callable[[torch.Tensor], None],
) -> None:
    """The digest of a tensor that was written or freed while it waited says that it is unread."""
    waiting = WaitingOutputs()
    tensor, other = torch.ones(3), torch.ones(4)
    digests = [waiting.add(tensor, 0), waiting.add(other, 0)]

    change(tensor)

    assert _bytes(*digests) == [UNREAD + UNREAD, *_expected(other)]
    assert waiting.unread == 1


@pytest.mark.parametrize(
    ("op", "arguments", "launches"),
    [
        (torch.ops.aten.add_.Tensor, lambda x: (x.view(-1)[1:], 1), True),
        (torch.ops.aten.add_.Tensor, lambda _: (torch.ones(3), 1), False),
        (torch.ops.aten._foreach_add_.Scalar, lambda x: ([torch.ones(2), x], 1), True),
        (torch.ops.aten.mul_.Tensor, lambda _: (torch.eye(2).to_sparse(), 2), True),
        (torch.ops.c10d.allreduce_.default, lambda _: ([torch.ones(3)],), True),
        (torch.ops.higher_order.cond, lambda _: (), True),
    ],
    ids=("a view", "another tensor", "a list", "sparse", "a collective", "without a schema"),
)
def test_an_op_that_may_write_what_waits_is_preceded_by_its_batch(
    op: Any, arguments: Callable[[torch.Tensor], Any], launches: bool
) -> None:
    """Of ops whose schema declares writes, those of waiting storages; and all opaque ops."""
    waiting = WaitingOutputs()
    tensor = torch.ones(3)
    waiting.add(tensor, 0)
    facts = facts_of(op)
    assert facts.may_write

    waiting.before(facts, arguments(tensor), {})

    assert bool(waiting.storages) is not launches


def test_the_result_of_a_running_collective_is_not_read_at_a_bound() -> None:
    """It is read when the program uses it, or at the end, with the value that it has then."""
    waiting, result = WaitingOutputs(), torch.zeros(3)
    digest = digest_of_unfinished(result)
    for _ in range(2 * MOST):
        waiting.add(torch.ones(3), 0)
    waiting.launch()
    result.data_ptr()
    result.numpy()[:] = 5  # by another thread or device: no version counts it

    assert digest.is_unfinished
    assert _bytes(digest) == [fingerprint(torch.full((3,), 5.0))]


def test_a_batch_starts_on_the_stream_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one stream wait at a time, and the stream that follows waits for their batch."""
    cpu, events = torch.device("cpu"), []

    def launched(rows: Any) -> None:
        events.append((len(rows), stream_of(cpu)))
        launch(rows)

    monkeypatch.setattr(module, "launch", launched)
    first, second = torch.cpu.Stream(), torch.cpu.Stream()
    monkeypatch.setattr(
        torch.cpu.Stream, "wait_stream", lambda self, other: events.append((self, other))
    )
    waiting = WaitingOutputs()
    with torch.cpu.stream(first):
        digests = [waiting.add(torch.ones(3), 0), waiting.add(torch.ones(4), 0)]
    with torch.cpu.stream(second):
        digests.append(waiting.add(torch.ones(5), 0))
        assert events == [(2, first), (second, first)]
        waiting.launch()

    assert events[2:] == [(1, second)]
    assert _bytes(*digests) == _expected(torch.ones(3), torch.ones(4), torch.ones(5))


def test_while_a_graph_is_captured_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that still waits when a capture has begun is unread: it has no other digest."""
    waiting = WaitingOutputs()
    digest = waiting.add(torch.ones(3), 0)
    monkeypatch.setattr(module, "is_capturing", lambda _: True)

    assert _bytes(digest) == [UNREAD + UNREAD]


@pytest.mark.parametrize("method", ["capture_begin", "replay"])
def test_a_graph_is_preceded_by_what_waits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a graph is captured or replayed, what waits is launched. Later, torch is as before."""
    graphs = pytest.importorskip("torch.cuda.graphs")
    events: list[str] = []
    monkeypatch.setattr(graphs.CUDAGraph, method, lambda _: events.append("graph"))
    original = vars(graphs.CUDAGraph)[method]
    with ExitStack() as undo:
        before_unrecorded_writes(undo, lambda: events.append("launch"))
        getattr(graphs.CUDAGraph, method)(None)

    assert events == ["launch", "graph"]
    assert vars(graphs.CUDAGraph)[method] is original


PEAK = """
import re
from pathlib import Path
import torch
from torchrepro.trace.waiting_outputs import MOST_BYTES, WaitingOutputs

def read(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) << 10

waiting = WaitingOutputs()
waiting.add(torch.ones(3), 0)
waiting.launch()  # tries the arithmetic, and makes the tables of keys
for round in range(40):  # other lengths in each batch
    tensors = [torch.ones(((1 << 20) - 8 * round) // 4) for _ in range(MOST_BYTES >> 20)]
    for tensor in tensors:
        waiting.add(tensor, 0)
    del tensor
    if round == 0:
        Path("/proc/self/clear_refs").write_text("5")
        before = read("VmRSS") - MOST_BYTES
    tensors.clear()
    waiting.launch()
print(read("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the peak of /proc")
def test_the_memory_of_what_waits_is_bounded() -> None:
    """Tensors that wait, the temporary memory of batches and all tables take at most 512 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, timeout=300, check=False
    )
    assert not done.returncode, done.stderr
    peak = int(done.stdout)
    print(f"\nwhat waits takes at most {peak / 2**20:.0f} MiB more than nothing")

    assert MOST_BYTES < peak <= 512 << 20
