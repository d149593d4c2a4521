"""Notes what each region that torch.compile takes returns, and the modules outside of them.

A region is called by the same name whether it is compiled or not: `torch.compile` is wrapped, and
what it returns is watched. Within a region that is not compiled, its modules are noted as well.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from torchrepro.callers import address, program_place
from torchrepro.imports import AfterImport
from torchrepro.patching import wrap
from torchrepro.seeding.call_listeners import on_modules_called
from torchrepro.trace.buffer import statistics
from torchrepro.trace.fingerprint import fingerprint, unobserved
from torchrepro.trace.hooks import watch_training
from torchrepro.trace.op_facts import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrepro.relations.observations import Notes

_INDUCTOR = "torch._inductor.config"
_MOST = 64  # tensors of one value
_lasting = ExitStack()  # as long as the process


def observe(notes: Notes, told: Mapping[str, Any]) -> None:
    """Begin to note; `told` says which child of which region alone is compiled, if any is."""

    def draw_as_eager_does(module: str) -> None:
        sys.modules[module].fallback_random = True  # type: ignore[attr-defined]

    AfterImport([_INDUCTOR], draw_as_eager_does).watch_all()
    regions = _Regions(notes, told.get("only"))
    wrap(_lasting, torch, "compile", regions.watched_compile)
    _lasting.enter_context(on_modules_called(regions.module_returned))
    _lasting.enter_context(watch_training(regions))


class _Regions:
    def __init__(self, notes: Notes, only: tuple[str, str] | None) -> None:
        self._notes = notes
        self._only = only
        self._step = 0
        self._now = threading.local()
        self._names: dict[int, tuple[str, str, bool]] = {}
        """Of modules: what they are called, their line, and whether each is a region."""
        self._kept: list[Any] = []
        self._owners: dict[int, str] = {}
        self._labels: dict[str, int] = {}

    def watched_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - it stands for that
            if model is None:
                return lambda given: compile(given, **options)
            place = program_place(sys._getframe(1))  # noqa: SLF001 - as `callers` does
            bound = getattr(model, "__self__", None)
            if isinstance(model, torch.nn.Module):
                return self._compiled_module(original, model, options, place)
            if isinstance(bound, torch.nn.Module):  # `module.compile()`, which compiles its hooks
                label = self._register(bound, place)
                del self._names[address(bound)]
                if not self._is_split(original, bound, label, options):
                    model = original(model, **options)
                return self._watched(model, label, place)
            if isinstance(getattr(model, "__code__", None), type(compile.__code__)):
                code = model.__code__
                place = f"{code.co_filename}:{code.co_firstlineno}"
            name = getattr(model, "__qualname__", type(model).__name__).replace("<locals>.", "")
            label = self._label(name)
            self._notes.add(region=label, where=place, children={})
            return self._watched(original(model, **options), label, place)

        return compile

    def _compiled_module(
        self, original: Callable[..., Any], model: Any, options: Any, place: str
    ) -> Any:
        label = self._register(model, place)
        if self._is_split(original, model, label, options):
            self._count_depth(model)
            return model
        compiled = original(model, **options)
        if compiled is not model:
            self._kept.append(compiled)
            self._names[address(compiled)] = self._names.pop(address(model))
        self._count_depth(compiled)
        return compiled

    def _is_split(self, original: Callable[..., Any], model: Any, label: str, options: Any) -> bool:
        """Compile one child of a region in its place, if that is what was asked for."""
        if self._only is None or self._only[0] != label:
            return False
        child = model.get_submodule(self._only[1])
        child.forward = original(child.forward, **options)
        return True

    def _label(self, name: str) -> str:
        number = self._labels[name] = self._labels.get(name, 0) + 1
        return name if number == 1 else f"{name}#{number}"

    def _register(self, model: Any, place: str) -> str:
        label = self._label(type(model).__name__)
        paths = {}
        for path, module in model.named_modules():
            self._names[address(module)] = f"{label}.{path}" if path else label, place, not path
            self._kept.append(module)
            paths[path] = [f"{path}.{name}".strip(".") for name, _ in module.named_children()]
        for parameter in model.parameters():
            self._owners[address(parameter)] = label
        self._notes.add(region=label, where=place, children=paths)
        return label

    def _count_depth(self, module: Any) -> None:
        module.register_forward_pre_hook(lambda *_: self._enter(1))
        module.register_forward_hook(lambda *_: self._enter(-1), always_call=True)

    def _enter(self, more: int) -> None:
        if not torch.compiler.is_compiling():
            self._now.depth = getattr(self._now, "depth", 0) + more

    def _watched(self, compiled: Any, label: str, place: str) -> Any:
        @wraps(compiled)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            self._enter(1)
            try:
                result = compiled(*args, **kwargs)
            finally:
                self._enter(-1)
            self._note(label, place, "forward", result)
            return result

        return watched

    def module_returned(self, module: Any, result: Any) -> None:
        """Note what a module returned: of a region, or outside of all, or within one."""
        inner = getattr(module, "_orig_mod", module)
        known = self._names.get(address(module)) or self._names.get(address(inner))
        if known is not None:
            self._note(*known[:2], "forward", result)
        elif not getattr(self._now, "depth", 0):
            place = program_place(sys._getframe(1))  # noqa: SLF001 - as `callers` does
            self._note(type(module).__name__, place, "forward", result)

    def _note(self, unit: str, where: str, phase: str, value: Any) -> None:
        with unobserved():
            outputs = [
                (str(t.dtype).removeprefix("torch."), fingerprint(t).hex(), *statistics(t))
                for t in tensors_in(value)[:_MOST]
            ]
        if outputs:
            self._notes.add(unit=unit, where=where, step=self._step, phase=phase, outputs=outputs)

    # Called by the hooks of the training loop (see `watch_training`).

    def backward_begins(self, losses: Any) -> None:
        place = program_place(sys._getframe(2))  # noqa: SLF001 - as `callers` does
        self._note("loss", place, "forward", losses)

    def backward_ends(self) -> None:
        """The gradients are noted as the optimizer begins."""

    def optimizer_begins(self, optimizer: Any, _closure: Any) -> None:
        self._note_parameters(optimizer, "gradient", "backward", lambda each: each.grad)

    def optimizer_ends(self, optimizer: Any) -> None:
        self._note_parameters(optimizer, "parameter", "optimizer", lambda each: each)
        self._step += 1

    def _note_parameters(
        self, optimizer: Any, what: str, phase: str, of: Callable[[Any], Any]
    ) -> None:
        place = program_place(sys._getframe(3))  # noqa: SLF001 - as `callers` does
        by_owner: dict[str, list[Any]] = {}
        for group in optimizer.param_groups:
            for each in group["params"]:
                if of(each) is not None:
                    by_owner.setdefault(self._owners.get(address(each), ""), []).append(of(each))
        for owner, tensors in by_owner.items():
            self._note(f"{what}s of {owner or 'the program'}", place, phase, tensors)

    def batch_begins(self, iterator: Any) -> None:
        """Batches are compared by the trace."""

    def batch_ends(self, iterator: Any, batch: Any) -> None:
        """Batches are compared by the trace."""
