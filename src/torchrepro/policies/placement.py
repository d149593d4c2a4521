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
from typing import TYPE_CHECKING, Any, NamedTuple
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


def device_named(word: str) -> Any:
    """Return the `torch.device` that `word` means now: ``cuda`` is the current one of its kind."""
    torch = import_module("torch")
    if word.startswith("cpu"):
        return torch.device("cpu")  # tensors of the host carry no index
    return torch.empty(0, device=word).device


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


class Match(NamedTuple):
    """The modules of one model that the patterns mean."""

    patterns: set[str]
    """Those that match a module here."""

    devices: dict[Any, tuple[str, str]]
    """Module -> its name, and the device it is to run on."""


def match(root: Any, patterns: Mapping[str, str]) -> Match:
    """Return which modules inside `root` the patterns mean, and where each is to run.

    A name goes before a pattern, and a pattern for a module before one for the list it is in.
    Raises `ApplyError` where two of the same strength disagree.
    """
    names = named(root)
    claims: dict[Any, dict[tuple[int, str], str]] = {}
    first_names: dict[Any, str] = {}  # of the several names of a module: the first one matched
    for name in names:
        for pattern, device in patterns.items():
            strength = _strength(name, bare(pattern))
            for path in _parts_that_run(name, names) if strength else ():
                claim = strength * (2 if path == name else 1), pattern
                claims.setdefault(names[path], {})[claim] = device
                first_names.setdefault(names[path], path)
    return Match(
        {pattern for by_claim in claims.values() for _, pattern in by_claim},
        {module: (path, _decided(path, claims[module])) for module, path in first_names.items()},
    )


def _strength(name: str, pattern: str) -> int:
    """Return how specific `pattern` is for the module called `name`; 0 if it does not match."""
    if pattern == name:
        return 3
    # What a wrapper wraps as a whole is the model, which no pattern means by chance.
    is_model = all(part in WRAPPERS for part in name.split("."))
    return 0 if is_model or not fnmatchcase(name, pattern) else 2


def _parts_that_run(name: str, names: Mapping[str, Any]) -> Iterator[str]:
    """Yield `name`, or for a list of modules, which has no forward, the members that have one."""
    forward = getattr(names[name].forward, "__func__", None)
    if forward is not import_module("torch").nn.Module.forward:
        yield name
        return
    for child, _ in names[name].named_children():
        yield from _parts_that_run(f"{name}.{child}", names)


def _decided(name: str, claims: Mapping[tuple[int, str], str]) -> str:
    strongest = max(strength for strength, _ in claims)
    devices = {
        pattern: device for (strength, pattern), device in claims.items() if strength == strongest
    }
    if len(set(devices.values())) > 1:
        said = ", ".join(f"{pattern}: {device}" for pattern, device in devices.items())
        raise ApplyError(f"device.modules: `{name}` is to run on several devices ({said})")
    return next(iter(devices.values()))


TO_DO = (
    "names are those of model.named_modules(); where no model is called as a whole, or only in "
    "code of torch.compile, call torchrepro.place_modules(model) before the first step"
)


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
            placement.begin()

    def save(self) -> list[Placement]:
        return [*_in_force]

    def restore(self, saved: list[Placement]) -> None:
        for placement in _in_force:
            if placement not in saved:
                placement.end()
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

    def begin(self) -> None:
        """Have what was not found reported when the process ends, if not before."""
        atexit.register(self._report)

    def end(self) -> None:
        """Report what was not found."""
        atexit.unregister(self._report)
        self._report()

    def put(self) -> None:
        """Let the parts found so far run on their devices, and look into every model called.

        Adds two hooks to torch: before calls of modules, and before steps of optimizers.
        """
        torch = import_module("torch")
        hooks = import_module("torch.nn.modules.module")
        optimizers = import_module("torch.optim.optimizer")

        def before_call(module: Any, args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            if module not in self._examined or module in self._models:
                self._look_into(module)

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
        with self._lock:
            found = match(model, self.patterns)
            self._matched |= found.patterns
            self._names |= dict.fromkeys(named(model))
            self._kinds[type(model).__name__] = None
            self._examined.update(model.modules())
            self._models.add(model)
            for module, (name, device) in found.devices.items():
                self._place(module, name, device)
            return tuple(name for name, _ in found.devices.values())

    def unmatched(self) -> str:
        """Return a message about the patterns that match nothing so far, or an empty text."""
        called = some(self._kinds) or ("only compiled code" if self._compiled else "nothing")
        names = sorted(self._names, key=lambda name: name.count("."))
        return "\n".join(
            str(
                Problem(
                    f"matches no module; called so far: {called}",
                    key=POLICY,
                    found=pattern,
                    legal=some(names),
                    near=near(pattern, names),
                    todo=TO_DO,
                )
            )
            for pattern in self.patterns
            if pattern not in self._matched
        )

    def _look_into(self, module: Any) -> None:
        """Place the parts of `module`, and parts that were added since to a model around it."""
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

    def _place(self, module: Any, name: str, device: str) -> None:
        present = vars(module).get("forward")
        if isinstance(present, PlacedForward) and present.is_for(module):
            return
        if isinstance(module, import_module("torch").jit.ScriptModule):
            raise ApplyError(f"{POLICY}: `{name}` is TorchScript, which stays where it is")
        self._placed.append(PlacedForward(name, module, Device(device_named(device))))
        self._placed[-1].put()

    def _before_step(self) -> None:
        if self._stepped:
            return
        self._stepped = True
        problem = self.unmatched()
        if problem:
            refuse(ApplyError(problem))

    def _report(self) -> None:
        """Say on standard error which patterns matched nothing, and which parts never ran."""
        # A process that calls no module, such as a launcher, has nothing to report.
        ran = self._kinds or self._compiled
        lines = [self.unmatched()] if ran and not self._stepped else []
        idle = [forward.name for forward in self._placed if not self._has_run(forward.name)]
        if idle:
            lines.append(
                f"{POLICY}: never called, so it never ran on its device: {some(idle)} "
                "(a module may use the weights of its parts without calling them)"
            )
        note(*filter(None, lines))

    @property
    def _compiled(self) -> bool:
        """Whether code was compiled under this profile: calls in it do not reach the hook."""
        return compilations() > self._compilations

    def _has_run(self, name: str) -> bool:
        """Whether the part `name` ran, or one that it is in."""
        ran = [forward.name for forward in self._placed if forward.calls]
        return any(name == other or name.startswith(f"{other}.") for other in ran)


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
