"""Where an op comes from: its phase, the module that runs, and the line of the user's code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import chain
from threading import get_ident
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from torchrepro.ground.callers import address, frames, is_library
from torchrepro.policies.placement import bare

if TYPE_CHECKING:
    from weakref import ReferenceType

    from torchrepro.trace.op_facts import OpFacts


MANY = 1 << 14
"""Named tensors above which those that no longer exist are forgotten."""

_USER, _LIBRARY, _MODULE, _ENGINE = range(4)
"""Kinds of frames; plain numbers, because each op goes through ten frames or more."""


@dataclass(frozen=True, slots=True, eq=False)
class CallSite:
    """A module and an instruction of the user's code; one object for each pair."""

    module: str
    code: CodeType | None
    instruction: int

    def within(self, module: str) -> CallSite:
        return place_at(module, self.code, self.instruction)


@cache
def source_of(place: CallSite) -> str:
    """Return ``file:line`` of a place; empty outside of the user's code."""
    if place.code is None:
        return ""
    lines = (
        line
        for start, end, line in place.code.co_lines()
        if start <= place.instruction < end and line is not None
    )
    return f"{place.code.co_filename}:{next(lines, place.code.co_firstlineno)}"


_places: dict[tuple[str, int, int], CallSite] = {}


def place_at(module: str, code: CodeType | None, instruction: int) -> CallSite:
    """Return the one object for a module and an instruction."""
    key = module, address(code), instruction  # by identity: code objects take long to hash
    found = _places.get(key)
    if found is None:
        found = _places[key] = CallSite(module, code, instruction)  # and keeps the code alive
    return found


NOWHERE = place_at("", None, 0)
_CALLS_A_MODULE = torch.nn.Module._call_impl.__code__  # noqa: SLF001 - the frame of every call of a module; were it gone, recording would be refused
_kinds: dict[int, int] = {address(_CALLS_A_MODULE): _MODULE}
_seen: list[CodeType] = []  # keeps alive what `_kinds` is about, so that no id has two meanings


def _kind(code: CodeType) -> int:
    if code.co_name == "_engine_run_backward" and code.co_filename.endswith("graph.py"):
        kind = _ENGINE
    else:
        kind = _LIBRARY if is_library(code.co_filename) else _USER
    _kinds[address(code)] = kind
    _seen.append(code)
    return kind


def is_of_program(code: CodeType) -> bool:
    kind = _kinds.get(address(code), -1)
    return (kind if kind >= 0 else _kind(code)) == _USER


class ModuleNames:
    """Names of modules and their parameters, learnt from the model that is being called."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[ReferenceType[Any], str]] = {}
        self._parameters: dict[int, tuple[ReferenceType[Any], str, str]] = {}
        # By thread, and by task of asyncio: which of them comes first depends on timing.
        self._models: ContextVar[Mapping[str, int]] = ContextVar("models")
        self._held: dict[str, str] = {}
        self.models = 0
        """How many models have been named; what is called again keeps its names until then."""

    def of_module(self, module: Any, frame: FrameType) -> str:
        """Return the path of `module`, whose call `frame` is, within its model."""
        if not self.knows(module):
            self._learn(_outermost(module, frame), frame)
        if not self.knows(module):  # in no attribute of the model
            self._modules[address(module)] = ref(module), type(module).__name__
        return self._modules[address(module)][1]

    def knows(self, module: Any) -> bool:
        known = self._modules.get(address(module))
        return known is not None and known[0]() is module

    def living(self) -> list[tuple[str, Any]]:
        """Return the modules that have been named and still live, each with its path."""
        found = [(path, module()) for module, path in self._modules.copy().values()]
        return [(path, module) for path, module in found if module is not None]

    def held(self) -> dict[str, str]:
        """Return the name under which the program holds each model, where it calls several.

        A name that stands for several of them is left out.
        """
        times = Counter(self._held.values())
        named = {label: name for label, name in self._held.items() if times[name] == 1}
        return named if len(self._held) > 1 else {}

    def place_of(self, module: Any) -> CallSite:
        """Return the place of a module whose call is under way, and the line that called it."""
        frame = sys._getframe(1)  # noqa: SLF001 - see `place_of_call`
        return place_at(self.of_module(module, frame), *_user_code(frame))

    def of_parameter(self, parameter: Any) -> tuple[str, str] | None:
        """Return the module that owns `parameter` and its name there, if its model was called."""
        known = self._parameters.get(address(parameter))
        return known[1:] if known is not None and known[0]() is parameter else None

    def learn(self, tensor: Any, module: str, name: str) -> None:
        """Name a tensor after the parameter that it belongs to."""
        self._parameters[address(tensor)] = ref(tensor), module, name

    def learn_optimizer(self, optimizer: Any) -> None:
        """Name gradients and an optimizer's state after their parameters."""
        if len(self._parameters) > MANY:  # temporary tensors of earlier steps
            self._parameters = {k: v for k, v in self._parameters.items() if v[0]() is not None}
        for parameter in parameters_of(optimizer):
            owner = self.of_parameter(parameter)
            if owner is not None:
                state = optimizer.state.get(parameter, {})
                for tensor in (parameter.grad, *state.values()):
                    if isinstance(tensor, torch.Tensor):
                        self.learn(tensor, *owner)

    def _learn(self, model: Any, frame: FrameType) -> None:
        """Name all modules of `model`; names in a second model begin with its class."""
        self.models += 1
        kind = type(_unwrapped(model)).__name__
        models = self._models.get({})
        first = not models
        count = models.get(kind, 0) + 1
        self._models.set({**models, kind: count})
        label = kind if count == 1 else f"{kind}#{count}"
        self._held.setdefault(label, _name_in_program(model, frame))
        for name, module in model.named_modules():
            short = bare(name) if name and module is not _unwrapped(model) else ""
            path = label if not short else short if first else f"{label}:{short}"
            if not self.knows(module):
                self._modules[address(module)] = ref(module), path
            for own, parameter in module.named_parameters(recurse=False):
                self.learn(parameter, path, own)


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _outermost(module: Any, frame: FrameType) -> Any:
    for outer in frames(frame):
        if outer.f_code is _CALLS_A_MODULE:
            module = outer.f_locals["self"]
        elif outer.f_code.co_varnames[:1] == ("self",):  # a trainer calls a step of the model
            owner = outer.f_locals.get("self")
            if isinstance(owner, torch.nn.Module) and any(m is module for m in owner.modules()):
                module = owner
    return module


def _name_in_program(model: Any, frame: FrameType) -> str:
    """Return the attribute, or else the variable, by which the program calls `model`; or nothing.

    A variable of a function comes last: it may be a parameter that stands for any model. It is
    searched from Python 3.13 on: before, reading a function's variables would keep alive all that
    they hold until the function ends (https://peps.python.org/pep-0667).
    """
    callers = [each for each in frames(frame) if is_of_program(each.f_code)]
    owners = (_attributes_of_self(its) for its in callers)
    variables = (its.f_locals for its in callers) if sys.version_info >= (3, 13) else ()
    names = chain(owners, (its.f_globals for its in callers), variables)
    return next(
        (name for values in names for name, value in [*values.items()] if value is model), ""
    )


def _attributes_of_self(frame: FrameType) -> Mapping[str, Any]:
    if frame.f_code.co_varnames[:1] != ("self",):
        return {}
    owner = frame.f_locals.get("self")
    try:
        found = getattr(owner, "__dict__", {})
    except Exception:  # noqa: BLE001 - whatever a proxy raises that stands for nothing now
        return {}
    return found if isinstance(found, dict) else {}


def _unwrapped(model: Any) -> Any:
    while True:
        inner = [child for name, child in model.named_children() if bare(f"{name}.x") == "x"]
        if len(inner) != 1:
            return model
        model = inner[0]


def place_of_call(names: ModuleNames, depth: int) -> tuple[CallSite, bool]:
    """Return where the op comes from, and whether autograd's engine called it.

    `depth` is how many frames of the recorder lie on top.
    """
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - documented; `inspect` costs 100 times as much
    code, instruction, kinds = None, 0, _kinds
    while frame is not None:
        its = frame.f_code
        kind = kinds.get(address(its), -1)
        if kind < 0:
            kind = _kind(its)
        if kind == _USER:
            if code is None:
                code, instruction = its, frame.f_lasti
        elif kind == _MODULE:
            module = names.of_module(frame.f_locals["self"], frame)
            if code is not None:
                return place_at(module, code, instruction), False
            return place_at(module, *_user_code(frame)), False
        elif kind == _ENGINE:
            return place_at("", code, instruction), True
        frame = frame.f_back
    return place_at("", code, instruction), False


def _user_code(frame: FrameType | None) -> tuple[CodeType | None, int]:
    kinds = _kinds
    while frame is not None:
        its = frame.f_code
        kind = kinds.get(address(its), -1)
        if kind == _USER or (kind < 0 and _kind(its) == _USER):
            return its, frame.f_lasti
        frame = frame.f_back
    return None, 0


def place_of_user() -> CallSite:
    """Return the line of the user's code that is running, without a module."""
    return place_at("", *_user_code(sys._getframe(1)))  # noqa: SLF001 - see above


# Which node of autograd's graph runs, and the number of its next one. There is no public way to
# either; without them, or the number of a node, recording is refused.
_current_node: Callable[[], Any] = torch._C._current_autograd_node  # noqa: SLF001 - see above
_number_of_node = torch._C._FunctionBase._sequence_nr  # noqa: SLF001 - each kind has its own
_next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - see above
_AccumulateGrad: Any = getattr(torch._C._functions, "AccumulateGrad", None)  # noqa: SLF001 - the node that writes `.grad`


@dataclass(slots=True)
class OptimizerStep:
    """A step that an optimizer makes."""

    call: CallSite  # the line that called it
    owner: str = ""  # the module whose parameter it is updating


class RunPosition:
    """What the program does on each thread, as the hooks of its training loop report it."""

    __slots__ = ("_ended", "aside", "backward", "loading", "optimizer")

    def __init__(self) -> None:
        self.optimizer: dict[int, OptimizerStep] = {}  # threads on which an optimizer makes a step
        self.backward = set[int]()  # the threads that have started a backward pass
        self.loading = set[int]()  # the threads on which a loader prepares a batch
        self.aside: dict[int, int] = {}
        """The threads whose ops are torchrepro's own, each with how often it was paused; `ALL` for
        all of them. It is the one attribute that every op checks, and empty for nearly all."""
        self._ended = False

    def is_aside(self) -> bool:
        return ALL in self.aside or get_ident() in self.aside

    def pause(self) -> None:
        """Leave out the ops of this thread, until `go_on` was called as often."""
        self.aside[get_ident()] = self.aside.get(get_ident(), 0) + 1

    def go_on(self) -> None:
        often = self.aside.pop(get_ident(), 0)
        if often > 1:
            self.aside[get_ident()] = often - 1

    def stop(self) -> None:
        """Leave out all ops from now on."""
        self._ended = True
        self.rest()

    def rest(self) -> None:
        """Leave out all ops until `resume`."""
        self.aside[ALL] = 1

    def resume(self) -> None:
        """Take ops again, unless `stop` was called."""
        if not self._ended:
            self.aside.pop(ALL, None)


ALL = 0
"""Stands for all threads: none has this number."""

DEPTH = 3
"""Frames from `place_of_call` to the mode that takes an op, if its `_append` asks for the place.

What called the op may be no frame at all: on a thread of its own, autograd's engine is not Python.
"""


class OpOriginFinder:
    """Finds the origin of the ops of one thread, and remembers it for their gradients."""

    def __init__(self, names: ModuleNames, now: RunPosition) -> None:
        self.names = names
        self.now = now
        self._places: dict[int, CallSite] = {}  # number of a node of autograd's graph -> its place
        self._last_sequence = _next_sequence()
        self._call = NOWHERE  # the line that called the optimizer
        self._within: dict[
            str, CallSite
        ] = {}  # that line, by the module whose parameter is updated

    def of(self, facts: OpFacts, args: Any) -> tuple[str, CallSite]:
        """Return the phase that an op belongs to, its module and its line."""
        now = self.now
        node = _current_node()
        if node is not None:
            phase = "backward"
            caller = sys._getframe(DEPTH - 1).f_back  # noqa: SLF001 - see `place_of_call`
            if caller is None or _kinds.get(address(caller.f_code)) == _ENGINE:
                place = self._place_of_node(node, NOWHERE)
            else:
                place, in_engine = place_of_call(self.names, DEPTH)
                if in_engine or not place.module:
                    place = self._place_of_node(node, place)
        elif now.optimizer and (step := now.optimizer.get(get_ident())) is not None:
            place = self._of_optimizer(step, args)
            return ("collective" if facts.collective else "optimizer"), place
        else:
            phase = "forward"
            if now.loading and get_ident() in now.loading:
                phase = "data"
            elif now.backward and get_ident() in now.backward:
                phase = "backward"
            place, _ = place_of_call(self.names, DEPTH)
        sequence = _next_sequence()
        if sequence != self._last_sequence:  # autograd has added nodes to its graph
            for number in range(self._last_sequence, sequence):
                self._places[number] = place
            self._last_sequence = sequence
        return ("collective" if facts.collective else phase), place

    def _of_optimizer(self, step: OptimizerStep, args: Any) -> CallSite:
        owner = ""  # many at once
        if args and isinstance(args[0], torch.Tensor):
            for value in args:
                known = self.names.of_parameter(value)
                if known is not None:
                    step.owner = known[0]
                    break
            owner = step.owner  # computed from the state of the last one
        if step.call is not self._call:
            self._call, self._within = step.call, {}
        place = self._within.get(owner)
        if place is None:
            place = self._within[owner] = step.call.within(owner)
        return place

    def passed_on(self, given: Any, result: Any) -> None:
        """Name a result of an optimizer's op that is the tensor it was given."""
        owner = self.names.of_parameter(given)
        if owner is not None:
            self.names.learn(result, *owner)

    def _place_of_node(self, node: Any, place: CallSite) -> CallSite:
        if node.__class__ is _AccumulateGrad:
            owner = self.names.of_parameter(node.variable)
            return place if owner is None else place.within(owner[0])
        forward = self._places.get(node._sequence_nr(), NOWHERE)  # noqa: SLF001 - see the top
        return forward if place.code is None else place.within(forward.module)

    def end_step(self, *, of_this_thread: bool) -> None:
        """Forget the graph of the step that has ended; another thread may be in one of its own."""
        if not of_this_thread:
            if len(self._places) > MANY:
                self._places.clear()
            return
        self._places.clear()
        self._last_sequence = _next_sequence()
