"""Fingerprints on the simulated accelerator are computed there, and fetched in one copy."""

from collections.abc import Callable
from typing import Any

import torch
from simulated_npu import log

from torchrepro.trace.device_fingerprint import algorithm, device_fingerprint, fetch

OnNpu = Callable[..., Any]
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(5000.0),
    "bfloat16": lambda: torch.arange(77.0).bfloat16(),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "gaps": lambda: torch.arange(12.0).view(3, 4)[:, 1:],
    "complex": lambda: torch.arange(9).to(torch.complex64),
}


def taken(device: str) -> tuple[str, dict[str, bytes | None]]:
    """Return the algorithm of a device, and fingerprints of tensors on it."""
    tensors = {name: make().to(device) for name, make in TENSORS.items()}
    pending = {name: device_fingerprint(tensor) for name, tensor in tensors.items()}
    fetch(pending.values())
    used = algorithm(tensors["plain"].device)
    return used, {name: one.bytes for name, one in pending.items()}


def copies(count: int) -> tuple[int, int]:
    """Return the number of copies to the host while fingerprints are computed, and fetched."""
    tensors = [torch.full((100,), float(number), device="npu") for number in range(count)]
    fetch([device_fingerprint(tensors[0])])  # the device's arithmetic is tried at the first
    log.clear()
    pending = [device_fingerprint(tensor) for tensor in tensors]
    before = log.to_host
    fetch(pending)
    return before, log.to_host - before


def test_an_npu_computes_fingerprints_with_32_bit_words(on_npu: OnNpu) -> None:
    """An NPU computes with 32 bits, is trusted, and equal values have equal fingerprints."""
    used, found = on_npu(taken, "npu")
    again = on_npu(taken, "npu:1")

    assert used == "mix32"
    assert again == (used, found)
    assert len(set(found.values())) == len(TENSORS)


def fetched_twice() -> tuple[list[bytes | None], list[bytes | None]]:
    """Return fingerprints fetched once, and fingerprints of which each was fetched twice."""
    tensors = [torch.arange(start, start + 9.0).to("npu") for start in range(3)]
    alone = [device_fingerprint(tensor) for tensor in tensors]
    twice = [device_fingerprint(tensor) for tensor in tensors]
    fetch(alone)
    fetch([pending for pending in twice for _ in range(2)])
    return [one.bytes for one in alone], [one.bytes for one in twice]


def test_a_fingerprint_fetched_twice_is_the_same(on_npu: OnNpu) -> None:
    """A tensor that one op writes and another reads has the fingerprint of its values."""
    alone, twice = on_npu(fetched_twice)

    assert twice == alone


def test_fingerprints_are_fetched_in_one_copy(on_npu: OnNpu) -> None:
    """Nothing is copied to the host until all fingerprints are fetched together."""
    assert on_npu(copies, 20) == (0, 1)
    assert on_npu(copies, 3000) == (0, 1)
