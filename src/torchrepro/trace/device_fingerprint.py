"""Fingerprints of tensors on an accelerator: computed there, and fetched later, many at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.trace.fingerprint import (
    ALGORITHM,
    NARROW,
    WIDE,
    fingerprint,
    memory_of,
    not_read,
    pieces,
    sums,
    torch,
    unobserved,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchrepro.trace.fingerprint import Mixing

MIXINGS = {"npu": (NARROW, WIDE)}
"""How types of devices may compute sums, the fastest first."""

OTHER_MIXINGS = (WIDE, NARROW)


@dataclass(slots=True)
class Pending:
    """A fingerprint that a device computes."""

    bytes: bytes | None = None
    """The 16 bytes, once fetched."""
    kind: str = ""
    sizes: tuple[int, ...] = ()
    sums: list[Any] = field(default_factory=list)
    """16 bytes on the device for each part that has bytes, until they are fetched."""


def device_fingerprint(tensor: Any) -> Pending:
    """Begin to fingerprint `tensor` on its device, without waiting; `fetch` fills it in.

    Two tensors have the same where their `fingerprint` is the same; the bytes are others. Waits at
    the first tensor of a device, to test the device's arithmetic, and at every tensor of a device
    that fails the test. Tensors that are captured into a graph are not computed yet and have a
    constant. Never raises.
    """
    try:
        with unobserved():
            return _begun(tensor)
    except Exception:  # noqa: BLE001 - the code of a subclass is anybody's, and may raise anything
        return _constant(not_read(tensor).kind)


def fetch(pendings: Iterable[Pending]) -> None:
    """Fill in the bytes of `pendings`; waits for each device once and copies once from it.

    One may come several times: as an output of one op, and as an input of those that read it.
    """
    once = {id(pending): pending for pending in pendings}.values()
    # Another thread may fetch the same one: it sets the bytes before it drops the sums.
    missing = [(one, sums) for one, sums in [(one, one.sums) for one in once] if one.bytes is None]
    by_device: dict[Any, list[Any]] = defaultdict(list)
    fetched = {}
    with unobserved():
        for _, sums_of_parts in missing:
            for found in sums_of_parts:
                by_device[found.device].append(found.view(torch.uint8))
        for device, together in by_device.items():
            getattr(_module(device), "synchronize", lambda _: None)(device)  # all of its streams
            fetched[device] = BytesIO(torch.cat(together).cpu().numpy().tobytes())
    for pending, sums_of_parts in missing:
        parts = b"".join(fetched[found.device].read(16) for found in sums_of_parts)
        pending.bytes = xxhash.xxh3_128_digest(f"{pending.kind} {pending.sizes}".encode() + parts)
        pending.sums = []


def algorithm(device: Any) -> str:
    """Return the name of what `device_fingerprint` computes on `device`."""
    with unobserved():
        mixing = _mixing(device)
    return mixing.name if mixing else ALGORITHM


def _begun(tensor: Any) -> Pending:
    memory = memory_of(tensor)
    pending = Pending(kind=memory.kind, sizes=tuple(part.nbytes for part in memory.parts))
    for part in memory.parts:
        # Nothing may be waited for where the device's stream is recording a graph.
        if getattr(_module(part.device), "is_current_stream_capturing", lambda: False)():
            return _constant("captured into a graph")
        if part.nbytes:
            mixing = _mixing(part.device)
            if mixing is None:
                return Pending(fingerprint(tensor))
            pending.sums.append(sums(pieces(part), mixing))
    return pending


def _constant(kind: str) -> Pending:
    return Pending(xxhash.xxh3_128_digest(kind.encode()))


@cache
def _module(device: Any) -> Any:
    return torch.get_device_module(device)


@cache
def _mixing(device: Any) -> Mixing | None:
    """Return the first arithmetic in which `device` computes what the host computes.

    One that raises there is skipped. Waits for the device.
    """
    probe = torch.arange(-9999, 9999, dtype=torch.int64, device="cpu") * WIDE.multipliers[0]
    probe = probe.view(torch.uint8)[5:]  # neither aligned nor whole words
    for mixing in MIXINGS.get(device.type, OTHER_MIXINGS):
        try:
            there = sums(iter([probe.to(device)]), mixing).cpu()
            if torch.equal(there, sums(iter([probe]), mixing)):
                return mixing
        except Exception:  # noqa: BLE001, S112 - a driver may raise anything
            continue
    return None
