"""What fingerprints and statistics cost, printed; the fast path is held to a bound."""

import time
from collections.abc import Callable

import pytest
import torch

from torchrepro.console import as_text, table
from torchrepro.trace.device_fingerprint import device_fingerprint
from torchrepro.trace.fingerprint import fingerprint
from torchrepro.trace.statistics import statistics

pytestmark = pytest.mark.benchmark

SMALL: dict[str, torch.Tensor] = {
    "16 numbers": torch.randn(16),
    "complex": torch.randn(16, dtype=torch.complex64),
    "transposed": torch.randn(4, 4).t(),
    "channels_last": torch.randn(1, 4, 2, 2).to(memory_format=torch.channels_last),
    "gaps": torch.randn(4, 5)[:, 1:],
    "sparse": torch.eye(4).to_sparse(),
}
LARGE = torch.randn(1 << 24)
WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "fingerprint": fingerprint,
    "as a device does": device_fingerprint,
    "statistics": statistics,
}


def _seconds(work: Callable[[], object], times: int) -> float:
    """Return the least that one of `times` calls takes: other programs only add to it."""
    work()
    found = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - start) / times)
    return min(found)


def _of(way: Callable[[torch.Tensor], object], tensor: torch.Tensor, times: int) -> float:
    return _seconds(lambda: way(tensor), times)


def test_what_they_cost() -> None:
    """A plain small tensor costs what adding two of them does; prints the cost of all kinds."""
    rows = [
        (f"{way}, {name}", f"{_of(take, tensor, 1000) * 1e6:.2f} us")
        for way, take in WAYS.items()
        for name, tensor in SMALL.items()
    ]
    rows += [
        (f"{way}, {LARGE.nbytes >> 20} MiB", f"{LARGE.nbytes / _of(take, LARGE, 2) / 1e9:.1f} GB/s")
        for way, take in WAYS.items()
    ]
    reading = LARGE.nbytes / _seconds(LARGE.sum, 2) / 1e9
    rows.append(("reading alone (sum)", f"{reading:.1f} GB/s"))
    print(f"\n{as_text('fingerprints on the CPU', table(('', 'least'), rows))}")

    plain = SMALL["16 numbers"]
    assert _of(fingerprint, plain, 10_000) < 1.5 * _seconds(lambda: plain + plain, 10_000)
