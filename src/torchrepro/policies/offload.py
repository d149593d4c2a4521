"""A module's forward run on another device: its tensors go there, and its results come back.

Other objects are handed on as they are, so that one which keeps state, such as a cache of keys and
values, stays the caller's own.

Parameters are copied by ops that autograd sees, so gradients flow to the parameters themselves:
optimizers, DDP and checkpoints see the module where it always was
(https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from importlib import import_module
from inspect import Signature, signature
from typing import Any
from weakref import ref

from torchrepro.errors import ApplyError
from torchrepro.fork_safety import fork_safe_lock
from torchrepro.policies.policy import count

POLICY = "device.modules"
_DERIVED = ("_flat_weights", "_flat_weight_refs")
"""Attributes of recurrent layers that hold their weights a second time."""

_PREFIX = "module."  # of the names of a module's tensors in `functional_call`
_ABSENT = object()

Parts = dict[Any, Any]


def parts_of(value: Any) -> Parts | None:
    """Return the parts of a container by their keys, or None for anything else.

    torch's pytree knows neither records nor mappings of other classes, and no object that two
    places hold.
    """
    torch = import_module("torch")
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        # The sizes of its batches are on the host wherever its data is.
        return {name: part for name, part in value._asdict().items() if name != "batch_sizes"}
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value.items())
    if is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return None


def refill(container: Any, parts: Parts) -> None:
    """Give a list, a mapping or a record other parts; writes those only that differ."""
    if isinstance(container, list):
        container[:] = parts.values()
    elif isinstance(container, MutableMapping):
        for key in [key for key in container if key not in parts]:
            del container[key]
        for key, part in parts.items():
            if key not in container or container[key] is not part:
                container[key] = part
    else:
        for name, part in parts.items():
            if getattr(container, name) is not part:
                object.__setattr__(container, name, part)  # a frozen one is changed as well


def _tuple_of(old: Any, parts: Parts) -> Any:
    """Return a tuple of the class of `old` with other parts; `old` itself if they are its own."""
    if isinstance(old, import_module("torch").nn.utils.rnn.PackedSequence):
        return type(old)(batch_sizes=old.batch_sizes, **parts)
    if all(part is parts[place] for place, part in enumerate(old)):
        return old
    make = getattr(type(old), "_make", type(old))  # a named tuple takes its fields one by one
    return make(parts.values())


class NestedMap:
    """Makes nested values anew with every tensor changed, each tensor and container once.

    Two places that hold one object hold one object afterwards.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}  # the old is kept, so that its id stays its own
        self.containers: list[tuple[Any, Any, Parts]] = []
        """Containers made anew: the old, the new, and the parts that it began with."""

    def __call__(self, value: Any) -> Any:
        """Return `value` with its tensors changed."""
        if id(value) in self._done:
            return self._done[id(value)][1]
        if _is_tensor(value):
            new = self._change(value)
        elif (parts := parts_of(value)) is None:
            return value
        elif isinstance(value, tuple):
            new = _tuple_of(value, {key: self(part) for key, part in parts.items()})
        else:
            self._done[id(value)] = value, value  # a container that holds itself ends here
            parts = {key: self(part) for key, part in parts.items()}
            new = copy(value)
            refill(new, parts)
            self.containers.append((value, new, parts))
        self._done[id(value)] = value, new
        return new


def _is_tensor(value: Any) -> bool:
    return isinstance(value, import_module("torch").Tensor)


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and how tensors get there."""

    device: Any

    def has(self, tensor: Any) -> bool:
        """Whether `tensor` is there already."""
        return bool(tensor.device == self.device)

    def copy(self, tensor: Any) -> Any:
        """Return `tensor` there, by an op that autograd sees."""
        return tensor.to(self.device)


class Transfer:
    """The tensors of one call, to a device and back to where the first of them came from."""

    def __init__(self, there: Device, state: Iterable[Any]) -> None:
        self.there = there
        self._state = {id(tensor) for tensor in state}  # of the module
        self.home: Device | None = None
        self.moved = 0
        self._copies: list[tuple[Any, Any, int | None, Any]] = []
        """A tensor of the caller's, its copy, and the copy's version or else its content."""

        self._originals: dict[int, Any] = {}  # id of a tensor over there -> the caller's own
        self.over = NestedMap(self._send)
        self._back = NestedMap(self._bring)

    def back(self, value: Any) -> Any:
        """Return `value`, some results, with every tensor in it at home."""
        return value if self.home is None else self._back(value)

    def settle(self) -> None:
        """Write to the caller's tensors, lists and mappings what the forward wrote to the copies.

        It does so before anything is brought back, for what is returned may be one of them.
        """
        torch = import_module("torch")
        for original, copied, version, content in self._copies:
            if version is None:
                unchanged = torch.equal(copied.detach(), content)
            else:
                unchanged = copied._version == version  # noqa: SLF001 - see _version
            if unchanged:
                continue
            at_home = copied.to(original.device)
            self._count(at_home)
            # Only without gradients can a forward have written to a parameter of its own.
            is_parameter = original.is_leaf and original.requires_grad
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_parameter):
                original.copy_(at_home)
        for old, new, parts in self.over.containers:
            present = parts_of(new) or {}
            same = present.keys() == parts.keys() and all(parts[k] is present[k] for k in parts)
            if not same:
                refill(old, {key: self.back(part) for key, part in present.items()})

    def _send(self, tensor: Any) -> Any:
        if self.there.has(tensor):
            self._originals[id(tensor)] = tensor
            return tensor
        if hasattr(tensor, "device_mesh"):
            raise ApplyError("device.modules: a module whose parameters are sharded stays in place")
        if self.home is None:
            self.home = replace(self.there, device=tensor.device)
        copied = self.there.copy(tensor)
        self._count(copied)
        # Batch norm, and code that uses `weight.data`, write to state behind autograd's back.
        version = None if id(tensor) in self._state else _version(copied)
        content = copied.detach().clone() if version is None else None
        self._copies.append((tensor, copied, version, content))
        self._originals[id(copied)] = tensor
        return copied

    def _bring(self, tensor: Any) -> Any:
        if id(tensor) in self._originals:
            return self._originals[id(tensor)]
        if self.home is None or tensor.device != self.there.device:
            return tensor
        self._count(tensor)
        return self.home.copy(tensor)

    def _count(self, tensor: Any) -> None:
        self.moved += tensor.numel() * tensor.element_size()


def _version(tensor: Any) -> int | None:
    """Return a number that grows when `tensor` is written to, or None where torch keeps none.

    Private (``_version``), though torch's own error messages show it: nothing public tells of a
    write that leaves the values as they are. Where it is gone, contents are compared.
    """
    try:
        return int(tensor._version)  # noqa: SLF001 - see above
    except (AttributeError, RuntimeError):  # inference tensors keep no version
        return None


def run_there(
    there: Device,
    module: Any,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, int]:
    """Return what `forward` of `module` gives when it runs `there`, and the bytes moved for it.

    Nothing is moved, and `forward` gets the very arguments, where all tensors are there already.
    Writes to arguments, buffers and parameters reach the originals.
    """
    prefix = _PREFIX.removesuffix(".")
    # Tied parameters and buffers are there under each of their names.
    state = {
        **dict(module.named_parameters(prefix, remove_duplicate=False)),
        **dict(module.named_buffers(prefix, remove_duplicate=False)),
    }
    attributes = [_tensors_of(part) for part in module.modules()]
    plain = (tensor for tensors in attributes for tensor in tensors.values())
    transfer = Transfer(there, [*state.values(), *plain])
    args_there, kwargs_there = transfer.over(args), transfer.over(dict(kwargs))
    state_there, attributes_there = transfer.over(state), transfer.over(attributes)
    if transfer.home is None:
        return forward(*args, **kwargs), 0
    call = import_module("torch").func.functional_call
    with _attributes(module, transfer, attributes_there), _as_at_home(transfer.home, there):
        before = dict(state_there)
        stage = _stage()(module, forward)
        result = call(stage, state_there, args_there, kwargs_there, tie_weights=False)
        transfer.settle()
        for name, tensor in state_there.items():
            if tensor is not before[name]:  # the forward has put another tensor in its place
                owner, _, attribute = name.removeprefix(_PREFIX).rpartition(".")
                setattr(module.get_submodule(owner), attribute, transfer.back(tensor))
    return transfer.back(result), transfer.moved


@cache
def _stage() -> type:
    """Return the class of what functional_call is asked to call: a forward, without any hooks.

    The hooks of the module have run, or will run, around its forward, where they belong.
    """
    torch = import_module("torch")

    class Stage(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, module: Any, run: Callable[..., Any]) -> None:
            super().__init__()
            self.module = module
            self.run = run

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.run(*args, **kwargs)

    return Stage


@contextmanager
def _attributes(module: Any, transfer: Transfer, there: Sequence[dict[str, Any]]) -> Iterator[None]:
    parts = list(module.modules())
    before = [_tensors_of(part) for part in parts]
    derived = [
        {name: vars(part)[name] for name in _DERIVED if name in vars(part)} for part in parts
    ]
    for part, tensors in zip(parts, there, strict=True):
        vars(part).update(tensors)
    try:
        yield
        for part, own, sent in zip(parts, before, there, strict=True):
            found = _tensors_of(part)
            new = {name: t for name, t in found.items() if t is not sent.get(name)}
            own.update({name: transfer.back(tensor) for name, tensor in new.items()})
            for name in own.keys() - found.keys():
                del own[name]
    finally:
        for part, own, kept in zip(parts, before, derived, strict=True):
            vars(part).update(own | kept)


def _tensors_of(part: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if _is_tensor(value)}


@contextmanager
def _as_at_home(home: Device, there: Device) -> Iterator[None]:
    """Carry over what the program has set for its device: autocast, and where new tensors are.

    Autocast over there casts to the type that it casts to at home, in the ops of the device there.
    """
    torch = import_module("torch")
    kind, other = home.device.type, there.device.type
    with ExitStack() as settings:
        if kind != other and torch.amp.is_autocast_available(other):
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            if enabled or torch.is_autocast_enabled(other):
                settings.enter_context(torch.autocast(other, dtype=dtype, enabled=enabled))
        if torch.get_default_device().type == kind != other:
            settings.enter_context(there.device)
        yield


class PlacedForward:
    """The forward of one module, run on a device; an attribute of that module while in force.

    Whatever else a call of the module does, such as its hooks, happens where it always did. torch
    compiles none of it (https://docs.pytorch.org/docs/stable/generated/torch.compiler.disable.html).
    """

    def __init__(self, name: str, module: Any, there: Device) -> None:
        self.name = name
        self.there = there
        self.calls = 0
        self.module = ref(module)
        """The one that this is the forward of; a copy of it may hold this as well."""

        self._in_force = False
        self._lock = fork_safe_lock()  # while it runs, the module has other parameters than its own
        # The forward that the module has besides that of its class, if it has one.
        self._own: Any = vars(module).get("forward", _ABSENT)
        if isinstance(self._own, PlacedForward):
            # A replica of DataParallel and a shallow copy come with the original's.
            self._own = self._own._own  # noqa: SLF001 - of this very class
        elif getattr(self._own, "__func__", None) is type(module).forward:
            # A deep copy of a placed module has the forward of its class as its own.
            self._own = _ABSENT if self._own.__self__ is module else self._own
        self._uncompiled = import_module("torch").compiler.disable(self._run)

    def put(self) -> None:
        """Let the module run on its device."""
        self._in_force = True
        module = self.module()
        if module is not None:
            vars(module)["forward"] = self

    def take(self) -> None:
        """Let the module run where it is again, also inside a wrapper of somebody's own."""
        self._in_force = False
        module = self.module()
        if module is None or vars(module).get("forward") is not self:
            return
        if self._own is _ABSENT:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        forward = self._plain(module)
        if not self._in_force:
            return forward(*args, **kwargs)
        with self._lock:
            result, moved = run_there(self.there, module, forward, args, kwargs)
        self.calls += 1
        what = "ran on" if moved else "was already on"
        count(POLICY, self.name, f"{what} {self.there.device}", moved=moved)
        return result

    def _plain(self, module: Any) -> Any:
        return partial(type(module).forward, module) if self._own is _ABSENT else self._own

    @property
    def __name__(self) -> str:
        return "forward"

    @property
    def __signature__(self) -> Signature:
        return signature(self._plain(self.module()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the module's own forward: a copy is plain, and needs no torchrepro."""
        if self._own is _ABSENT:
            return getattr, (self.module(), "forward")
        return partial, (self._own,)
