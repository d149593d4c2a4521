"""Finds the origin of an op: its phase, the running module, and the line of the user's code."""

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
from torchrepro.policies.policy import bare

if TYPE_CHECKING:
    from weakref import ReferenceType

    from torchrepro.trace.op_facts import OpFacts


MANY = 1 << 14
"""The number of named tensors above which the names of dead ones are deleted."""

_USER, _LIBRARY, _MODULE, _ENGINE = range(4)
"""Types of frames; plain numbers, because every op walks up ten frames or more."""


@dataclass(frozen=True, slots=True, eq=False)
class CallSite:
    """A module and an instruction of the user's code. There is one object for each such pair."""

    module: str
    code: CodeType | None
    instruction: int

    def within(self, module: str) -> CallSite:
        return call_site_at(module, self.code, self.instruction)


@cache
def source_of(call_site: CallSite) -> str:
    """Return ``file:line`` of a call site, or an empty string outside of the user's code."""
    if call_site.code is None:
        return ""
    lines = (
        line
        for start, end, line in call_site.code.co_lines()
        if start <= call_site.instruction < end and line is not None
    )
    return f"{call_site.code.co_filename}:{next(lines, call_site.code.co_firstlineno)}"


_call_sites: dict[tuple[str, int, int], CallSite] = {}


def call_site_at(module: str, code: CodeType | None, instruction: int) -> CallSite:
    """Return the one `CallSite` object that exists for a module and an instruction."""
    key = module, address(code), instruction  # by identity: code objects take long to hash
    call_site = _call_sites.get(key)
    if call_site is None:  # the new object keeps the code alive
        call_site = _call_sites[key] = CallSite(module, code, instruction)
    return call_site


NOWHERE = call_site_at("", None, 0)
_CALLS_A_MODULE = torch.nn.Module._call_impl.__code__  # noqa: SLF001 - the frame of every call of a module; if it is missing, recording is refused
_frame_types: dict[int, int] = {address(_CALLS_A_MODULE): _MODULE}
_kept_alive: list[CodeType] = []  # so that no id in `_frame_types` is reused


def _type_of_frame(code: CodeType) -> int:
    if code.co_name == "_engine_run_backward" and code.co_filename.endswith("graph.py"):
        frame_type = _ENGINE
    else:
        frame_type = _LIBRARY if is_library(code.co_filename) else _USER
    _frame_types[address(code)] = frame_type
    _kept_alive.append(code)
    return frame_type


def is_of_program(code: CodeType) -> bool:
    frame_type = _frame_types.get(address(code), -1)
    return (frame_type if frame_type >= 0 else _type_of_frame(code)) == _USER


class ModuleNames:
    """Names of modules and parameters, read from each model when the model is first called."""

    def __init__(self) -> None:
        self._modules: dict[int, tuple[ReferenceType[Any], str]] = {}
        self._parameters: dict[int, tuple[ReferenceType[Any], str, str]] = {}
        # Separate by thread and asyncio task, because the order of these depends on timing.
        self._models: ContextVar[Mapping[str, int]] = ContextVar("models")
        self._names_in_program: dict[str, str] = {}
        self.models = 0
        """How many models have been named. Until it grows, modules keep their names."""

    def of_module(self, module: Any, frame: FrameType) -> str:
        """Return the path of `module` within its model. `frame` is in the call of `module`."""
        if not self.knows(module):
            self._name_model(_outermost(module, frame), frame)
        if not self.knows(module):  # it is not a submodule of the model
            self._modules[address(module)] = ref(module), type(module).__name__
        return self._modules[address(module)][1]

    def knows(self, module: Any) -> bool:
        known = self._modules.get(address(module))
        return known is not None and known[0]() is module

    def living(self) -> list[tuple[str, Any]]:
        """Return the path and the module of each named module that is still alive."""
        modules = [(path, module()) for module, path in self._modules.copy().values()]
        return [(path, module) for path, module in modules if module is not None]

    def names_in_program(self) -> dict[str, str]:
        """Return the program's name for each model; empty if the program calls only one model.

        A name that several models share is omitted.
        """
        times = Counter(self._names_in_program.values())
        named = {label: name for label, name in self._names_in_program.items() if times[name] == 1}
        return named if len(self._names_in_program) > 1 else {}

    def call_site_of(self, module: Any) -> CallSite:
        """Return the call site of a running call of `module`: the module and the calling line."""
        frame = sys._getframe(1)  # noqa: SLF001 - see `call_site_of_op`
        return call_site_at(self.of_module(module, frame), *_user_code(frame))

    def of_parameter(self, parameter: Any) -> tuple[str, str] | None:
        """Return the module that owns `parameter`, and the name of the parameter in that module.

        Returns None until the model of the parameter is called for the first time.
        """
        known = self._parameters.get(address(parameter))
        return known[1:] if known is not None and known[0]() is parameter else None

    def name_tensor(self, tensor: Any, module: str, name: str) -> None:
        """Give a tensor, such as a gradient, the name of the parameter that it belongs to."""
        self._parameters[address(tensor)] = ref(tensor), module, name

    def name_optimizer_tensors(self, optimizer: Any) -> None:
        """Name each gradient, and each tensor in the optimizer's state, after its parameter."""
        if len(self._parameters) > MANY:  # temporary tensors of earlier steps
            self._parameters = {k: v for k, v in self._parameters.items() if v[0]() is not None}
        for parameter in parameters_of(optimizer):
            owner = self.of_parameter(parameter)
            if owner is not None:
                state = optimizer.state.get(parameter, {})
                for tensor in (parameter.grad, *state.values()):
                    if isinstance(tensor, torch.Tensor):
                        self.name_tensor(tensor, *owner)

    def _name_model(self, model: Any, frame: FrameType) -> None:
        """Name all modules of `model`. Names in a later model begin with the model's class."""
        self.models += 1
        class_name = type(_unwrapped(model)).__name__
        models = self._models.get({})
        first = not models
        count = models.get(class_name, 0) + 1
        self._models.set({**models, class_name: count})
        label = class_name if count == 1 else f"{class_name}#{count}"
        self._names_in_program.setdefault(label, _name_in_program(model, frame))
        for name, module in model.named_modules():
            short = bare(name) if name and module is not _unwrapped(model) else ""
            path = label
            if short:
                path = short if first else f"{label}:{short}"
            if not self.knows(module):
                self._modules[address(module)] = ref(module), path
            for parameter_name, parameter in module.named_parameters(recurse=False):
                self.name_tensor(parameter, path, parameter_name)


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
    """Return the attribute or variable of the program whose value is `model`, or an empty string.

    Attributes of `self` and globals are searched before locals, because a local may be a parameter
    that can be any model. Locals are searched only from Python 3.13 on. In older Python, reading
    the locals of a function would keep their values alive until the function returns
    (https://peps.python.org/pep-0667).
    """
    callers = [caller for caller in frames(frame) if is_of_program(caller.f_code)]
    has_cheap_locals = sys.version_info >= (3, 13)
    namespaces = chain(
        map(_attributes_of_self, callers),
        (caller.f_globals for caller in callers),
        (caller.f_locals for caller in callers if has_cheap_locals),
    )
    return next(
        (name for values in namespaces for name, value in [*values.items()] if value is model), ""
    )


def _attributes_of_self(frame: FrameType) -> Mapping[str, Any]:
    if frame.f_code.co_varnames[:1] != ("self",):
        return {}
    owner = frame.f_locals.get("self")
    try:
        attributes = getattr(owner, "__dict__", {})
    except Exception:  # noqa: BLE001 - a proxy without a target may raise any error
        return {}
    return attributes if isinstance(attributes, dict) else {}


def _unwrapped(model: Any) -> Any:
    while True:
        inner = [child for name, child in model.named_children() if bare(f"{name}.x") == "x"]
        if len(inner) != 1:
            return model
        model = inner[0]


def call_site_of_op(names: ModuleNames, depth: int) -> tuple[CallSite, bool]:
    """Return the call site of the running op, and whether autograd's engine called the op.

    `depth` is the number of frames from this function up to the frame where the search begins.
    """
    frame: FrameType | None = sys._getframe(depth)  # noqa: SLF001 - documented; `inspect` costs 100 times as much
    code, instruction, frame_types = None, 0, _frame_types
    while frame is not None:
        frame_code = frame.f_code
        frame_type = frame_types.get(address(frame_code), -1)
        if frame_type < 0:
            frame_type = _type_of_frame(frame_code)
        if frame_type == _USER:
            if code is None:
                code, instruction = frame_code, frame.f_lasti
        elif frame_type == _MODULE:
            module = names.of_module(frame.f_locals["self"], frame)
            if code is not None:
                return call_site_at(module, code, instruction), False
            return call_site_at(module, *_user_code(frame)), False
        elif frame_type == _ENGINE:
            return call_site_at("", code, instruction), True
        frame = frame.f_back
    return call_site_at("", code, instruction), False


def _user_code(frame: FrameType | None) -> tuple[CodeType | None, int]:
    frame_types = _frame_types
    while frame is not None:
        frame_code = frame.f_code
        frame_type = frame_types.get(address(frame_code), -1)
        if frame_type == _USER or (frame_type < 0 and _type_of_frame(frame_code) == _USER):
            return frame_code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def call_site_of_program() -> CallSite:
    """Return the call site of the program's innermost frame, with an empty module name."""
    return call_site_at("", *_user_code(sys._getframe(1)))  # noqa: SLF001 - see above


# Private functions of torch, which return the running node of autograd's graph, the number of a
# node, and the number of the next node. If one of them is missing, recording is refused.
_current_node: Callable[[], Any] = torch._C._current_autograd_node  # noqa: SLF001 - see above
_number_of_node = torch._C._FunctionBase._sequence_nr  # noqa: SLF001 - see above
_next_sequence: Callable[[], int] = torch._C._autograd._get_sequence_nr  # noqa: SLF001 - see above
_AccumulateGrad: Any = getattr(torch._C._functions, "AccumulateGrad", None)  # noqa: SLF001 - the node that writes `.grad`


@dataclass(slots=True)
class OptimizerStep:
    """A running step of an optimizer."""

    call: CallSite  # the line that called it
    owner: str = ""  # the module whose parameter it is updating


class RunPosition:
    """The threads that run an optimizer step or a backward pass, or load a batch. Set by hooks."""

    __slots__ = ("_ended", "backward", "loading", "optimizer", "paused_threads")

    def __init__(self) -> None:
        self.optimizer: dict[int, OptimizerStep] = {}  # the threads in an optimizer's step
        self.backward = set[int]()  # the threads that have started a backward pass
        self.loading = set[int]()  # the threads that load a batch
        self.paused_threads: dict[int, int] = {}
        """Threads whose ops are not recorded, each with how often it was paused; `ALL` is every
        thread. The only attribute that each op checks; it is nearly always empty."""
        self._ended = False

    def is_paused(self) -> bool:
        return ALL in self.paused_threads or get_ident() in self.paused_threads

    def pause_thread(self) -> None:
        """Stop recording this thread's ops. Each call must be undone by a `continue_thread`."""
        self.paused_threads[get_ident()] = self.paused_threads.get(get_ident(), 0) + 1

    def continue_thread(self) -> None:
        times = self.paused_threads.pop(get_ident(), 0)
        if times > 1:
            self.paused_threads[get_ident()] = times - 1

    def stop(self) -> None:
        """Stop recording ops. A later `resume_all` has no effect."""
        self._ended = True
        self.pause_all()

    def pause_all(self) -> None:
        """Stop recording the ops of all threads until `resume_all` is called."""
        self.paused_threads[ALL] = 1

    def resume_all(self) -> None:
        """Record ops again. Has no effect after `stop`."""
        if not self._ended:
            self.paused_threads.pop(ALL, None)


ALL = 0
"""The key of all threads in `paused_threads`: no thread has this number."""

DEPTH = 3
"""Frames from `call_site_of_op` up to the mode's `__torch_dispatch__`, through its `_append`.

There may be no frame above: on its own threads, autograd's engine is called from C++.
"""


class OpOriginFinder:
    """Finds the origin of one thread's ops. A backward op gets the module of its forward op."""

    def __init__(self, names: ModuleNames, now: RunPosition) -> None:
        self.names = names
        self.now = now
        self._call_sites: dict[int, CallSite] = {}  # by number of a node of the graph
        self._last_sequence = _next_sequence()
        self._call = NOWHERE  # the line that called the optimizer
        self._call_sites_by_owner: dict[str, CallSite] = {}  # `_call` within each module

    def of(self, facts: OpFacts, args: Any) -> tuple[str, CallSite]:
        """Return the phase and the call site of an op."""
        now = self.now
        node = _current_node()
        if node is not None:
            phase = "backward"
            caller = sys._getframe(DEPTH - 1).f_back  # noqa: SLF001 - see `call_site_of_op`
            if caller is None or _frame_types.get(address(caller.f_code)) == _ENGINE:
                call_site = self._call_site_of_node(node, NOWHERE)
            else:
                call_site, in_engine = call_site_of_op(self.names, DEPTH)
                if in_engine or not call_site.module:
                    call_site = self._call_site_of_node(node, call_site)
        elif now.optimizer and (step := now.optimizer.get(get_ident())) is not None:
            call_site = self._of_optimizer(step, args)
            return ("collective" if facts.collective else "optimizer"), call_site
        else:
            phase = "forward"
            if now.loading and get_ident() in now.loading:
                phase = "data"
            elif now.backward and get_ident() in now.backward:
                phase = "backward"
            call_site, _ = call_site_of_op(self.names, DEPTH)
        sequence = _next_sequence()
        if sequence != self._last_sequence:  # autograd has added nodes to its graph
            for number in range(self._last_sequence, sequence):
                self._call_sites[number] = call_site
            self._last_sequence = sequence
        return ("collective" if facts.collective else phase), call_site

    def _of_optimizer(self, step: OptimizerStep, args: Any) -> CallSite:
        owner = ""  # for a fused op, which updates many parameters
        if args and isinstance(args[0], torch.Tensor):
            for value in args:
                known = self.names.of_parameter(value)
                if known is not None:
                    step.owner = known[0]
                    break
            owner = step.owner  # an op on the optimizer's state belongs to the last parameter
        if step.call is not self._call:
            self._call, self._call_sites_by_owner = step.call, {}
        call_site = self._call_sites_by_owner.get(owner)
        if call_site is None:
            call_site = self._call_sites_by_owner[owner] = step.call.within(owner)
        return call_site

    def name_result_like(self, argument: Any, result: Any) -> None:
        """Give `result` the name of `argument`, because the op only returns its argument."""
        owner = self.names.of_parameter(argument)
        if owner is not None:
            self.names.name_tensor(result, *owner)

    def _call_site_of_node(self, node: Any, call_site: CallSite) -> CallSite:
        if node.__class__ is _AccumulateGrad:
            owner = self.names.of_parameter(node.variable)
            return call_site if owner is None else call_site.within(owner[0])
        forward = self._call_sites.get(node._sequence_nr(), NOWHERE)  # noqa: SLF001 - see above
        return forward if call_site.code is None else call_site.within(forward.module)

    def end_step(self, *, of_this_thread: bool) -> None:
        """Forget the call sites of the ended step.

        If `of_this_thread` is false, forgets them only if there are more than `MANY`.
        """
        if not of_this_thread:
            if len(self._call_sites) > MANY:
                self._call_sites.clear()
            return
        self._call_sites.clear()
        self._last_sequence = _next_sequence()
