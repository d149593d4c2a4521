"""Random numbers for a device drawn from the CPU's generator, at torch's dispatcher.

The same seed gives other numbers on every kind of device, because each has a generator of its own
(https://github.com/pytorch/pytorch/issues/84234). Under this policy every op that draws on the
accelerator draws on the host instead, in program order, as a run on the CPU would, and the result
is moved over. The ops are those that torch itself tags as seeded randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

_DISPATCH_KEYS = {"cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}
_installed: list[Any] = []  # the torch.library.Library that holds the overrides, while it is there
_host_generators: dict[int, tuple[Any, Any]] = {}


@dataclass(frozen=True, slots=True)
class HostRngPolicy:
    """Where random numbers come from; without an accelerator that is the host in any case."""

    def read(self) -> Any:
        return "host" if _installed else "native"

    def holds(self, value: str) -> bool:
        return value == self.read() or not _accelerator()

    def write(self, value: str) -> None:
        if value == self.read():
            return
        if value == "host":
            _installed.append(_override(_accelerator()))
        else:
            _installed.clear()  # dropping the library takes its overrides back
            _host_generators.clear()

    save = read
    restore = write


def _accelerator() -> str:
    """Return the type of the accelerator that can be used here, or an empty string."""
    torch = import_module("torch")
    if not torch.accelerator.is_available():
        return ""
    return str(torch.accelerator.current_accelerator().type)


def _override(device: str) -> Any:
    torch = import_module("torch")
    key = _DISPATCH_KEYS.get(device, "PrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    for op in _seeded_ops(key):
        library.impl(op.name().removeprefix("aten::"), partial(_on_host, op, device), key)
    return library


def _seeded_ops(key: str) -> list[Any]:
    """Return the ops that draw random numbers in a kernel of their own for `key`.

    Private (``_dispatch_get_registrations_for_dispatch_key``): torch offers no public list of
    kernels. Where it is gone the policy fails, and its report says so.
    """
    torch = import_module("torch")
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)  # noqa: SLF001
    ops = []
    for name in names:
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if namespace == "aten" and op and torch.Tag.nondeterministic_seeded in op.tags:
            ops.append(op)
    return ops


def _on_host(op: Any, device: str, /, *args: Any, **kwargs: Any) -> Any:
    """Run `op` on the CPU and hand its results to the tensors and devices it was called for."""
    torch = import_module("torch")
    tree_map = torch.utils._pytree.tree_map  # noqa: SLF001 - what torch.library's examples use
    copies: dict[int, tuple[Any, Any]] = {}
    place: list[Any] = [torch.device(device)]

    def down(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type == device:
            place[0] = value.device
            copies[id(value)] = value, value.cpu()
            return copies[id(value)][1]
        if isinstance(value, torch.Generator) and value.device.type == device:
            return _host_generator(value)
        if isinstance(value, torch.device) and value.type == device:
            place[0] = value
            return torch.device("cpu")
        return value

    host_args, host_kwargs = tree_map(down, (args, kwargs))
    result = op(*host_args, **host_kwargs)
    if not op._schema.is_mutable:  # noqa: SLF001 - the schema has no public reader
        to_device = partial(_moved, place[0])
        return tree_map(to_device, result)
    by_copy = {id(copy): original for original, copy in copies.values()}
    for original, copy in copies.values():
        if original.shape != copy.shape:
            original.resize_(copy.shape)
        original.copy_(copy)
    return tree_map(lambda value: by_copy.get(id(value), value), result)


def _moved(place: Any, value: Any) -> Any:
    return value.to(place) if hasattr(value, "to") else value


def _host_generator(generator: Any) -> Any:
    """Return the CPU generator that stands in for a device's `generator`, of the same seed."""
    # Every call sees another Python object for one generator, whose address (private, `_cdata`)
    # stays: it is kept alive here, so that no other generator can have that address.
    seed = generator.initial_seed()
    _, stand_in = _host_generators.get(generator._cdata, (None, None))  # noqa: SLF001
    if stand_in is None or stand_in.initial_seed() != seed:
        stand_in = import_module("torch").Generator().manual_seed(seed)
        _host_generators[generator._cdata] = generator, stand_in  # noqa: SLF001
    return stand_in
