"""Registers the device with torch, permanently for this process."""

from functools import cache, partial

import torch
from torch.utils import backend_registration

from simulated_npu import api
from simulated_npu.kernels import DEVICE_KERNELS, HOST_KERNELS, run
from simulated_npu.memory import DEVICE

_setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
MISSING = "" if _setup else "this torch cannot register a device from Python"
"""Why `install` cannot do its work here, or an empty string.

Private, because torch has no public way without C++; where it is gone, the tests are skipped.
"""


@cache
def install() -> None:
    """Register the device type "npu", with two devices, in the dispatcher of torch."""

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, _: int) -> bool:
            return True

    _setup(DEVICE, api, Hooks())
    library = torch.library.Library("aten", "IMPL")
    for op in _ops():
        library.impl(op.name(), partial(run, op), "PrivateUse1")
    for view in ("Conjugate", "Negative"):  # else torch resolves such a view by copying it, again
        library.impl("_copy_from", torch.library.fallthrough_kernel, view)
    torch.UntypedStorage.clone = _clone
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _kept.extend((library, everything))


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copy a storage for `copy.deepcopy`; the implementation of torch needs an allocator in C++."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage).clone().untyped_storage()


_kept: list[torch.library.Library] = []  # the kernels are there as long as the library is


def _ops() -> set[torch._ops.OpOverload]:
    of_cpu = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    names = {name for name in of_cpu if name.startswith("aten::")}
    return {_op(name) for name in names | HOST_KERNELS.keys() | DEVICE_KERNELS.keys()}


def _op(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")
