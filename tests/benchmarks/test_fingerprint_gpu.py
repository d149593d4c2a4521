"""What a fingerprint costs on a GPU, beside the bandwidth of its memory."""

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from torchrepro.trace.device_fingerprint import NARROW, WIDE, device_fingerprint, fetch, sums
from torchrepro.trace.fingerprint import unobserved

from .paired import require, show

pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = 1 << 30
SHARE = 0.7


def _seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found[2:])


def test_a_large_tensor_is_read_at_most_of_the_bandwidth() -> None:
    """A fingerprint reads memory at 70 % or more of what copying it reaches in the same run."""
    tensor = torch.randint(-9, 9, (SIZE // 4,), dtype=torch.int32, device="cuda")
    other = torch.empty_like(tensor)
    fetch([device_fingerprint(tensor)])
    copying = 2 * SIZE / _seconds(lambda: other.copy_(tensor))  # reads and writes
    fingerprinting = SIZE / _seconds(lambda: device_fingerprint(tensor))
    rows = [
        ("copying, both ways", f"{copying / 1e9:.0f} GB/s"),
        ("fingerprint", f"{fingerprinting / 1e9:.0f} GB/s, {fingerprinting / copying:.0%}"),
    ]
    for mixing in (WIDE, NARROW):
        with unobserved():
            seconds = _seconds(lambda: sums(iter([tensor]), mixing))  # noqa: B023 - called at once
        rows.append((f"  {mixing.name}", f"{SIZE / seconds / 1e9:.0f} GB/s"))
    show("fingerprints on a GPU", rows)

    require(fingerprinting >= SHARE * copying, f"{SHARE:.0%} of copying")


def test_figures_of_small_tensors() -> None:
    """Prints what a fingerprint of a small tensor takes of the host's time, and fetching many."""
    tensor = torch.ones(16, device="cuda")
    fetch([device_fingerprint(tensor)])
    torch.cuda.synchronize()
    start = time.perf_counter()
    pending = [device_fingerprint(tensor) for _ in range(1000)]
    begun = time.perf_counter()
    fetch(pending)
    done = time.perf_counter()
    rows = [
        ("one of 16 numbers", f"{(begun - start) * 1e3:.1f} us"),
        ("fetching 1000", f"{(done - begun) * 1e3:.1f} ms"),
    ]
    show("small tensors on a GPU", rows)

    assert len({one.bytes for one in pending}) == 1
