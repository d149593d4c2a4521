"""Parts of a model that run on another device, to find out whether a device is at fault.

The parts are found by name when a model is first called. A hook of torch's own, before every call
of a module, is there while a profile asks for it
(https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.module.register_module_forward_pre_hook.html).
A part then draws its random numbers from the generator of the device that it runs on.

The tensors of such a part's forward go to the device, and its results come back. Other objects are
handed on as they are, so that one which keeps state, such as a cache of keys and values, stays the
caller's own. Parameters are copied by ops that autograd sees, so gradients flow to the parameters
themselves: optimizers, DDP and checkpoints see the module where it always was
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
from torchrepro.ground.errors import ApplyError
from torchrepro.ground.fork_safety import fork_safe_lock
from torchrepro.ground.messages import Problem, near, some
from torchrepro.policies.policy import count, forget_compiled, refuse
from torchrepro.policies.run_on_cpu import is_tensor

POLICY = "device.modules"
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Segments of names that wrappers add: DDP, torch.compile, FSDP, activation checkpointing."""

_DERIVED = ("_flat_weights", "_flat_weight_refs")
"""Attributes of recurrent layers that hold their weights a second time."""

_PREFIX = "module."  # of the names of a module's tensors in `functional_call`
_ABSENT = object()


def absence(word: str) -> str:
    """Return why nothing can run on the device `word` here, or an empty string.

    Initialises no device (https://docs.pytorch.org/docs/stable/accelerator.html).
    """
    accelerator, here, kinds = import_module("torch").accelerator, ["cpu"], ["cpu"]
    if accelerator.is_available():
        kind = accelerator.current_accelerator().type
        here += [f"{kind}:{index}" for index in range(accelerator.device_count())]
        kinds.append(kind)
    if word in (*here, *kinds, "cpu:0"):
        return ""
    close = near(word, [*here, *kinds])
    hint = f"; did you mean {close}?" if close else ""
    return f"no device `{word}` here{hint} (here: {some(here)})"


def bare(name: str) -> str:
    """Return `name`, or a pattern of names, as in a model without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name


def named(root: Any) -> dict[str, Any]:
    """Return the modules inside `root` by their bare names; of a wrapper, what it wraps."""
    found: dict[str, tuple[str, Any]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        short = bare(name)
        known, _ = found.get(short, ("", None))
        if name and (not known or name.startswith(f"{known}.")):
            found[short] = name, module
    return {short: module for short, (_, module) in found.items()}


def match(root: Any, patterns: Mapping[str, str]) -> tuple[dict[Any, tuple[str, str]], set[str]]:
    """Return the modules inside `root` that run elsewhere, and the patterns that match one.

    A module comes with its name and its device. A name goes before a pattern, and a pattern for a
    module before one for the list it is in. Raises `ApplyError` where two of the same strength
    disagree.
    """
    names = named(root)
    claims: dict[Any, dict[tuple[int, str], str]] = {}
    first_names: dict[Any, str] = {}  # of the several names of a module: the first one matched
    for name in names:
        # Under the name of a wrapper is the model itself, which no pattern means by chance.
        is_model = all(part in WRAPPERS for part in name.split("."))
        for pattern, device in patterns.items():
            is_exact = bare(pattern) == name
            if not is_exact and (is_model or not fnmatchcase(name, bare(pattern))):
                continue
            for path in _parts_that_run(name, names):
                claim = (3 if is_exact else 2) * (2 if path == name else 1), pattern
                claims.setdefault(names[path], {})[claim] = device
                first_names.setdefault(names[path], path)
    found = {}
    for module, path in first_names.items():
        strongest = max(strength for strength, _ in claims[module])
        devices = {
            pattern: device
            for (strength, pattern), device in claims[module].items()
            if strength == strongest
        }
        if len(set(devices.values())) > 1:
            said = ", ".join(f"{pattern}: {device}" for pattern, device in devices.items())
            raise ApplyError(f"{POLICY}: `{path}` is to run on several devices ({said})")
        found[module] = path, next(iter(devices.values()))
    return found, {pattern for by_claim in claims.values() for _, pattern in by_claim}


def _parts_that_run(name: str, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield `name`, or for a list of modules, which has no forward, the members that have one."""
    forward = getattr(names[name].forward, "__func__", None)
    if forward is not import_module("torch").nn.Module.forward:
        yield name
        return
    for child, _ in names[name].named_children():
        yield from _parts_that_run(f"{name}.{child}", names)


class ModulesPolicy:
    """Which parts of models run on which device: patterns of names -> devices."""

    def read(self) -> dict[str, str]:
        return dict(_in_force[-1].patterns) if _in_force else {}

    def refuses(self, value: Mapping[str, str]) -> str:
        return next(filter(None, map(absence, value.values())), "")

    def write(self, value: Mapping[str, str]) -> None:
        self._switch([Placement(value)] if value else [])
        for placement in _in_force:
            atexit.register(placement.report)

    def save(self) -> list[Placement]:
        return [*_in_force]

    def restore(self, saved: list[Placement]) -> None:
        for placement in _in_force:
            if placement not in saved:
                atexit.unregister(placement.report)
                placement.report()
        self._switch(saved)

    def _switch(self, placements: list[Placement]) -> None:
        for placement in _in_force:
            placement.take()
        _in_force[:] = placements
        for placement in _in_force:
            placement.put()


policy = ModulesPolicy()


class Placement:
    """The patterns of one profile, and what they matched in the models called so far."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self.patterns = dict(patterns)
        self._lock = fork_safe_lock()
        self._examined: WeakSet[Any] = WeakSet()
        self._models: WeakSet[Any] = WeakSet()
        self._placed: list[PlacedForward] = []
        self._matched: set[str] = set()
        self._names: dict[str, None] = {}
        self._kinds: dict[str, None] = {}
        self._hooks: list[Any] = []
        self._stepped = False
        self._compilations = 0

    def put(self) -> None:
        """Let the parts found so far run on their devices, and examine every model called.

        Adds two hooks to torch: before calls of modules, and before steps of optimizers.
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
            forward.put()
        forget_compiled()
        self._compilations = compilations()

    def take(self) -> None:
        """Take back what `put` has done."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for forward in reversed(self._placed):
            forward.take()
        forget_compiled()

    def place(self, model: Any) -> tuple[str, ...]:
        """Find the parts of `model`, let them run on their devices, and return their names."""
        torch = import_module("torch")
        with self._lock:
            found, matched = match(model, self.patterns)
            self._matched |= matched
            self._names |= dict.fromkeys(named(model))
            self._kinds[type(model).__name__] = None
            self._examined.update(model.modules())
            self._models.add(model)
            for module, (name, device) in found.items():
                present = vars(module).get("forward")
                if isinstance(present, PlacedForward) and present.module() is module:
                    continue
                if isinstance(module, torch.jit.ScriptModule):
                    raise ApplyError(f"{POLICY}: `{name}` is TorchScript, which stays where it is")
                # ``cuda`` is the current one of its kind. Tensors of the host carry no index.
                is_host = device.startswith("cpu")
                there = torch.device("cpu") if is_host else torch.empty(0, device=device).device
                self._placed.append(PlacedForward(name, module, there))
                self._placed[-1].put()
            return tuple(name for name, _ in found.values())

    def unmatched(self) -> str:
        """Return a message about the patterns that match nothing so far, or an empty text."""
        called = some(self._kinds) or ("only compiled code" if self._has_compiled() else "nothing")
        names = sorted(self._names, key=lambda name: name.count("."))
        what = f"matches no module; called so far: {called}"
        todo = (
            "names are those of model.named_modules(); where no model is called as a whole, or "
            "only in code of torch.compile, call torchrepro.place_modules(model) before the first "
            "step"
        )
        return "\n".join(
            str(Problem(what, "", POLICY, pattern, some(names), near(pattern, names), todo))
            for pattern in self.patterns
            if pattern not in self._matched
        )

    def _examine(self, module: Any) -> None:
        with self._lock:
            holding = [module]
            if module not in self._models:
                holding = [model for model in self._models if module in set(model.modules())]
            grown = [m for m in holding if any(part not in self._examined for part in m.modules())]
            try:
                for model in grown if holding else [module]:
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
        """Say on standard error which patterns matched nothing, and which parts never ran."""
        # A process that calls no module, such as a launcher, has nothing to report.
        ran = self._kinds or self._has_compiled()
        lines = [self.unmatched()] if ran and not self._stepped else []
        # A part of a part that ran has gone there with it.
        ran_there = [forward.name for forward in self._placed if forward.calls]
        idle = [
            forward.name
            for forward in self._placed
            if not any(f"{forward.name}.".startswith(f"{name}.") for name in ran_there)
        ]
        if idle:
            lines.append(
                f"{POLICY}: never called, so it never ran on its device: {some(idle)} "
                "(a module may use the weights of its parts without calling them)"
            )
        note(*filter(None, lines))

    def _has_compiled(self) -> bool:
        """Whether code was compiled under this profile: calls in it do not reach the hook."""
        return compilations() > self._compilations


_in_force: list[Placement] = []  # at most one: a profile within another replaces its patterns


def compilations() -> int:
    """Return how many pieces of code torch.compile has compiled in this process.

    Private (``torch._dynamo.utils.counters``), though its guides show it: nothing public tells.
    Where it is gone, patterns that match nothing go unreported in a program of compiled code alone.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("frames", {}).get("ok", 0))


def place_modules(*models: Any) -> tuple[str, ...]:
    """Let the parts of `models` that the profile names run on their devices; return their names.

    Without it they are found when a model is first called as a whole. Raises `ApplyError` for a
    pattern of `device.modules` that matches nothing in these models or in those called before.
    Where no profile in force names any part, nothing is changed and the result is empty.
    """
    if not _in_force:
        return ()
    placement = _in_force[-1]
    names = tuple(name for model in models for name in placement.place(model))
    problem = placement.unmatched()
    if problem:
        raise ApplyError(problem)
    return names


class PlacedForward:
    """The forward of one module, run on a device; an attribute of that module while in force.

    Whatever else a call of the module does, such as its hooks, happens where it always did. torch
    compiles none of it (https://docs.pytorch.org/docs/stable/generated/torch.compiler.disable.html).
    """

    def __init__(self, name: str, module: Any, there: Any) -> None:
        self.name = name
        self.there = there
        self.calls = 0
        self.module = ref(module)  # a copy of the module may hold this as well
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
        count(POLICY, self.name, f"{what} {self.there}", moved=moved)
        return result

    def _plain(self, module: Any) -> Any:
        return partial(type(module).forward, module) if self._own is _ABSENT else self._own

    __name__ = "forward"

    @property
    def __signature__(self) -> Signature:
        return signature(self._plain(self.module()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the module's own forward: a copy is plain, and needs no torchrepro."""
        if self._own is _ABSENT:
            return getattr, (self.module(), "forward")
        return partial, (self._own,)


def run_there(
    there: Any,
    module: Any,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, int]:
    """Return what `forward` of `module` gives on the device `there`, and the bytes moved for it.

    Nothing is moved, and `forward` gets the very arguments, where all tensors are there already.
    Writes to arguments, buffers and parameters reach the originals.
    """
    # Tied parameters and buffers are there under each of their names.
    prefix = _PREFIX.removesuffix(".")
    state = {
        **dict(module.named_parameters(prefix, remove_duplicate=False)),
        **dict(module.named_buffers(prefix, remove_duplicate=False)),
    }
    attributes = [_tensors_of(part) for part in module.modules()]
    plain = (tensor for tensors in attributes for tensor in tensors.values())
    transfer = _Transfer(there, [*state.values(), *plain])
    args_there, kwargs_there = transfer.over(args), transfer.over(dict(kwargs))
    state_there, attributes_there = transfer.over(state), transfer.over(attributes)
    if transfer.home is None:
        return forward(*args, **kwargs), 0
    call = import_module("torch").func.functional_call
    with _attributes(module, transfer, attributes_there), _as_at_home(transfer.home, there):
        before = dict(state_there)
        # Without hooks: those of the module have run, or will run, around its forward.
        stage = _stage_class()()
        stage.module, stage.run = module, forward
        result = call(stage, state_there, args_there, kwargs_there, tie_weights=False)
        transfer.settle()
        for name, tensor in state_there.items():
            if tensor is not before[name]:  # the forward has put another tensor in its place
                owner, _, attribute = name.removeprefix(_PREFIX).rpartition(".")
                setattr(module.get_submodule(owner), attribute, transfer.back(tensor))
    return transfer.back(result), transfer.moved


@cache
def _stage_class() -> Any:
    def call(stage: Any, *args: Any, **kwargs: Any) -> Any:
        return stage.run(*args, **kwargs)

    return type("Stage", (import_module("torch").nn.Module,), {"__call__": call})


@contextmanager
def _attributes(module: Any, transfer: _Transfer, there: list[dict[str, Any]]) -> Iterator[None]:
    """Have the parts of `module` hold their tensors as they are `there`, besides its state."""
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
    return {name: value for name, value in vars(part).items() if is_tensor(value)}


@contextmanager
def _as_at_home(home: Any, there: Any) -> Iterator[None]:
    """Carry over what the program has set for its device: autocast, and where new tensors are.

    Autocast over there casts to the type that it casts to at home, in the ops of the device there.
    """
    torch = import_module("torch")
    kind, other = home.type, there.type
    with ExitStack() as settings:
        if kind != other and torch.amp.is_autocast_available(other):
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            if enabled or torch.is_autocast_enabled(other):
                settings.enter_context(torch.autocast(other, dtype=dtype, enabled=enabled))
        if torch.get_default_device().type == kind != other:
            settings.enter_context(there)
        yield


class _Transfer:
    """The tensors of one call, to a device and back to where the first of them came from."""

    def __init__(self, there: Any, state: Iterable[Any]) -> None:
        self._there = there
        self._state = {id(tensor) for tensor in state}  # of the module
        self.home: Any = None
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
            at_home = self._moved(copied, original.device)
            # Only without gradients can a forward have written to a parameter of its own.
            is_parameter = original.is_leaf and original.requires_grad
            with torch.set_grad_enabled(torch.is_grad_enabled() and not is_parameter):
                original.copy_(at_home)
        for old, new, parts in self.over.containers:
            present = _parts_of(new) or {}
            same = present.keys() == parts.keys() and all(parts[k] is present[k] for k in parts)
            if not same:
                _refill(old, {key: self.back(part) for key, part in present.items()})

    def _send(self, tensor: Any) -> Any:
        if is_there(tensor, self._there):
            self._originals[id(tensor)] = tensor
            return tensor
        if hasattr(tensor, "device_mesh"):
            raise ApplyError(f"{POLICY}: a module whose parameters are sharded stays in place")
        self.home = self.home or tensor.device
        copied = self._moved(tensor, self._there)
        # Batch norm, and code that uses `weight.data`, write to state behind autograd's back.
        version = None if id(tensor) in self._state else _version(copied)
        content = copied.detach().clone() if version is None else None
        self._copies.append((tensor, copied, version, content))
        self._originals[id(copied)] = tensor
        return copied

    def _bring(self, tensor: Any) -> Any:
        if id(tensor) in self._originals:
            return self._originals[id(tensor)]
        return self._moved(tensor, self.home) if tensor.device == self._there else tensor

    def _moved(self, tensor: Any, device: Any) -> Any:
        self.moved += tensor.numel() * tensor.element_size()
        return tensor.to(device, copy=True)  # an op that autograd sees


def is_there(tensor: Any, device: Any) -> bool:
    """Whether `tensor` need not be moved to `device`."""
    return bool(tensor.device == device)


def _version(tensor: Any) -> int | None:
    """Return a number that grows when `tensor` is written to, or None where torch keeps none.

    Private (``_version``), though torch's own error messages show it: nothing public tells of a
    write that leaves the values as they are. Where it is gone, contents are compared.
    """
    try:
        return int(tensor._version)  # noqa: SLF001 - see above
    except (AttributeError, RuntimeError):  # inference tensors keep no version
        return None


class NestedMap:
    """Makes nested values anew with every tensor changed, each tensor and container once.

    Two places that hold one object hold one object afterwards. torch's pytree knows neither that,
    nor records and mappings of other classes.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}  # the old is kept, so that its id stays its own
        self.containers: list[tuple[Any, Any, dict[Any, Any]]] = []
        """Containers made anew: the old, the new, and the parts that it began with."""

    def __call__(self, value: Any) -> Any:
        """Return `value` with its tensors changed."""
        if id(value) in self._done:
            return self._done[id(value)][1]
        if is_tensor(value):
            new = self._change(value)
        elif isinstance(value, tuple):
            new = self._tuple(value)
        elif (parts := _parts_of(value)) is None:
            return value
        else:
            self._done[id(value)] = value, value  # a container that holds itself ends here
            parts = {key: self(part) for key, part in parts.items()}
            new = copy(value)
            _refill(new, parts)
            self.containers.append((value, new, parts))
        self._done[id(value)] = value, new
        return new

    def _tuple(self, value: Any) -> Any:
        packed = isinstance(value, import_module("torch").nn.utils.rnn.PackedSequence)
        # The sizes of its batches are on the host wherever its data is.
        on_host = value.batch_sizes if packed else None
        parts = [part if part is on_host else self(part) for part in value]
        if all(map(operator.is_, parts, value)):
            return value
        # A named tuple takes its fields one by one.
        return getattr(type(value), "_make", type(value))(parts)


def _parts_of(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container that can be written to, by their keys; else None."""
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value.items())
    if is_dataclass(value) and not isinstance(value, type | import_module("torch").nn.Module):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    return None


def _refill(container: Any, parts: Mapping[Any, Any]) -> None:
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
