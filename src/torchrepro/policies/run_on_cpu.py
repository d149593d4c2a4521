"""Run one op on the CPU instead of a device, and move the results to the device.

The schema of an op shows which arguments the op writes to
(https://docs.pytorch.org/docs/stable/library.html). Results of in-place and ``out=`` calls are
copied back into the original tensors. Other results are moved. If tensors overlap in memory and
the op writes to one of them, the copies on the CPU overlap, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Change = Callable[[Any], Any]

_NO_KERNEL = "not implemented for '"
"""Part of the error of torch if the CPU has no kernel for a short floating-point type."""


def on_cpu(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generator: Change = lambda value: value
) -> tuple[Any, int]:
    """Run the overload `op` on the CPU, and return the result and the number of bytes moved.

    `generator` maps each `torch.Generator` among the arguments to a CPU generator. No gradient is
    recorded, because callers run below autograd. Errors of the op propagate.
    """
    torch = import_module("torch")
    everything = [*leaves(args), *leaves(kwargs)]
    device = _device(everything)
    written, outputs = _written(op, args, kwargs)

    def down(value: Any) -> Any:
        if id(value) in copies:
            return copies[id(value)][1]
        if isinstance(value, torch.Generator):
            return generator(value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    with torch.no_grad():
        far = {id(leaf): leaf for leaf in everything if _is_far(leaf)}
        copies, moved = _copies(far, written, outputs)
        result = _computed(op, mapped(down, args), mapped(down, kwargs))
        for key in written & copies.keys():
            original, copy = copies[key]
            fit_to(original, copy)
            original.copy_(copy)
            moved += _bytes(copy)
        originals = {id(copy): original for original, copy in copies.values()}

        def up(value: Any) -> Any:
            nonlocal moved
            if id(value) in originals:
                return originals[id(value)]
            if device is None or device.type == "cpu" or not is_tensor(value):
                return value
            moved += _bytes(value)
            return value.to(device)

        return mapped(up, result), moved


def _copies(
    tensors: dict[int, Any], written: set[int], outputs: set[int]
) -> tuple[dict[int, tuple[Any, Any]], int]:
    """Return id -> (tensor, copy of the tensor on the CPU), and the bytes moved for the copies."""
    torch, moved = import_module("torch"), 0
    copies: dict[int, tuple[Any, Any]] = {}
    for group in _overlapping(tensors, written):
        if len(group) > 1:
            start = min(map(_start, group))
            count = max(map(_end, group)) - start
            whole = torch.as_strided(group[0], (count,), (1,), start).cpu()
            moved += _bytes(whole)
            for tensor in group:
                size, stride, offset = tensor.size(), tensor.stride(), _start(tensor) - start
                copies[id(tensor)] = tensor, whole.as_strided(size, stride, offset)
            continue
        (tensor,) = group
        if id(tensor) in outputs and _is_plain(tensor):  # the op will overwrite its content
            size, stride = tensor.size(), tensor.stride()
            copy = torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu")
        else:
            copy = tensor.cpu()
            moved += _bytes(tensor)
        copies[id(tensor)] = tensor, copy
    return copies, moved


def is_on_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call with these arguments computes on a device other than the CPU."""
    device = _device([*leaves(args), *leaves(kwargs)])
    return device is not None and device.type != "cpu"


def fit_to(tensor: Any, like: Any) -> None:
    """Give the output `tensor` the size and strides of `like`, if the sizes differ."""
    if tensor.size() != like.size():
        tensor.resize_(like.size())
        if _is_plain(tensor) and tensor.stride() != like.stride():
            tensor.as_strided_(like.size(), like.stride())


def _computed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    torch = import_module("torch")
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        dtypes = [leaf.dtype for leaf in leaves([args, kwargs]) if is_tensor(leaf)]
        short = next((dtype for dtype in dtypes if dtype in (torch.float16, torch.bfloat16)), None)
        if _NO_KERNEL not in str(error) or short is None:
            raise
    copies: dict[int, tuple[Any, Any]] = {}

    def widened(value: Any) -> Any:
        if is_tensor(value) and value.dtype == short:
            return copies.setdefault(id(value), (value, value.float()))[1]
        return value

    result = op(*mapped(widened, args), **mapped(widened, kwargs))
    originals = {id(copy): original for original, copy in copies.values()}

    def narrowed(value: Any) -> Any:
        if id(value) in originals:
            original = originals[id(value)]
            fit_to(original, value)
            return original.copy_(value)
        return value.to(short) if is_tensor(value) and value.dtype == torch.float32 else value

    return mapped(narrowed, result)


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[set[int], set[int]]:
    written: set[int] = set()
    outputs: set[int] = set()
    inputs: set[int] = set()
    for position, argument in enumerate(op._schema.arguments):  # noqa: SLF001 - no public reader
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        ids = {id(leaf) for leaf in leaves(value)}
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= ids
        (outputs if argument.is_out else inputs).update(ids)
    return written, outputs - inputs


def _overlapping(tensors: dict[int, Any], written: set[int]) -> Iterator[list[Any]]:
    plain = {key: tensor for key, tensor in tensors.items() if _is_plain(tensor)}
    yield from ([tensor] for key, tensor in tensors.items() if key not in plain)
    groups: list[list[Any]] = []
    for tensor in sorted(plain.values(), key=lambda tensor: (_memory(tensor), _start(tensor))):
        last = groups[-1] if groups else []
        if last and _memory(tensor) == _memory(last[0]) and _start(tensor) < max(map(_end, last)):
            last.append(tensor)
        else:
            groups.append([tensor])
    for group in groups:
        if any(id(tensor) in written for tensor in group):
            yield group
        else:
            yield from ([tensor] for tensor in group)


def _is_plain(tensor: Any) -> bool:
    strided = tensor.layout == import_module("torch").strided
    return bool(strided and not tensor.is_quantized and not tensor.is_nested and tensor.numel())


def _memory(tensor: Any) -> tuple[int, str]:
    # The private `_cdata` is the unique address of the storage object. The memory of a device
    # may have no readable address.
    return tensor.untyped_storage()._cdata, str(tensor.dtype)  # noqa: SLF001 - see above


def _start(tensor: Any) -> int:
    return int(tensor.storage_offset())


def _end(tensor: Any) -> int:
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    return _start(tensor) + 1 + sum(int((size - 1) * stride) for size, stride in steps)


def _bytes(tensor: Any) -> int:
    if tensor.layout == import_module("torch").sparse_coo:
        indices, values = tensor._indices(), tensor._values()  # noqa: SLF001 - may be uncoalesced
        return _bytes(indices) + _bytes(values)
    return int(tensor.numel() * tensor.element_size())


def _device(values: list[Any]) -> Any:
    """Return the device where a call with these arguments computes, or None for the CPU.

    A `device=` argument decides first, then a tensor that is not on the CPU, then a generator.
    """
    torch = import_module("torch")
    named = [value for value in values if isinstance(value, torch.device)]
    tensors = [value.device for value in values if _is_far(value)]
    generators = [value.device for value in values if isinstance(value, torch.Generator)]
    return next(iter([*named, *tensors, *generators]), None)


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a `torch.Tensor`."""
    return isinstance(value, import_module("torch").Tensor)


def _is_far(value: Any) -> bool:
    return is_tensor(value) and value.device.type != "cpu"


def leaves(values: Any) -> list[Any]:
    """Return all leaves of nested lists, tuples and dicts as one flat list."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in leaves(value)]
    return [values]


def mapped(change: Change, values: Any) -> Any:
    """Return `values` with `change` applied to every leaf of nested lists, tuples and dicts."""
    if isinstance(values, dict):
        return {key: mapped(change, value) for key, value in values.items()}
    if isinstance(values, list):
        return [mapped(change, value) for value in values]
    if isinstance(values, tuple):
        return tuple(mapped(change, value) for value in values)
    return change(values)
