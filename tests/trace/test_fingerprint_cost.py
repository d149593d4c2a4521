"""What fingerprints and statistics cost, printed; the fast path is held to a bound."""

import time
from collections.abc import Callable

import pytest
import torch

from torchrepro.console import as_text, table
from torchrepro.trace.buffer import statistics
from torchrepro.trace.fingerprint import device_fingerprint, fingerprint

pytestmark = pytest.mark.benchmark

SMALL: dict[str, torch.Tensor] = {
    "16 numbers": torch.randn(16),
    "transposed": torch.randn(4, 4).t(),
    "gaps": torch.randn(4, 5)[:, 1:],
    "sparse": torch.eye(4).to_sparse(),
}
LARGE = torch.randn(1 << 24)


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


def test_what_they_cost() -> None:
    """A plain small tensor costs what adding two of them does; prints the cost of all kinds."""
    rows = []
    for take in (fingerprint, device_fingerprint, statistics):
        for name, tensor in SMALL.items():
            seconds = _seconds(lambda take=take, tensor=tensor: take(tensor), 1000)
            rows.append((f"{take.__name__}, {name}", f"{seconds * 1e6:.2f} us"))
        seconds = _seconds(lambda take=take: take(LARGE), 2)
        rows.append((f"{take.__name__}, 64 MiB", f"{LARGE.nbytes / seconds / 1e9:.1f} GB/s"))
    print(f"\n{as_text('fingerprints on the CPU', table(('', 'least'), rows))}")

    plain = SMALL["16 numbers"]
    taken = _seconds(lambda: fingerprint(plain), 10_000)
    assert taken < 1.5 * _seconds(lambda: plain + plain, 10_000)
