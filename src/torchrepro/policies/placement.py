"""Parts of a model that run on another device, to find out whether a device is at fault.

The parts are found by name when a model is first called. A hook of torch's own, before every call
of a module, is there while a profile asks for it
(https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.module.register_module_forward_pre_hook.html).
A part then draws its random numbers from the generator of the device that it runs on.
"""

from __future__ import annotations

import atexit
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torchrepro.console import note
from torchrepro.errors import ApplyError
from torchrepro.fork_safety import fork_safe_lock
from torchrepro.messages import Problem, near, some
from torchrepro.policies.offload import POLICY, Device, PlacedForward
from torchrepro.policies.policy import forget_compiled, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def devices_here() -> tuple[str, ...]:
    """Return the devices of this process that can compute: ``cpu``, ``cuda:0``, ``cuda:1``.

    Initialises none (https://docs.pytorch.org/docs/stable/accelerator.html).
    """
    accelerator = import_module("torch").accelerator
    if not accelerator.is_available():
        return ("cpu",)
    kind = accelerator.current_accelerator().type
    return ("cpu", *(f"{kind}:{index}" for index in range(accelerator.device_count())))


def absence(word: str) -> str:
    """Return why nothing can run on the device `word` here, or an empty string."""
    here = devices_here()
    kinds = {device.partition(":")[0]: device for device in here}
    if word in (*here, *kinds, "cpu:0"):
        return ""
    close = near(word, [*here, *kinds])
    hint = f"; did you mean {close}?" if close else ""
    return f"no device `{word}` here{hint} (here: {some(here)})"


WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Segments of names that wrappers add: DDP, torch.compile, FSDP, activation checkpointing."""


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
            raise ApplyError(f"device.modules: `{path}` is to run on several devices ({said})")
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


@dataclass(frozen=True, slots=True)
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
                self._placed.append(PlacedForward(name, module, Device(there)))
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


policy = ModulesPolicy()
