"""Outputs of ops on a device wait, until the fingerprints of many are computed in one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.trace.device_fingerprint import (
    PendingDigest,
    device_fingerprint,
    is_capturing,
    is_small_and_plain,
    launch,
    stream_of,
)
from torchrepro.trace.digests import UNREAD
from torchrepro.trace.op_facts import PLAIN, storage_id, version_of

if TYPE_CHECKING:
    from torchrepro.trace.op_facts import OpFacts

# Private, because torch has no public switches. If one is missing, no tensor waits.
_GUARDS: Any = tuple(
    getattr(torch._C, name, None)  # noqa: SLF001 - see above
    for name in ("DisableTorchFunction", "_DisableTorchDispatch", "_AutoDispatchBelowAutograd")
)
_COUNTING: Any = getattr(torch._C, "_SetExcludeDispatchKeyGuard", None)  # noqa: SLF001 - see above
_HAS_GUARDS = None not in (*_GUARDS, _COUNTING)

MOST = 512
"""The most tensors that wait on a device."""

MOST_BYTES = 1 << 26
"""The most bytes that wait on a device. The memory of a tensor is kept until its batch starts."""


class _Queue:
    """The tensors that wait on one device, all of them written on one stream."""

    __slots__ = ("rows", "size", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.rows: list[_Row] = []
        self.size = 0  # in bytes


_Row = tuple[PendingDigest, Any, int, int]
"""A digest, an alias of the tensor, and the version and the address that the alias has."""


class WaitingOutputs:
    """The tensors of one recording whose digests wait for a batch.

    A tensor is read later than the op that wrote it. So its batch starts before anything else may
    write its memory, in a call of `launch`:

    - before an op that may write memory that waits (`before`);
    - before a phase of the step begins, because an optimizer may write memory by its address;
    - before a replay or a capture of a graph, a launch of a kernel of the program, and while ops
      are hidden or not recorded (see `hooks`);
    - before a tensor of another stream waits, at the bounds `MOST` and `MOST_BYTES`, and when a
      digest is fetched, as at the end of a step.

    A write that is not noticed may be counted in the version of the tensor. Then the digest is
    `UNREAD`. A write that is neither noticed nor counted, by a kernel that another library launches
    between two such moments, changes the digest. Once the memory of a tensor is shared with another
    storage or library, no tensor waits any more.
    """

    def __init__(self) -> None:
        self.storages: set[int] = set()
        """The storages of the tensors that wait. Each op looks whether there are any."""
        self._may_wait = _HAS_GUARDS
        self.unread = 0  # tensors that were written before they were read
        self._queues: dict[Any, _Queue] = {}
        self._lock = fork_safe_lock()  # a backward pass runs on threads of autograd

    def add(self, tensor: Any, version: int) -> PendingDigest:
        """Return the digest of a tensor on a device, which is read later if it can wait.

        `version` is that of the tensor once the running op has returned.
        """
        if not (self._may_wait and is_small_and_plain(tensor)) or is_capturing(tensor.device):
            return device_fingerprint(tensor)
        with self._lock:
            device = tensor.device
            stream = stream_of(device)
            queue = self._queues.get(device)
            if queue is None:
                queue = self._queues[device] = _Queue(stream)
            elif queue.stream != stream or queue.size >= MOST_BYTES or len(queue.rows) >= MOST:
                self.launch()
                queue.stream = stream
            alias = _alias(tensor)
            digest = PendingDigest()
            digest.land = self.launch
            queue.rows.append((digest, alias, version, alias.data_ptr()))
            queue.size += alias.nbytes
            self.storages.add(storage_id(alias))
            return digest

    def before(self, facts: OpFacts, args: Any, kwargs: Any) -> None:
        """Start to read all waiting tensors, if the op that runs next may write one of them."""
        if facts.is_opaque:
            self.launch()
            return
        for tensor in facts.written_in(args, kwargs):
            storage = storage_id(tensor) if tensor.__class__ in PLAIN else 0
            if not storage or storage in self.storages:
                self.launch()
                return

    def launch(self) -> None:
        """Start to read all waiting tensors."""
        if not self.storages:
            return
        with self._lock:
            self.storages.clear()
            for device, queue in self._queues.items():
                rows, queue.rows, queue.size = queue.rows, [], 0
                if rows:
                    self._launch_on(queue.stream, device, rows)

    def stop(self) -> None:
        """Start to read all waiting tensors. From now on, read each tensor at once."""
        self._may_wait = False
        self.launch()

    def _launch_on(self, stream: Any, device: Any, rows: Iterable[_Row]) -> None:
        unwritten, captures = [], is_capturing(device)
        for digest, alias, version, address in rows:
            if captures or version_of(alias) > version or alias.data_ptr() != address:
                digest.become(UNREAD + UNREAD)
                self.unread += 1
            else:
                unwritten.append((digest, alias))
        if not unwritten:
            return
        following = stream_of(device)
        if following == stream:
            launch(unwritten)
            return
        with torch.get_device_module(device).stream(stream):
            launch(unwritten)
        # The other stream may write the memory next, also memory that is freed here.
        following.wait_stream(stream)


def _alias(tensor: Any) -> Any:
    """Return a tensor of the same memory and version, without a graph of autograd.

    A view would keep the graph alive. Within an op, torch excludes the key that lets a detached
    tensor share the version.
    """
    first, second, third = _GUARDS
    with first(), second(), third(), _COUNTING(torch._C.DispatchKey.ADInplaceOrView, False):  # noqa: FBT003, SLF001
        return tensor.detach()
