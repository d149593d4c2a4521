"""Every kernel of the device: the CPU kernel of the same op on the same memory."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from simulated_npu import api, faults
from simulated_npu.cells import CELL_KERNELS
from simulated_npu.generators import GENERATORS
from simulated_npu.memory import give_memory, is_on_device, on_cpu_kernel, on_device, on_host


class Log(list[str]):
    """The names of ops that kernels of the device ran, in order, such as "aten::add.Tensor"."""

    to_host = 0
    """How many of them gave the host values: a copy to it, or a number."""

    @property
    def counts(self) -> Counter[str]:
        return Counter(self)

    @property
    def launches(self) -> int:
        """The number of ops that start work on a device: all but views and allocations."""
        return sum(count for name, count in self.counts.items() if _launches(name))

    def clear(self) -> None:
        super().clear()
        self.to_host = 0


log = Log()


@cache
def _launches(name: str) -> bool:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return not op.is_view and not packet.startswith(("empty", "new_empty", "set_"))


def _gives_host_values(op: torch._ops.OpOverload, args: Any) -> bool:
    if op.name().startswith("aten::_copy_from"):
        return not is_on_device(args[1])
    return any(str(one.type) in {"bool", "number", "int", "float"} for one in op._schema.returns)


def run(op: torch._ops.OpOverload, /, *args: Any, **kwargs: Any) -> Any:
    """Run `op`, with some argument on the device, as a kernel of the device."""
    log.append(op.name())
    log.to_host += _gives_host_values(op, args)
    faults.alert(op)
    if op.name() in DEVICE_KERNELS:
        return DEVICE_KERNELS[op.name()](*args, **kwargs)
    if op.is_view:
        return on_cpu_kernel(op)(*args, **kwargs)  # reads no memory: the same for all devices
    loan = _Loan(_place(op, args, kwargs))
    host_args = loan.to_host(args)
    host_kwargs = loan.to_host(kwargs | _empty_outputs(loan, op, kwargs))
    kernel = HOST_KERNELS.get(op.name()) or on_cpu_kernel(op)
    random = torch.Tag.nondeterministic_seeded in op.tags
    generator = GENERATORS[loan.index]
    with generator.in_place_of_the_hosts() if random else nullcontext():
        result = kernel(*host_args, **host_kwargs)
    if random:
        generator.advance(max(tensor.numel() for tensor in _tensors(result)))
    faults.disturb(op, _tensors(result))
    return loan.back_on_device(result)


class _Loan:
    def __init__(self, index: int) -> None:
        self.index = index
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_host(self, value: Any) -> Any:
        return _changed(self._lend, value)

    def to_host_empty(self, output: torch.Tensor) -> torch.Tensor:
        """Return a placeholder for `output` to which a host kernel can give memory and a shape."""
        return self._noted(torch.empty(0, dtype=output.dtype), output)

    def back_on_device(self, value: Any) -> Any:
        """Return `value` on the device; a result that was an argument is that argument."""
        for host, tensor in self._lent.values():
            if host.shape != tensor.shape:
                _reshape(tensor, host)
        return _changed(self._returned, value)

    def _lend(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            found = "Expected a 'npu' device type for generator but found 'cpu'"
            raise RuntimeError(found)  # noqa: TRY004 - torch's own type
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return self._noted(on_host(value), value) if is_on_device(value) else value

    def _noted(self, host: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        self._lent[id(host)] = host, tensor
        return host

    def _returned(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        _, known = self._lent.get(id(value), (None, None))
        return on_device(value, self.index) if known is None else known


def _reshape(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Give `tensor` the shape of `host`, its placeholder, after a kernel ran."""
    if host.data_ptr() == tensor.data_ptr():
        start = tensor.storage_offset()
        _set(tensor, tensor.untyped_storage(), start, host.shape, host.stride())
    else:
        give_memory(tensor, host)


def _changed(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _changed(change, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_changed(change, part) for part in value])
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def _empty_outputs(loan: _Loan, op: Any, kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return placeholders for outputs without memory, to which a kernel gives a shape."""
    outputs = {a.name for a in op._schema.arguments if a.is_out} & kwargs.keys()
    empty = {n for n in outputs if is_on_device(kwargs[n]) and not kwargs[n].numel()}
    return {name: loan.to_host_empty(kwargs[name]) for name in empty}


MAY_MIX = {  # arguments that every device takes from the host too
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::index",  # the indices
    "aten::_unsafe_index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index_put",
    "aten::_foreach_addcdiv",  # a tensor of scalars
    "aten::_foreach_addcdiv_",
    "aten::_foreach_addcmul",
    "aten::_foreach_addcmul_",
}


def _place(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> int:
    """Return the device of a call; raises `RuntimeError`, as torch does, if it has several."""
    tensors = list(_tensors((args, kwargs)))
    on_devices = [tensor.device for tensor in tensors if is_on_device(tensor)]
    if not on_devices:
        return api._index(kwargs.get("device"))
    found = {str(t.device) for t in tensors if is_on_device(t) or t.dim()}  # a scalar may be moved
    if len(found) > 1 and op.name().partition(".")[0] not in MAY_MIX:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(found))}! (in {op.name()})"
        )
    return on_devices[0].index


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return target.copy_(source)


_set = on_cpu_kernel(torch.ops.aten.set_.source_Storage_storage_offset)


def _set_empty(tensor: torch.Tensor) -> torch.Tensor:
    give_memory(tensor, torch.empty(0, dtype=tensor.dtype))
    return tensor


def _resize(tensor: torch.Tensor, size: list[int], *, memory_format: Any = None) -> torch.Tensor:
    """Resize `tensor`, in its own memory if that is large enough."""
    strided = torch.empty(size, dtype=tensor.dtype, memory_format=memory_format)
    start = tensor.storage_offset()
    room = tensor.untyped_storage().nbytes() // tensor.element_size() - start
    if strided.numel() <= room:
        return _set(tensor, tensor.untyped_storage(), start, size, strided.stride())
    flat = on_host(tensor.as_strided((room,), (1,)))
    strided.as_strided((room,), (1,)).copy_(flat)
    give_memory(tensor, strided)
    return tensor


def _convolution_backward(grad: Any, x: Any, weight: torch.Tensor, *geometry: Any) -> Any:
    *_, transposed, _, groups, _ = geometry
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return torch.ops.aten.convolution_backward(grad, x, weight, [channels], *geometry)


HOST_KERNELS: dict[str, Callable[..., Any]] = {
    "aten::_copy_from": _copy,
    "aten::convolution_overrideable": torch.ops.aten.convolution.default,
    "aten::convolution_backward_overrideable": _convolution_backward,
    **CELL_KERNELS,
}
"""Ops that torch has for private-use devices only: name -> what it does with host tensors."""

DEVICE_KERNELS: dict[str, Callable[..., Any]] = {
    "aten::resize_": _resize,
    "aten::set_": _set_empty,
    "aten::set_.source_Tensor": on_cpu_kernel(torch.ops.aten.set_.source_Tensor),
    "aten::set_.source_Storage": on_cpu_kernel(torch.ops.aten.set_.source_Storage),
    "aten::set_.source_Storage_storage_offset": _set,
}
"""Ops that change what memory a tensor has: name -> what it does with tensors of the device."""
