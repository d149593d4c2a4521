"""Fingerprints of tensors on an accelerator: computed there, and fetched later, many at once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import xxhash

from torchrepro.fork_safety import fork_safe_lock
from torchrepro.trace.device_batch import Alone, Staging, staging_width
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
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torchrepro.trace.device_batch import Batch


@dataclass(slots=True)
class Pending:
    """A fingerprint that a device computes."""

    bytes: bytes | None = None
    """The 16 bytes, once fetched."""
    kind: str = ""
    sizes: tuple[int, ...] = ()
    slots: list[Slot] = field(default_factory=list)
    """Of each part that has bytes: where its sums are, until they are fetched."""


class Waiting:
    """A batch, and what was fetched of it."""

    def __init__(self, batch: Batch, device: Any) -> None:
        self.batch: Batch | None = batch
        """None once its bytes were fetched."""
        self.device = device
        self.bytes = b""


Slot = tuple[Waiting, int]
"""A batch, and the number of a part in it."""


@dataclass(frozen=True, slots=True)
class DeviceHash:
    """An implementation of the sums of parts of tensors, on their device."""

    mixing: Mixing
    sums: Callable[[Any], Any]
    """Of one part, which is in no batch."""
    width: Callable[[int], int] = lambda _: 0
    """Which batch a part of so many bytes goes to; 0 for none."""
    batch: Callable[[Any, int], Batch] | None = None
    """Makes a batch on a device for one width."""


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
    missing = [pending for pending in once if pending.bytes is None]
    with unobserved():
        _complete(dict.fromkeys(slot[0] for pending in missing for slot in pending.slots))
    for pending in missing:
        parts = b"".join(
            waiting.bytes[16 * number : 16 * number + 16] for waiting, number in pending.slots
        )
        pending.bytes = xxhash.xxh3_128_digest(f"{pending.kind} {pending.sizes}".encode() + parts)
        pending.slots = []


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
            pending.slots.append(_put(device_hash, part))
    return pending


_open: WeakValueDictionary[tuple[Any, Any, int], Waiting] = WeakValueDictionary()
"""Batches that are not full, by device, stream and width; one that nobody waits for is dropped.

Work on one stream runs in order: a batch holds what was put in when it is mixed there.
"""

_lock = fork_safe_lock()


def _put(device_hash: DeviceHash, part: Any) -> Slot:
    """Begin the sums of a part, with those of others where it is small."""
    width = device_hash.width(part.nbytes)
    if device_hash.batch is None or not width:
        return Waiting(Alone(device_hash.sums(part)), part.device), 0
    key = part.device, _stream(part.device), width
    with _lock:
        waiting = _open.get(key)
        if waiting is None:
            waiting = _open[key] = Waiting(device_hash.batch(part.device, width), part.device)
        batch: Any = waiting.batch
        number = batch.put(part)
        if batch.is_full:
            del _open[key]
            batch.computed()
    return waiting, number


def _stream(device: Any) -> Any:
    """Return the stream that the device's work is put on; None where there is only one."""
    current = getattr(_module(device), "current_stream", None)
    return None if current is None else current(device)


def _constant(kind: str) -> Pending:
    return Pending(xxhash.xxh3_128_digest(kind.encode()))


def _is_captured(device: Any) -> bool:
    """Whether the device's stream is recording a graph, where nothing may be waited for."""
    ask = getattr(_module(device), "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


@cache
def _module(device: Any) -> Any:
    return import_module("torch").get_device_module(device)


def _complete(asked: Collection[Waiting]) -> None:
    """Fill in the bytes of batches; nothing is put into them any more."""
    torch = import_module("torch")
    by_device: dict[Any, list[tuple[Waiting, Batch]]] = defaultdict(list)
    with _lock:
        for key in [key for key, waiting in _open.items() if waiting in asked]:
            del _open[key]
        for waiting in asked:
            if waiting.batch is not None:
                by_device[waiting.device].append((waiting, waiting.batch))
        for device, together in by_device.items():
            getattr(_module(device), "synchronize", lambda _: None)(device)  # all of its streams
            sums = [batch.computed().view(-1).view(torch.uint8) for _, batch in together]
            fetched = torch.cat(sums).cpu().split([len(one) for one in sums])
            for (waiting, batch), bytes_ in zip(together, fetched, strict=True):
                waiting.bytes, waiting.batch = batch.bytes_of(bytes_), None


def _in_torch(mixing: Mixing) -> Callable[[], DeviceHash]:
    return lambda: DeviceHash(
        mixing,
        lambda part: sums(pieces(part), mixing),
        staging_width,
        partial(Staging, mixing),
    )


def _in_triton() -> DeviceHash:
    if not find_spec("triton"):
        raise NotImplementedError("no Triton")
    kernel = import_module("torchrepro.trace.triton_fingerprint")
    return DeviceHash(WIDE, kernel.sums_of_part, kernel.results_width, kernel.Results)


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
            if all(_agrees(device_hash, part, device) for part in (probe, probe[:9])):
                return device_hash
        except Exception:  # noqa: BLE001, S112 - a compiler or driver may raise anything
            continue
    return None


def _agrees(device_hash: DeviceHash, part: Any, device: Any) -> bool:
    """Whether a part has the sums on `device`, alone and in a batch, that it has on the host."""
    torch = import_module("torch")
    there, expected = part.to(device), sums(iter([part]), device_hash.mixing)
    if not torch.equal(device_hash.sums(there).cpu(), expected):
        return False
    width = device_hash.width(part.nbytes)
    if device_hash.batch is None or not width:
        return True
    batch = device_hash.batch(device, width)
    for _ in range(2):
        batch.put(there)
    found = batch.bytes_of(batch.computed().view(-1).view(torch.uint8).cpu())
    return bool(found == expected.numpy().tobytes() * 2)
