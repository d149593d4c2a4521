"""Run submodules of a model on another device, to find out whether a device is at fault.

When a model is first called, the submodules are found by name. For this, torch calls a global hook
before every call of a module while a profile names submodules
(https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.module.register_module_forward_pre_hook.html).
A submodule on another device draws random numbers from the generator of that device.

The tensors that the forward needs are copied to the device, and the results are copied back. Other
objects are passed unchanged, so that an object with state, such as a key-value cache, remains the
object of the caller. Autograd records the copies of parameters, so gradients flow to the original
parameters. Optimizers, DDP and checkpoints see the module on its original device
(https://docs.pytorch.org/docs/stable/generated/torch.func.functional_call.html).
"""

from __future__ import annotations

import atexit
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from importlib import import_module
from inspect import Signature, signature
from typing import Any
from weakref import WeakSet, ref

from torchrepro.ground.console import note
from torchrepro.ground.errors import ApplyError, Problem, near, some
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.policies.policy import WRAPPERS, bare, count, forget_compiled, refuse
from torchrepro.policies.run_on_cpu import is_tensor

POLICY = "device.modules"
_DERIVED = ("_flat_weights", "_flat_weight_refs")
"""Attributes of recurrent layers that refer to their weights a second time."""

_PREFIX = "module."  # of the names of a module's tensors in `functional_call`


def absence(word: str) -> str:
    """Return why this machine cannot run modules on the device `word`, or an empty string.

    Does not initialize a device (https://docs.pytorch.org/docs/stable/accelerator.html).
    """
    accelerator, devices, types = import_module("torch").accelerator, ["cpu"], ["cpu"]
    if accelerator.is_available():
        device_type = accelerator.current_accelerator().type
        devices += [f"{device_type}:{index}" for index in range(accelerator.device_count())]
        types.append(device_type)
    if word in (*devices, *types, "cpu:0"):
        return ""
    close = near(word, [*devices, *types])
    hint = f"; did you mean {close}?" if close else ""
    return f"this machine has no device `{word}`{hint} (it has {some(devices)})"


def named(root: Any) -> dict[str, Any]:
    """Return bare name -> module for the modules inside `root`, except wrappers such as DDP."""
    modules: dict[str, tuple[str, Any]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        short = bare(name)
        known, _ = modules.get(short, ("", None))
        if name and (not known or name.startswith(f"{known}.")):
            modules[short] = name, module
    return {short: module for short, (_, module) in modules.items()}


def match(root: Any, patterns: Mapping[str, str]) -> tuple[dict[Any, tuple[str, str]], set[str]]:
    """Return module -> (name, device) for the modules to place, and the patterns that matched.

    An exact name overrides a pattern. A pattern for a module overrides a pattern for the list that
    contains the module. Raises `ApplyError` if two patterns of equal priority disagree.
    """
    names = named(root)
    # Module -> the first of its names that matched, and (strength, pattern) -> device.
    claims: dict[Any, tuple[str, dict[tuple[int, str], str]]] = {}
    for name in names:
        # The name of a wrapper refers to the whole model: only an exact name selects it.
        is_model = all(part in WRAPPERS for part in name.split("."))
        for pattern, device in patterns.items():
            is_exact = bare(pattern) == name
            if not is_exact and (is_model or not fnmatchcase(name, bare(pattern))):
                continue
            for path in _modules_that_run(name, names):
                strength = (3 if is_exact else 2) * (2 if path == name else 1)
                _, by_claim = claims.setdefault(names[path], (path, {}))
                by_claim[strength, pattern] = device
    placements = {}
    for module, (path, by_claim) in claims.items():
        strongest = max(strength for strength, _ in by_claim)
        devices = {
            pattern: device
            for (strength, pattern), device in by_claim.items()
            if strength == strongest
        }
        if len(set(devices.values())) > 1:
            rules = ", ".join(f"{pattern}: {device}" for pattern, device in devices.items())
            raise ApplyError(f"{POLICY}: `{path}` has several devices ({rules})")
        placements[module] = path, next(iter(devices.values()))
    return placements, {pattern for _, by_claim in claims.values() for _, pattern in by_claim}


def _modules_that_run(name: str, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield `name` if its module has a forward. For a list of modules, yield its members."""
    forward = getattr(names[name].forward, "__func__", None)
    if forward is not import_module("torch").nn.Module.forward:
        yield name
        return
    for child, _ in names[name].named_children():
        yield from _modules_that_run(f"{name}.{child}", names)


class ModulesPolicy:
    """The policy `device.modules`, which maps patterns of module names to devices."""

    active: Placement | None = None  # an inner profile replaces the patterns of the outer one

    def read(self) -> dict[str, str]:
        return dict(self.active.patterns) if self.active else {}

    def refuses(self, value: Mapping[str, str]) -> str:
        return next(filter(None, map(absence, value.values())), "")

    def write(self, value: Mapping[str, str]) -> None:
        self._switch(Placement(value) if value else None)
        if self.active:
            atexit.register(self.active.report)

    def save(self) -> Placement | None:
        return self.active

    def restore(self, saved: Placement | None) -> None:
        if self.active and self.active is not saved:
            atexit.unregister(self.active.report)
            self.active.report()
        self._switch(saved)

    def _switch(self, placement: Placement | None) -> None:
        if self.active:
            self.active.uninstall()
        self.active = placement
        if placement:
            placement.install()


policy = ModulesPolicy()


class Placement:
    """The patterns of one profile, and the modules that match them in the models called so far."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self.patterns = dict(patterns)
        self._lock = fork_safe_lock()
        self._examined: WeakSet[Any] = WeakSet()
        self._models: WeakSet[Any] = WeakSet()
        self._placed: list[PlacedForward] = []
        self._matched: set[str] = set()
        self._names: dict[str, None] = {}
        self._class_names: dict[str, None] = {}
        self._hooks: list[Any] = []
        self._stepped = False
        self._compilations = 0

    def install(self) -> None:
        """Run the submodules found so far on the profile's devices, and search each called model.

        Adds two global hooks to torch: before calls of modules, and before optimizer steps.
        """
        torch = import_module("torch")
        hooks = import_module("torch.nn.modules.module")
        optimizers = import_module("torch.optim.optimizer")

        def before_call(module: Any, args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if module not in self._examined or module in self._models:
                self._examine(module)

        self._hooks = [
            hooks.register_module_forward_pre_hook(before_call),
            optimizers.register_optimizer_step_pre_hook(lambda *_: self._before_step()),
        ]
        for forward in self._placed:
            forward.install()
        forget_compiled()
        self._compilations = compilations()

    def uninstall(self) -> None:
        """Remove the hooks of `install`, and run each submodule on its original device again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for forward in reversed(self._placed):
            forward.uninstall()
        forget_compiled()

    def place(self, model: Any) -> tuple[str, ...]:
        """Place the submodules of `model` that match a pattern, and return their names."""
        torch = import_module("torch")
        with self._lock:
            placements, matched = match(model, self.patterns)
            self._matched |= matched
            self._names |= dict.fromkeys(named(model))
            self._class_names[type(model).__name__] = None
            self._examined.update(model.modules())
            self._models.add(model)
            for module, (name, device) in placements.items():
                forward = vars(module).get("forward")
                if isinstance(forward, PlacedForward) and forward.module() is module:
                    continue
                if isinstance(module, torch.jit.ScriptModule):
                    raise ApplyError(f"{POLICY}: `{name}` is TorchScript, which cannot move")
                # ``cuda`` means the current CUDA device. Tensors on the CPU have no index.
                is_host = device.startswith("cpu")
                target = torch.device("cpu") if is_host else torch.empty(0, device=device).device
                self._placed.append(PlacedForward(name, module, target))
                self._placed[-1].install()
            return tuple(name for name, _ in placements.values())

    def unmatched(self) -> str:
        """Return a message about the patterns that match no module so far, or an empty string."""
        called = some(self._class_names) or (
            "only compiled code" if self._has_compiled() else "nothing"
        )
        names = sorted(self._names, key=lambda name: name.count("."))
        problem = f"matches no module; called so far: {called}"
        todo = (
            "use the names of model.named_modules(); if only submodules or compiled code of the "
            "model are called, call torchrepro.place_modules(model) before the first step"
        )
        return "\n".join(
            str(Problem(problem, "", POLICY, pattern, some(names), near(pattern, names), todo))
            for pattern in self.patterns
            if pattern not in self._matched
        )

    def _examine(self, module: Any) -> None:
        with self._lock:
            models = [module]
            if module not in self._models:
                models = [model for model in self._models if module in set(model.modules())]
            grown = [m for m in models if any(part not in self._examined for part in m.modules())]
            try:
                for model in grown if models else [module]:
                    self.place(model)
            except ApplyError as error:
                refuse(error)

    def _before_step(self) -> None:
        if self._stepped:
            return
        self._stepped = True
        problem = self.unmatched()
        if problem:
            refuse(ApplyError(problem))

    def report(self) -> None:
        """Print to stderr which patterns matched no module, and which submodules never ran."""
        # A process that calls no module, such as a launcher, has nothing to report.
        ran = self._class_names or self._has_compiled()
        lines = [self.unmatched()] if ran and not self._stepped else []
        # A child of a submodule that ran has moved with its parent.
        called = [forward.name for forward in self._placed if forward.calls]
        idle = [
            forward.name
            for forward in self._placed
            if not any(f"{forward.name}.".startswith(f"{name}.") for name in called)
        ]
        if idle:
            lines.append(
                f"{POLICY}: never called, so it never ran on its device: {some(idle)} "
                "(a module can use the weights of a submodule without calling it)"
            )
        note(*filter(None, lines))

    def _has_compiled(self) -> bool:
        """Return whether torch compiled code since `install`. Such code does not call the hook."""
        return compilations() > self._compilations


def compilations() -> int:
    """Return the number of frames that torch.compile has compiled in this process.

    Uses the private ``torch._dynamo.utils.counters``, because no public API exists. Without it, a
    program that runs only compiled code gets no message about unmatched patterns.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("frames", {}).get("ok", 0))


def place_modules(*models: Any) -> tuple[str, ...]:
    """Run submodules of `models` on the devices that the profile names, and return their names.

    Without this call, torchrepro finds the submodules when a model is first called as a whole.
    Raises `ApplyError` if a pattern of `device.modules` matches no module in these models or in
    models called earlier. Returns an empty tuple if no active profile names a module.
    """
    placement = policy.active
    if placement is None:
        return ()
    names = tuple(name for model in models for name in placement.place(model))
    problem = placement.unmatched()
    if problem:
        raise ApplyError(problem)
    return names


class PlacedForward:
    """Replaces the forward of one module, and runs the original forward on another device.

    The hooks of the module still run on the original device. torch.compile skips the forward
    (https://docs.pytorch.org/docs/stable/generated/torch.compiler.disable.html).
    """

    def __init__(self, name: str, module: Any, device: Any) -> None:
        self.name = name
        self.device = device
        self.calls = 0
        self.module = ref(module)  # a copy of the module may share this forward
        self._is_installed = False
        self._lock = fork_safe_lock()  # a call replaces the module's parameters
        # A forward that was set on the module itself, not on its class.
        self._own: Any = vars(module).get("forward")
        if isinstance(self._own, PlacedForward):
            # A replica of DataParallel or a shallow copy shares the forward of the original.
            self._own = self._own._own  # noqa: SLF001 - same class
        elif getattr(self._own, "__func__", None) is type(module).forward:
            # A deep copy of a placed module stores the forward of its class as an attribute.
            self._own = None if self._own.__self__ is module else self._own
        self._uncompiled = import_module("torch").compiler.disable(self._run)

    def install(self) -> None:
        """Run the module on the device from now on."""
        self._is_installed = True
        module = self.module()
        if module is not None:
            vars(module)["forward"] = self

    def uninstall(self) -> None:
        """Run the module on its original device again, even if other code wrapped `forward`."""
        self._is_installed = False
        module = self.module()
        if module is None or vars(module).get("forward") is not self:
            return
        if self._own is None:
            del vars(module)["forward"]
        else:
            vars(module)["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._uncompiled(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        forward = self._plain(module)
        if not self._is_installed:
            return forward(*args, **kwargs)
        with self._lock:
            result, moved = run_forward_on(self.device, module, forward, args, kwargs)
        self.calls += 1
        action = "ran on" if moved else "was already on"
        count(POLICY, self.name, f"{action} {self.device}", moved=moved)
        return result

    def _plain(self, module: Any) -> Any:
        return partial(type(module).forward, module) if self._own is None else self._own

    __name__ = "forward"

    @property
    def __signature__(self) -> Signature:
        return signature(self._plain(self.module()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the original forward, so that a copy can be used without torchrepro."""
        if self._own is None:
            return getattr, (self.module(), "forward")
        return partial, (self._own,)


def run_forward_on(
    device: Any,
    module: Any,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, int]:
    """Run `forward` of `module` on `device`, and return the result and the number of bytes moved.

    If all tensors are on the device already, `forward` gets the original arguments. If `forward`
    writes to an argument, a buffer or a parameter, the original changes, too.
    """
    # Tied parameters and buffers are included under each of their names.
    prefix = _PREFIX.removesuffix(".")
    state = {
        **dict(module.named_parameters(prefix, remove_duplicate=False)),
        **dict(module.named_buffers(prefix, remove_duplicate=False)),
    }
    attributes = [_tensors_of(part) for part in module.modules()]
    plain = (tensor for tensors in attributes for tensor in tensors.values())
    transfer = _Transfer(device, [*state.values(), *plain])
    moved_args, moved_kwargs = transfer.over(args), transfer.over(dict(kwargs))
    moved_state, moved_attributes = transfer.over(state), transfer.over(attributes)
    if transfer.home is None:
        return forward(*args, **kwargs), 0
    call = import_module("torch").func.functional_call
    with (
        _attributes(module, transfer, moved_attributes),
        _settings_of(transfer.home, device),
    ):
        before = dict(moved_state)
        # The stage has no hooks: torch already runs the hooks of the module around its forward.
        stage = _stage_class()()
        stage.module, stage.run = module, forward
        result = call(stage, moved_state, moved_args, moved_kwargs, tie_weights=False)
        transfer.settle()
        for name, tensor in moved_state.items():
            if tensor is not before[name]:  # the forward replaced the tensor
                owner, _, attribute = name.removeprefix(_PREFIX).rpartition(".")
                setattr(module.get_submodule(owner), attribute, transfer.back(tensor))
    return transfer.back(result), transfer.moved


@cache
def _stage_class() -> Any:
    def call(stage: Any, *args: Any, **kwargs: Any) -> Any:
        return stage.run(*args, **kwargs)

    return type("Stage", (import_module("torch").nn.Module,), {"__call__": call})


@contextmanager
def _attributes(module: Any, transfer: _Transfer, moved: list[dict[str, Any]]) -> Iterator[None]:
    """Set the tensors `moved` as attributes of `module`, and restore the originals at the end."""
    parts = list(module.modules())
    before = [_tensors_of(part) for part in parts]
    derived = [
        {name: vars(part)[name] for name in _DERIVED if name in vars(part)} for part in parts
    ]
    for part, tensors in zip(parts, moved, strict=True):
        vars(part).update(tensors)
    try:
        yield
        for part, originals, sent in zip(parts, before, moved, strict=True):
            after = _tensors_of(part)
            new = {name: t for name, t in after.items() if t is not sent.get(name)}
            originals.update({name: transfer.back(tensor) for name, tensor in new.items()})
            for name in originals.keys() - after.keys():
                del originals[name]
    finally:
        for part, originals, kept in zip(parts, before, derived, strict=True):
            vars(part).update(originals | kept)


def _tensors_of(part: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if is_tensor(value)}


@contextmanager
def _settings_of(home: Any, device: Any) -> Iterator[None]:
    """Apply the autocast and default-device settings of the device `home` to `device`.

    Autocast uses the dtype of `home` for the ops that autocast lists for `device`.
    """
    torch = import_module("torch")
    source, target = home.type, device.type
    with ExitStack() as settings:
        if source != target and torch.amp.is_autocast_available(target):
            enabled, dtype = torch.is_autocast_enabled(source), torch.get_autocast_dtype(source)
            if enabled or torch.is_autocast_enabled(target):
                settings.enter_context(torch.autocast(target, dtype=dtype, enabled=enabled))
        if torch.get_default_device().type == source != target:
            settings.enter_context(device)
        yield


class _Transfer:
    """Moves the tensors of one call to a device, and results back to the first tensor's device."""

    def __init__(self, device: Any, state: Iterable[Any]) -> None:
        self._device = device
        self._state = {id(tensor) for tensor in state}  # ids of tensors of the module
        self.home: Any = None  # the device of the first tensor that was moved
        self.moved = 0
        self._copies: list[tuple[Any, Any, int | None, Any]] = []
        """A tensor of the caller, the copy, and the version of the copy, or else the content."""

        # The id of a tensor on the device -> the tensor of the caller.
        self._originals: dict[int, Any] = {}
        self.over = NestedCopier(self._send)
        self._back = NestedCopier(self._bring)

    def back(self, value: Any) -> Any:
        """Return `value` with every tensor moved back. The caller's tensors replace the copies."""
        return value if self.home is None else self._back(value)

    def settle(self) -> None:
        """Repeat the forward's writes to copies in the tensors, lists and mappings of the caller.

        Must run before results are moved back, because a result may be one of these objects.
        """
        torch = import_module("torch")
        for original, copied, version, content in self._copies:
            if version is None:
                unchanged = torch.equal(copied.detach(), content)
            else:
                unchanged = copied._version == version  # noqa: SLF001 - see _version
            if unchanged:
                continue
            moved_back = self._moved(copied, original.device)
            # A forward can write to a parameter of its module only without gradients.
            is_parameter = original.is_leaf and original.requires_grad
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_parameter):
                original.copy_(moved_back)
        for old, new, parts in self.over.containers:
            after = _parts_of(new) or {}
            is_same = after.keys() == parts.keys() and all(parts[k] is after[k] for k in parts)
            if not is_same:
                _refill(old, {key: self.back(part) for key, part in after.items()})

    def _send(self, tensor: Any) -> Any:
        if is_there(tensor, self._device):
            self._originals[id(tensor)] = tensor
            return tensor
        if hasattr(tensor, "device_mesh"):
            raise ApplyError(f"{POLICY}: a module with sharded parameters cannot move")
        self.home = self.home or tensor.device
        copied = self._moved(tensor, self._device)
        # Batch norm, and code that uses `weight.data`, write to state without autograd noticing.
        version = None if id(tensor) in self._state else _version(copied)
        content = copied.detach().clone() if version is None else None
        self._copies.append((tensor, copied, version, content))
        self._originals[id(copied)] = tensor
        return copied

    def _bring(self, tensor: Any) -> Any:
        if id(tensor) in self._originals:
            return self._originals[id(tensor)]
        return self._moved(tensor, self.home) if tensor.device == self._device else tensor

    def _moved(self, tensor: Any, device: Any) -> Any:
        self.moved += tensor.numel() * tensor.element_size()
        return tensor.to(device, copy=True)  # autograd records this op


def is_there(tensor: Any, device: Any) -> bool:
    """Return whether `tensor` is on `device`."""
    return bool(tensor.device == device)


def _version(tensor: Any) -> int | None:
    """Return a number that grows with each write to `tensor`, or None if torch does not count.

    Uses the private ``_version``, because no public API detects a write of equal values. Without
    this attribute, the caller compares the contents of the tensor.
    """
    try:
        return int(tensor._version)  # noqa: SLF001 - see above
    except (AttributeError, RuntimeError):  # inference tensors have no version
        return None


class NestedCopier:
    """Copies nested containers, and replaces every tensor in them by `change(tensor)`.

    An object that occurs twice is copied once, and its copy occurs twice. The pytree of torch does
    not preserve that, and does not support dataclasses and other classes of mappings.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}  # the original is kept, so its id stays unique
        self.containers: list[tuple[Any, Any, dict[Any, Any]]] = []
        """Copied containers: the original, the copy, and the initial parts of the copy."""

    def __call__(self, value: Any) -> Any:
        """Return a copy of `value` in which every tensor is changed."""
        if id(value) in self._done:
            return self._done[id(value)][1]
        if is_tensor(value):
            new = self._change(value)
        elif isinstance(value, tuple):
            new = self._tuple(value)
        elif (parts := _parts_of(value)) is None:
            return value
        else:
            # This ends the recursion for a container that contains itself.
            self._done[id(value)] = value, value
            parts = {key: self(part) for key, part in parts.items()}
            new = copy(value)
            _refill(new, parts)
            self.containers.append((value, new, parts))
        self._done[id(value)] = value, new
        return new

    def _tuple(self, value: Any) -> Any:
        packed = isinstance(value, import_module("torch").nn.utils.rnn.PackedSequence)
        # The batch sizes are always on the host.
        on_host = value.batch_sizes if packed else None
        parts = [part if part is on_host else self(part) for part in value]
        if all(map(operator.is_, parts, value)):
            return value
        # A named tuple's constructor takes one argument per field, but `_make` takes an iterable.
        return getattr(type(value), "_make", type(value))(parts)


def _parts_of(value: Any) -> dict[Any, Any] | None:
    """Return key -> part for a list, mapping or dataclass, or None for any other value."""
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value.items())
    if is_dataclass(value) and not isinstance(value, type | import_module("torch").nn.Module):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return None


def _refill(container: Any, parts: Mapping[Any, Any]) -> None:
    """Replace the content of a list, mapping or dataclass by `parts`. Skips identical parts."""
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
                object.__setattr__(container, name, part)  # also if the dataclass is frozen
