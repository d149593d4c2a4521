"""Fingerprints of tensors on an accelerator: computed there, and fetched later, many at once."""

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
    """An implementation of the sums of a part of a tensor, on its device."""

    mixing: Mixing
    sums: Callable[[Any], Any]


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
    waiting = [pending for pending in once if pending.bytes is None]
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
        device_hash = _device_hash(device)
    return device_hash.mixing.name if device_hash else ALGORITHM


def _begun(tensor: Any) -> Pending:
    memory = memory_of(tensor)
    sizes = tuple(part.nbytes for part in memory.parts)
    pending = Pending(kind=memory.kind, sizes=sizes)
    for part in memory.parts:
        if _is_captured(part.device):
            return _constant("captured into a graph")
        if part.nbytes:
            device_hash = _device_hash(part.device)
            if device_hash is None:
                return Pending(fingerprint(tensor))
            pending.sums.append(device_hash.sums(part))
    return pending


def _constant(kind: str) -> Pending:
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


_IMPLEMENTATIONS: dict[str, Sequence[Callable[[], DeviceHash]]] = {
    "cuda": (_in_triton, _in_torch(WIDE), _in_torch(NARROW)),
    "npu": (_in_torch(NARROW), _in_torch(WIDE)),
}
"""How each type of device may compute sums, the fastest first."""

_DEFAULT = (_in_torch(WIDE), _in_torch(NARROW))


@cache
def _device_hash(device: Any) -> DeviceHash | None:
    """Return the first implementation that computes on `device` what the host computes.

    Implementations that raise are skipped. Waits for the device.
    """
    torch = import_module("torch")
    probe = torch.arange(-9999, 9999, dtype=torch.int64, device="cpu") * WIDE.multipliers[0]
    probe = probe.view(torch.uint8)[5:]  # neither aligned nor whole words
    for make in _IMPLEMENTATIONS.get(device.type, _DEFAULT):
        try:
            device_hash = make()
            if torch.equal(
                device_hash.sums(probe.to(device)).cpu(), sums(iter([probe]), device_hash.mixing)
            ):
                return device_hash
        except Exception:  # noqa: BLE001, S112 - a compiler or driver may raise anything
            continue
    return None
