"""Running one op on the CPU in place of a device, and handing its results to the device.

What an op writes to is known from its schema
(https://docs.pytorch.org/docs/stable/library.html): results of in-place and ``out=`` calls are
copied back into the very tensors they were meant for, others are moved. Tensors that overlap, one
of them written to, overlap on the CPU as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Change = Callable[[Any], Any]

_NO_KERNEL = "not implemented for '"
"""What torch says where the CPU has no kernel for a short floating-point type."""


def on_cpu(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], generator: Change = lambda its: its
) -> tuple[Any, int]:
    """Run the overload `op` on the CPU; return what its caller gets, and the bytes it moved.

    `generator` translates each `torch.Generator` among the arguments. No gradient is recorded:
    this is for what runs below autograd. Raises what the op raises.
    """
    torch = import_module("torch")
    everything = [*leaves(args), *leaves(kwargs)]
    place = _place(everything)
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
            if place is None or place.type == "cpu" or not is_tensor(value):
                return value
            moved += _bytes(value)
            return value.to(place)

        return mapped(up, result), moved


def _copies(
    tensors: dict[int, Any], written: set[int], outputs: set[int]
) -> tuple[dict[int, tuple[Any, Any]], int]:
    """Return each tensor, by its id, with its copy on the CPU, and the bytes moved for them."""
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
        if id(tensor) in outputs and _is_plain(tensor):  # its content is about to be overwritten
            size, stride, kind = tensor.size(), tensor.stride(), tensor.dtype
            copy = torch.empty_strided(size, stride, dtype=kind, device="cpu")
        else:
            copy = tensor.cpu()
            moved += _bytes(tensor)
        copies[id(tensor)] = tensor, copy
    return copies, moved


def is_on_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call with these arguments computes on another device than the CPU."""
    place = _place([*leaves(args), *leaves(kwargs)])
    return place is not None and place.type != "cpu"


def fit_to(tensor: Any, like: Any) -> None:
    """Resize `tensor`, an output, to the size and the strides of `like` if its size is another."""
    if tensor.size() != like.size():
        tensor.resize_(like.size())
        if _is_plain(tensor) and tensor.stride() != like.stride():
            tensor.as_strided_(like.size(), like.stride())


def _computed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    torch = import_module("torch")
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        kinds = [its.dtype for its in leaves([args, kwargs]) if is_tensor(its)]
        short = next((kind for kind in kinds if kind in (torch.float16, torch.bfloat16)), None)
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
    # Private (`_cdata`): the address of the storage itself, which two storages never share,
    # while a device's own memory may have no address to ask for.
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


def _place(values: list[Any]) -> Any:
    """Return the device on which a call with these arguments computes, None for the CPU alone.

    A `device=` decides. Without one, a tensor that is not on the CPU decides, then a generator.
    """
    torch = import_module("torch")
    named = [value for value in values if isinstance(value, torch.device)]
    tensors = [value.device for value in values if _is_far(value)]
    generators = [value.device for value in values if isinstance(value, torch.Generator)]
    return next(iter([*named, *tensors, *generators]), None)


def is_tensor(value: Any) -> bool:
    """Whether `value` is a tensor of torch."""
    return isinstance(value, import_module("torch").Tensor)


def _is_far(value: Any) -> bool:
    return is_tensor(value) and value.device.type != "cpu"


def leaves(values: Any) -> list[Any]:
    """Return all that is in `values`, through lists, tuples and dicts."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [leaf for value in values for leaf in leaves(value)]
    return [values]


def mapped(change: Change, values: Any) -> Any:
    """Return `values` with everything in them changed, through lists, tuples and dicts."""
    if isinstance(values, dict):
        return {key: mapped(change, value) for key, value in values.items()}
    if isinstance(values, list):
        return [mapped(change, value) for value in values]
    if isinstance(values, tuple):
        return tuple(mapped(change, value) for value in values)
    return change(values)
