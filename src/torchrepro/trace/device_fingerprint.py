"""Fingerprints of tensors on an accelerator, computed there and fetched later, many at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import xxhash

from torchrepro.trace.fingerprint import (
    ALGORITHM,
    NARROW,
    WIDE,
    Mixing,
    fingerprint,
    memory_of,
    not_read,
    pieces,
    sums,
    unobserved,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


@dataclass(slots=True)
class Pending:
    """A fingerprint that a device computes."""

    bytes: bytes | None = None
    """The 16 bytes, once fetched."""
    kind: str = ""
    sizes: tuple[int, ...] = ()
    sums: list[Any] = field(default_factory=list)
    """Of each part that has bytes: 16 bytes on its device, until they are fetched."""


@dataclass(frozen=True, slots=True)
class DeviceHash:
    """A way to compute the sums of a part of a tensor on its device."""

    mixing: Mixing
    sums: Callable[[Any], Any]


def device_fingerprint(tensor: Any) -> Pending:
    """Begin to fingerprint `tensor` on its device, without waiting; `fetch` fills it in.

    It says what `fingerprint` says, in other numbers. Waits at the first tensor of a device, where
    the device's arithmetic is tried, and for every tensor of a device that cannot do it. What is
    captured into a graph is not computed yet, and has a constant. Never raises.
    """
    try:
        with unobserved():
            return _begun(tensor)
    except Exception:  # noqa: BLE001 - the code of a subclass is anybody's, and may raise anything
        return _known(not_read(tensor).kind)


def fetch(pendings: Iterable[Pending]) -> None:
    """Fill in the bytes of `pendings`; waits for each device once and copies once from it."""
    waiting = [pending for pending in pendings if pending.bytes is None]
    with unobserved():
        values = _on_host([value for pending in waiting for value in pending.sums])
    found = iter(values)
    for pending in waiting:
        parts = b"".join(next(found) for _ in pending.sums)
        pending.bytes = xxhash.xxh3_128_digest(f"{pending.kind} {pending.sizes}".encode() + parts)
        pending.sums = []


def algorithm(device: Any) -> str:
    """Return the name of what `device_fingerprint` computes on `device`."""
    with unobserved():
        way = _way(device)
    return way.mixing.name if way else ALGORITHM


def _begun(tensor: Any) -> Pending:
    memory = memory_of(tensor)
    sizes = tuple(part.nbytes for part in memory.parts)
    pending = Pending(kind=memory.kind, sizes=sizes)
    for part in memory.parts:
        if _is_captured(part.device):
            return _known("captured into a graph")
        if part.nbytes:
            way = _way(part.device)
            if way is None:
                return Pending(fingerprint(tensor))
            pending.sums.append(way.sums(part))
    return pending


def _known(kind: str) -> Pending:
    return Pending(xxhash.xxh3_128_digest(kind.encode()))


def _is_captured(device: Any) -> bool:
    """Whether the device's stream is recording a graph, where nothing may be waited for."""
    ask = getattr(_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


@cache
def _module(device: Any) -> Any:
    return import_module("torch").get_device_module(device)


def _on_host(values: Sequence[Any]) -> list[bytes]:
    """Return the 16 bytes of each of `values`, in their order."""
    torch = import_module("torch")
    by_device: dict[Any, list[int]] = defaultdict(list)
    for place, value in enumerate(values):
        by_device[value.device].append(place)
    found = [b""] * len(values)
    for device, places in by_device.items():
        getattr(_module(device), "synchronize", lambda _: None)(device)  # streams besides this one
        fetched = torch.cat([values[place] for place in places]).cpu().numpy().tobytes()
        for number, place in enumerate(places):
            found[place] = fetched[16 * number : 16 * number + 16]
    return found


def _in_torch(mixing: Mixing) -> Callable[[], DeviceHash]:
    return lambda: DeviceHash(mixing, lambda part: sums(pieces(part), mixing))


def _in_triton() -> DeviceHash:
    if not find_spec("triton"):
        raise NotImplementedError("no Triton")
    kernel = import_module("torchrepro.trace.triton_fingerprint")
    return DeviceHash(WIDE, kernel.sums_of_part)


_WAYS: dict[str, Sequence[Callable[[], DeviceHash]]] = {
    "cuda": (_in_triton, _in_torch(WIDE), _in_torch(NARROW)),
    "npu": (_in_torch(NARROW), _in_torch(WIDE)),
}
"""How each type of device computes sums, the best way first."""

_OTHERWISE = (_in_torch(WIDE), _in_torch(NARROW))


@cache
def _way(device: Any) -> DeviceHash | None:
    """Return the first way that gives on `device` what arithmetic on the host gives.

    One that raises is no way. Waits for the device.
    """
    torch = import_module("torch")
    tried = torch.arange(-9999, 9999, dtype=torch.int64, device="cpu") * WIDE.multipliers[0]
    tried = tried.view(torch.uint8)[5:]  # neither aligned nor whole words
    for ready in _WAYS.get(device.type, _OTHERWISE):
        try:
            way = ready()
            if torch.equal(way.sums(tried.to(device)).cpu(), sums(iter([tried]), way.mixing)):
                return way
        except Exception:  # noqa: BLE001, S112 - a compiler or driver may raise anything
            continue
    return None
