"""Observes the outputs of compiled regions and other modules, for the relation `compile`."""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch

from torchrepro.ground.callers import address, program_line
from torchrepro.ground.imports import AfterImport
from torchrepro.ground.patching import wrap
from torchrepro.seeding.observed_calls import on_modules_called
from torchrepro.trace.buffer import statistics
from torchrepro.trace.fingerprint import fingerprint, unobserved
from torchrepro.trace.hooks import on_worker_started, watch_training
from torchrepro.trace.op_facts import tensors_in
from torchrepro.verification.relations.notes import Notes, numbered

_TENSORS = 64  # the most tensors of one value that are noted
_lasting = ExitStack()  # as long as the process


def set_options(arguments: Mapping[str, Any]) -> None:
    """Set each of the `options` of torch.compile once the module of this option is imported."""
    options = arguments["options"]

    def set_options_of(module: str) -> None:
        for option, value in options.items():
            if option.rpartition(".")[0] == module:
                setattr(sys.modules[module], option.rpartition(".")[2], value)

    AfterImport([option.rpartition(".")[0] for option in options], set_options_of).watch_all()


def note_regions(arguments: Mapping[str, Any]) -> None:
    """Note the outputs of regions. With `only`, compile only one child of one region."""
    notes = Notes(arguments["folder"])
    on_worker_started(_lasting, notes.discard)
    regions = _Regions(notes, arguments.get("only", ("", "")))
    wrap(_lasting, torch, "compile", regions.watched_compile)
    _lasting.enter_context(on_modules_called(regions.module_returned))
    watch_training(_lasting, regions)


class _Regions:
    # `torch.compile` is wrapped, so that a region has the same name with and without compilation.
    # Without compilation, the modules of a region are noted too.

    def __init__(self, notes: Notes, only: tuple[str, str]) -> None:
        self._notes = notes
        self._divided, self._child = only
        self._step = 0
        self._now = threading.local()  # how many regions a thread has entered
        self._names: dict[int, tuple[str, str]] = {}  # address of a module -> its name and line
        self._kept: list[Any] = []  # modules, kept alive so that addresses stay unique
        self._owners: dict[int, str] = {}
        self._labels = Counter[str]()

    def watched_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - it replaces torch.compile
            if model is None:
                return lambda decorated: compile(decorated, **options)
            line = program_line(sys._getframe(1))  # noqa: SLF001 - as `callers` does
            is_bound = not isinstance(model, torch.nn.Module)
            module = getattr(model, "__self__", None) if is_bound else model
            if isinstance(module, torch.nn.Module):
                label = self._register(module, line)
                known = self._names.pop(address(module))
                if label == self._divided:  # only one child of this region is compiled
                    child, compiled = module.get_submodule(self._child), model
                    child.forward = original(child.forward, **options)
                else:
                    compiled = original(model, **options)
                if is_bound:  # from `module.compile()`, which also compiles hooks
                    return self._watched(compiled, label, line)
                self._kept.append(compiled)
                self._names[address(compiled)] = known
                compiled.register_forward_pre_hook(lambda *_: self._enter(1))
                compiled.register_forward_hook(lambda *_: self._enter(-1), always_call=True)
                return compiled
            if isinstance(getattr(model, "__code__", None), type(compile.__code__)):
                code = model.__code__
                line = f"{code.co_filename}:{code.co_firstlineno}"
            name = getattr(model, "__qualname__", type(model).__name__).replace("<locals>.", "")
            label = numbered(name, self._labels)
            self._notes.add(region=label, where=line, children={})
            return self._watched(original(model, **options), label, line)

        return compile

    def _register(self, model: Any, line: str) -> str:
        label = numbered(type(model).__name__, self._labels)
        paths = {}
        for path, module in model.named_modules():
            self._names[address(module)] = f"{label}.{path}".strip("."), line
            self._kept.append(module)
            paths[path] = [f"{path}.{name}".strip(".") for name, _ in module.named_children()]
        for parameter in model.parameters():
            self._owners[address(parameter)] = label
        self._notes.add(region=label, where=line, children=paths)
        return label

    def _enter(self, levels: int) -> None:
        if not torch.compiler.is_compiling():
            self._now.depth = getattr(self._now, "depth", 0) + levels

    def _watched(self, compiled: Any, label: str, line: str) -> Any:
        @wraps(compiled)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            self._enter(1)
            try:
                result = compiled(*args, **kwargs)
            finally:
                self._enter(-1)
            self._note(label, line, "forward", result)
            return result

        return watched

    def module_returned(self, module: Any, result: Any) -> None:
        known = self._names.get(address(module))
        if known is not None:
            self._note(*known, "forward", result)
        elif not getattr(self._now, "depth", 0):
            line = program_line(sys._getframe(1))  # noqa: SLF001 - as `callers` does
            self._note(type(module).__name__, line, "forward", result)

    def _note(self, unit: str, line: str, phase: str, value: Any) -> None:
        with unobserved():
            outputs = [
                (str(t.dtype).removeprefix("torch."), fingerprint(t).hex(), *statistics(t))
                for t in tensors_in(value)[:_TENSORS]
            ]
        if outputs:
            self._notes.add(name=unit, where=line, step=self._step, phase=phase, outputs=outputs)

    def _ignore(self, *_: Any) -> None: ...

    backward_ends = batch_begins = batch_ends = _ignore

    def backward_begins(self, losses: Any) -> None:
        line = program_line(sys._getframe(2))  # noqa: SLF001 - as `callers` does
        self._note("loss", line, "forward", losses)

    def optimizer_begins(self, optimizer: Any, _closure: Any) -> None:
        self._note_by_owner(optimizer, "gradients", "backward")

    def optimizer_ends(self, optimizer: Any) -> None:
        self._note_by_owner(optimizer, "parameters", "optimizer")
        self._step += 1

    def _note_by_owner(self, optimizer: Any, unit: str, phase: str) -> None:
        line = program_line(sys._getframe(3))  # noqa: SLF001 - as `callers` does
        by_owner = defaultdict[str, list[Any]](list)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owner = self._owners.get(address(parameter), "the program")
                by_owner[owner].append(parameter.grad if unit == "gradients" else parameter)
        for owner, tensors in by_owner.items():
            self._note(f"{unit} of {owner}", line, phase, tensors)
