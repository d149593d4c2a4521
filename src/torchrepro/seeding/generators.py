"""The global generators of a process: their state, and starting them from a stream."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrepro.seeding import cpu_generator, devices

if TYPE_CHECKING:
    from torchrepro.seeding.streams import Stream


_seed_python = random.seed  # as it is before calls of the program are recorded


@dataclass(frozen=True, slots=True)
class HostState:
    """The state of Python's, numpy's legacy and torch's CPU generator."""

    python: Any
    numpy: Any
    torch: Any

    def put_back(self) -> None:
        """Make this the state again."""
        random.setstate(self.python)
        sys.modules["numpy"].random.set_state(self.numpy)
        sys.modules["torch"].default_generator.set_state(self.torch)


def host_state() -> HostState:
    """Return the state of the three generators that draw on the host; imports torch."""
    import numpy as np
    import torch

    return HostState(
        random.getstate(),
        np.random.get_state(legacy=False),
        torch.default_generator.get_state(),
    )


def seed_host(stream: Stream) -> None:
    """Start Python's, numpy's legacy and torch's CPU generator from `stream`, 256 bits each."""
    import numpy as np
    import torch

    _seed_python(stream.entropy("python"))
    np.random.seed(np.frombuffer(stream.bytes("numpy_legacy", 32), "<u4"))
    material = stream.bytes("torch", cpu_generator.STATE_BYTES)
    cpu_generator.start(torch.default_generator, stream.seed64, material)


def seed_devices(stream: Stream) -> None:
    """Start the generators of every accelerator in use from 64 bits of `stream`."""
    for module in devices.in_use().values():
        devices.seed_all(module, int.from_bytes(stream.bytes("torch", 8), "little"))


@dataclass(frozen=True, slots=True)
class GlobalState:
    """The state of every global generator of this process, accelerators in use included."""

    host: HostState
    devices: dict[str, list[Any]]

    def put_back(self) -> None:
        """Make this the state again; an accelerator first used since then keeps its own."""
        self.host.put_back()
        for name, module in devices.in_use().items():
            if name in self.devices:
                devices.set_states(module, self.devices[name])


def global_state() -> GlobalState:
    """Return the state of every global generator; imports torch and initialises no device."""
    host = host_state()
    return GlobalState(
        host, {name: devices.states(module) for name, module in devices.in_use().items()}
    )
