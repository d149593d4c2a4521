"""A module's forward run on another device: its tensors go there, and what comes of them back.

Parameters are copied by ops that autograd sees, so gradients flow to the parameters themselves:
optimizers, DDP and checkpoints see the module where it always was
(https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrepro.errors import ApplyError
from torchrepro.policies.placement.nested_values import Mapped, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

DERIVED = ("_flat_weights", "_flat_weight_refs")
"""Attributes of recurrent layers that hold their weights a second time."""


@dataclass(frozen=True, slots=True)
class Place:
    """A device, and how tensors get there."""

    device: Any

    def has(self, tensor: Any) -> bool:
        """Whether `tensor` is there already."""
        return bool(tensor.device == self.device)

    def take(self, tensor: Any) -> Any:
        """Return `tensor` there, by an op that autograd sees."""
        return tensor.to(self.device)


@dataclass(frozen=True, slots=True)
class Taken:
    """A tensor of the caller's, its copy, and what the copy was like before the forward."""

    original: Any
    copy: Any
    version: int | None
    content: Any

    @property
    def written(self) -> bool:
        """Whether the forward has written to the copy."""
        if self.version is not None:
            return bool(self.copy._version != self.version)  # noqa: SLF001 - see _version
        equal = import_module("torch").equal
        return not equal(self.copy.detach(), self.content)


class Trip:
    """The way of one call's tensors to a place, and back to where the first of them came from."""

    def __init__(self, there: Place, state: Iterable[Any]) -> None:
        self.there = there
        self._state = {id(tensor) for tensor in state}  # of the module
        self.home: Place | None = None
        self.moved = 0
        self._taken: list[Taken] = []
        self._returns: dict[int, Any] = {}  # id of a tensor over there -> the caller's own
        self._over = Mapped(self._take)
        self._back = Mapped(self._bring)

    def over(self, value: Any) -> Any:
        """Return `value`, arguments or state, with every tensor in it over there."""
        return self._over(value)

    def settle(self) -> None:
        """Write to the caller's tensors, lists and mappings what the forward wrote to the copies.

        It does so before anything is brought back, for what is returned may be one of them.
        """
        for taken in filter(lambda taken: taken.written, self._taken):
            self._write_back(taken)
        for container in self._over.containers:
            parts = container.present
            if parts is not None and container.kind.refill is not None:
                container.kind.refill(container.old, {k: self.back(v) for k, v in parts.items()})

    def back(self, value: Any) -> Any:
        """Return `value`, some results, with every tensor in it at home."""
        return value if self.home is None else self._back(value)

    def _take(self, tensor: Any) -> Any:
        if self.there.has(tensor):
            self._returns[id(tensor)] = tensor
            return tensor
        if hasattr(tensor, "device_mesh"):
            raise ApplyError("device.modules: a module whose parameters are sharded stays in place")
        if self.home is None:
            self.home = replace(self.there, device=tensor.device)
        copy = self.there.take(tensor)
        self._count(copy)
        # Batch norm, and code that uses `weight.data`, write to state behind autograd's back.
        version = None if id(tensor) in self._state else _version(copy)
        content = copy.detach().clone() if version is None else None
        self._taken.append(Taken(tensor, copy, version, content))
        self._returns[id(copy)] = tensor
        return copy

    def _write_back(self, taken: Taken) -> None:
        torch, original = import_module("torch"), taken.original
        at_home = taken.copy.to(original.device)
        self._count(at_home)
        # Only without gradients can a forward have written to a parameter of its own.
        recording = torch.is_grad_enabled() and not (original.is_leaf and original.requires_grad)
        with torch.set_grad_enabled(recording):
            original.copy_(at_home)

    def _bring(self, tensor: Any) -> Any:
        if id(tensor) in self._returns:
            return self._returns[id(tensor)]
        if self.home is None or tensor.device != self.there.device:
            return tensor
        self._count(tensor)
        return self.home.take(tensor)

    def _count(self, tensor: Any) -> None:
        self.moved += tensor.numel() * tensor.element_size()


def run_there(
    there: Place,
    module: Any,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, int]:
    """Return what `forward` of `module` gives when it runs `there`, and the bytes moved for it.

    Nothing is moved, and `forward` gets the very arguments, where all tensors are there already.
    Writes to arguments, buffers and parameters reach the originals.
    """
    state = _state(module)
    attributes = [_tensors_of(part) for part in module.modules()]
    kept = (tensor for tensors in attributes for tensor in tensors.values())
    trip = Trip(there, [*state.values(), *kept])
    args_there, kwargs_there = trip.over(args), trip.over(dict(kwargs))
    swapped, attributes_there = trip.over(state), trip.over(attributes)
    if trip.home is None:
        return forward(*args, **kwargs), 0
    call = import_module("torch").func.functional_call
    with _attributes(module, trip, attributes_there), _as_at_home(trip.home, there):
        before = dict(swapped)
        result = call(
            _stage()(module, forward), swapped, args_there, kwargs_there, tie_weights=False
        )
        trip.settle()
        for name, tensor in swapped.items():
            if tensor is not before[name]:  # the forward has put another tensor in its place
                _assign(module, name.removeprefix(_PREFIX), trip.back(tensor))
    return trip.back(result), trip.moved


_PREFIX = "module."


def _state(module: Any) -> dict[str, Any]:
    """Return the parameters and buffers of `module`, tied ones under each of their names."""
    prefix = _PREFIX[:-1]
    return dict(
        [
            *module.named_parameters(prefix, remove_duplicate=False),
            *module.named_buffers(prefix, remove_duplicate=False),
        ]
    )


def _assign(module: Any, name: str, tensor: Any) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, tensor)


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
def _attributes(module: Any, trip: Trip, there: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Have modules keep the tensors `there` as plain attributes for the length of the block."""
    parts = list(module.modules())
    before = [_tensors_of(part) for part in parts]
    derived = [{name: vars(part)[name] for name in DERIVED if name in vars(part)} for part in parts]
    for part, tensors in zip(parts, there, strict=True):
        vars(part).update(tensors)
    try:
        yield
        for part, own, sent in zip(parts, before, there, strict=True):
            found = _tensors_of(part)
            new = {name: t for name, t in found.items() if t is not sent.get(name)}
            own.update({name: trip.back(tensor) for name, tensor in new.items()})
            for name in own.keys() - found.keys():
                del own[name]
    finally:
        for part, own, kept in zip(parts, before, derived, strict=True):
            vars(part).update(own | kept)


def _tensors_of(part: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if is_tensor(value)}


@contextmanager
def _as_at_home(home: Place, there: Place) -> Iterator[None]:
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


def _version(tensor: Any) -> int | None:
    """Return a number that grows when `tensor` is written to, or None where torch keeps none.

    Private (``_version``), though torch's own error messages show it: nothing public tells of a
    write that leaves the values as they are. Where it is gone, contents are compared.
    """
    try:
        return int(tensor._version)  # noqa: SLF001 - see above
    except (AttributeError, RuntimeError):  # inference tensors keep no version
        return None
