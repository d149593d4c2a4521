"""The levels of recording: every op, the results of modules, or the steps of optimizers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
from xxhash import xxh3_128_digest

from torchrepro.seeding.observed_calls import on_modules_called
from torchrepro.trace import hooks
from torchrepro.trace.buffer import IN_MEMORY, DetailRecorder, joined
from torchrepro.trace.format import INPUT, MAIN, OPTIMIZER_STEP, OUTPUT
from torchrepro.trace.frames import (
    CallSite,
    OptimizerStep,
    RunPosition,
    call_site_of_program,
    parameters_of,
)
from torchrepro.trace.op_facts import shape_of, tensors_in, value_text
from torchrepro.trace.op_mode import EnteredMode, RecordingMode, SuspendedMode
from torchrepro.trace.tensor_reads import fingerprint_of, fingerprints_of, read_each

if TYPE_CHECKING:
    from weakref import ReferenceType

    from torchrepro.trace.buffer import RecordingState
    from torchrepro.trace.device_fingerprint import Digest
    from torchrepro.trace.store import Store

    OptimizerDigests = tuple[Sequence[Digest], Sequence[Digest]]
    """Digests of an optimizer's arguments, and of its gradients."""

Origin = tuple[str, CallSite, str]
"""The phase, the call site and the op of a record."""

_NO_ARGUMENTS = ("params", "param_names")  # keys of a parameter group that are not arguments
_encode = json.JSONEncoder(default=value_text).encode


def arguments_of(optimizer: Any) -> tuple[str, list[Any]]:
    """Return the arguments of an optimizer as JSON, and those arguments that are tensors.

    The JSON has one mapping for each parameter group. A learning rate, for example, may be a
    tensor. Keys without a default in the optimizer are notes of the program, such as a time, and
    are omitted. If an op used such a note, the record of the op would show it. If the optimizer has
    no defaults at all, all keys are arguments.
    """
    names = getattr(optimizer, "defaults", None) or set().union(*optimizer.param_groups)
    names = {*names}.difference(_NO_ARGUMENTS)
    groups = [
        {name: value for name, value in group.items() if name in names}
        for group in optimizer.param_groups
    ]
    values = (value for group in groups for value in group.values())
    return _encode(groups), [value for value in values if isinstance(value, torch.Tensor)]


def _first_parts(fingerprints: Iterable[Any]) -> Sequence[Digest]:
    return [mark[:INPUT] if mark.__class__ is bytes else mark for mark in fingerprints]


class Level:
    """The base class of the levels. Records batches, and the arguments of optimizers.

    The methods without a body are called at events, and some levels override them.
    """

    name: str

    def __init__(self, state: RecordingState) -> None:
        self.state = state

    def begin(self, undo: ExitStack) -> None:
        """Start recording, until `undo` is closed."""
        hooks.exclude_from_compilation(undo, RecordingMode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record the ops that this thread runs in the block."""
        yield

    def backward_begins(self) -> None: ...
    def backward_ends(self) -> None: ...
    def batch_begins(self, workers: int) -> None: ...
    def write(self, store: Store, first: int) -> None: ...  # the details of a step
    def end_step(self) -> None: ...
    def pause(self) -> None: ...  # stop recording between two steps, until `resume`
    def abandon(self) -> None: ...  # stop recording for good

    def resume(self) -> bool:
        """Record again from the next step on. Returns False if that is not possible."""
        return True

    def unmatched(self) -> Iterable[str]:
        """Return the patterns of `keep` that matched no module."""
        return self.state.request.keep

    def optimizer_begins(
        self, optimizer: Any, call_site: CallSite, closure: Any
    ) -> OptimizerDigests:
        """Record an optimizer before its step. Returns digests of arguments and of gradients."""
        arguments = self._record_arguments(optimizer, call_site)
        gradients = [
            parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None
        ]
        return arguments, self._digests(gradients)

    def optimizer_ends(self, optimizer: Any) -> Sequence[Digest]:
        """Return digests of the parameters of an optimizer after its step."""
        return self._digests(parameters_of(optimizer))

    def parameters_now(self, optimizer: Any) -> Sequence[Digest]:
        """Return digests of the parameters of an optimizer before its first step."""
        if not self.state.wants_step:
            return ()
        with self.paused():
            return _first_parts(read_each(parameters_of(optimizer))[0])

    def _digests(self, tensors: Iterable[Any]) -> Sequence[Digest]:
        if not self.state.wants_step:
            return ()
        with self.paused():
            return [*map(self.state.cache.digest_of_memory, tensors)]

    def _record_arguments(self, optimizer: Any, call_site: CallSite) -> Sequence[Digest]:
        text, tensors = arguments_of(optimizer)
        argument = self.state.buffer.latest_argument(id(optimizer), text)
        name = type(optimizer).__name__ + OPTIMIZER_STEP
        digests = self._record_tensors(("optimizer", call_site, name), tensors, argument)
        return xxh3_128_digest(text.encode()), *digests

    def batch_ends(self, batch: Any, call_site: CallSite) -> None:
        """Record a batch. At the end of an epoch, `batch` is None."""
        tensors = tensors_in(batch)
        if tensors:
            self._record_tensors(("data", call_site, "DataLoader"), tensors)

    def _record_tensors(
        self, origin: Origin, tensors: Sequence[Any], argument: int = 0
    ) -> Sequence[Digest]:
        digests: list[Any] = []
        if tensors:
            with self.paused():
                digests = fingerprints_of(tensors)
            for tensor, digest in zip(tensors, digests, strict=True):
                self.state.cache.add(tensor, digest)
        self._record(origin, [*map(shape_of, tensors)], digests, argument)
        return digests

    def _record(self, origin: Origin, shapes: Any, digests: Sequence[Any], argument: int) -> None:
        buffer, site = self.state.buffer, self._site_number(origin, shapes)
        with self.state.lock:
            if buffer.add(buffer.thread(0), site, argument, (), digests) >= IN_MEMORY:
                self.state.spill()

    def _argument_number(self, text: str) -> int:
        buffer = self.state.buffer
        return buffer.arguments.get(text) or buffer.new_argument(text, text)

    def _site_number(self, origin: Origin, shapes: Any) -> int:
        buffer = self.state.buffer
        phase, call_site, op = origin
        key = (op, phase, call_site, *shapes)
        return buffer.sites.get(key) or buffer.new_site(key, phase, call_site, op, shapes)


class StepLevel(Level):
    """Records gradients before each step of an optimizer, and parameters after the step."""

    name = "step"

    def __init__(self, state: RecordingState) -> None:
        super().__init__(state)
        # By op and id of the optimizer: the signature that the records share, the parameters, and
        # for each parameter the number of the site and the number of the argument.
        self._groups: dict[
            tuple[str, int], tuple[Any, list[ReferenceType[Any]], list[int], list[int]]
        ] = {}
        self._watching = ExitStack()

    def begin(self, undo: ExitStack) -> None:
        self.state.buffer.new_thread()
        hooks.on_threads_started(undo, self.state.buffer.new_thread)
        super().begin(undo)
        undo.enter_context(self._watching)
        self._start_watching()

    def _start_watching(self) -> None:
        # Parameters are named when their modules are first called, in the first step.
        names = self.state.names
        name_module = on_modules_called(lambda module, _: names.call_site_of(module))
        self._watching.enter_context(name_module)

    def end_step(self) -> None:
        if not self.state.buffer.thread(MAIN):  # other threads may call their models later
            self._watching.close()

    def optimizer_begins(
        self, optimizer: Any, call_site: CallSite, closure: Any
    ) -> OptimizerDigests:
        parameters = parameters_of(optimizer)
        gradients = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if len(gradients) < len(parameters):
            parameters = [parameter for parameter in parameters if parameter.grad is not None]
        origin = "backward", call_site, "gradient"
        digests = self._record_each(origin, id(optimizer), parameters, gradients)
        return self._record_arguments(optimizer, call_site), digests

    def optimizer_ends(self, optimizer: Any) -> Sequence[Digest]:
        parameters = parameters_of(optimizer)
        origin = "optimizer", call_site_of_program(), "parameter"
        return self._record_each(origin, id(optimizer), parameters, parameters)

    def _record_each(
        self, origin: Origin, owner: int, parameters: list[Any], tensors: list[Any]
    ) -> Sequence[Digest]:
        state = self.state
        fingerprints, shapes, size = read_each(tensors)
        phase, call_site, op = origin
        signature = origin, shapes, state.names.models
        cached = self._groups.get((op, owner))
        if (
            cached is None
            or cached[0] != signature
            or not all(map(is_, [reference() for reference in cached[1]], parameters))
        ):
            sites, arguments = [], []
            for index, (parameter, shape) in enumerate(zip(parameters, shapes, strict=True)):
                module, name = state.names.of_parameter(parameter) or ("", str(index))
                sites.append(self._site_number((phase, call_site.within(module), op), [shape]))
                arguments.append(self._argument_number(name))
            cached = self._groups[op, owner] = signature, [*map(ref, parameters)], sites, arguments
        state.cache.bytes_read += size
        if state.buffer.add_outputs(*cached[2:], fingerprints) >= IN_MEMORY:
            state.spill()
        return _first_parts(fingerprints)


class ModuleLevel(StepLevel):
    """A `StepLevel` that also records the tensors that modules return, and their gradients."""

    name = "module"

    def _start_watching(self) -> None:
        self.resume()

    def end_step(self) -> None:
        """Keep watching modules. `StepLevel` stops after the first step."""

    def pause(self) -> None:
        self._watching.close()

    def resume(self) -> bool:
        self._watching.enter_context(on_modules_called(self._module_returned))
        return True

    def _module_returned(self, module: Any, result: Any) -> None:
        call_site = self.state.names.call_site_of(module)
        tensors = tensors_in(result)
        if tensors:
            self._record_tensors(("forward", call_site, "module"), tensors)
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad:
                argument = self._argument_number(str(position))

                def take(gradient: Any, argument: int = argument) -> None:
                    self._record_tensors(("backward", call_site, "module"), [gradient], argument)

                tensor.register_hook(take)


class OpLevel(Level):
    """Records every op on every thread."""

    name = "op"

    def __init__(self, state: RecordingState) -> None:
        super().__init__(state)
        self.now = RunPosition()
        request = state.request
        wanted = request.statistics or request.keep or request.detail
        self._details = DetailRecorder(state) if wanted else None
        self._by_thread: WeakValueDictionary[int, RecordingMode] = WeakValueDictionary()
        self._suspended = SuspendedMode()
        self._waiting = state.cache.waiting

    def begin(self, undo: ExitStack) -> None:
        super().begin(undo)
        hooks.record_compiled_regions(undo)
        hooks.allow_higher_order_ops(undo, RecordingMode)
        hooks.note_hidden_ops(undo, self._waiting.launch, self.state.hidden.add)
        hooks.before_unrecorded_writes(undo, self._waiting.launch)
        hooks.before_memory_is_shared(undo, self._waiting.stop)
        hooks.on_threads_started(undo, self._enter_thread)
        hooks.wrap_object_collectives(undo, self.paused)
        hooks.note_values_that_leave(undo, self._note_value_that_leaves)
        undo.callback(self.abandon)
        undo.callback(self._suspended.end, undo.enter_context(self._new_mode()))

    def _note_value_that_leaves(self, tensor: Any) -> None:
        if self.state.wants_step:
            with self.paused(), self.state.lock:
                self.state.left_torch += int.from_bytes(
                    joined([fingerprint_of(tensor)], OUTPUT), "little"
                )

    def _enter_thread(self) -> None:
        EnteredMode(self._new_mode())  # a thread's stack of modes ends with the thread

    def _new_mode(self) -> RecordingMode:
        mode = RecordingMode(self.state, self.now, self._details)
        self._by_thread[mode.thread] = mode
        return mode

    def _modes(self) -> list[RecordingMode]:
        # The stack of a thread keeps a mode alive until the thread ends. Threads may start or end
        # during this loop.
        references = self._by_thread.valuerefs()
        return [mode for reference in references if (mode := reference()) is not None]

    @contextmanager
    def paused(self) -> Iterator[None]:
        try:
            self.now.pause_thread()
            yield
        finally:
            self.now.continue_thread()

    def abandon(self) -> None:
        self.now.stop()

    def backward_begins(self) -> None:
        self._waiting.launch()
        self._suspended.before_backward()
        self.now.optimizer.pop(get_ident(), None)  # still there if the step raised
        self.now.backward.add(get_ident())

    def backward_ends(self) -> None:
        self._waiting.launch()
        self.now.backward.discard(get_ident())

    def optimizer_begins(
        self, optimizer: Any, call_site: CallSite, closure: Any
    ) -> OptimizerDigests:
        digests = super().optimizer_begins(optimizer, call_site, closure)
        self._waiting.launch()
        self.state.names.name_optimizer_tensors(optimizer)
        # A closure computes the loss within the step. The ops of a closure keep their call sites.
        if not closure:
            self.now.optimizer[get_ident()] = OptimizerStep(call_site)
        return digests

    def optimizer_ends(self, optimizer: Any) -> Sequence[Digest]:
        self.now.optimizer.pop(get_ident(), None)
        return super().optimizer_ends(optimizer)

    def batch_begins(self, workers: int) -> None:
        self._waiting.launch()
        if workers:  # their messages come in any order, but the batch is the same
            self.now.pause_thread()
        else:
            self.now.loading.add(get_ident())

    def batch_ends(self, batch: Any, call_site: CallSite) -> None:
        self.now.loading.discard(get_ident())
        self.now.continue_thread()
        super().batch_ends(batch, call_site)

    def unmatched(self) -> Iterable[str]:
        return () if self._details is None else self._details.unmatched()

    def write(self, store: Store, first: int) -> None:
        if self._details is not None:
            self._details.write(store, first)

    def end_step(self) -> None:
        thread = self.state.buffer.thread(MAIN)
        for mode in self._modes():
            mode.origin.end_step(of_this_thread=mode.thread == thread)

    def pause(self) -> None:
        self.now.pause_all()
        self.state.cache.distrust()  # unrecorded ops may write any memory
        self.state.cache.new.clear()
        self._suspended.suspend(self._modes())

    def resume(self) -> bool:
        if not self._suspended.restore():
            return False
        self.state.cache.resume()
        self.end_step()  # forget the graphs of unrecorded steps
        self.now.resume_all()
        return True


LEVELS: Mapping[str, type[Level]] = {"step": StepLevel, "module": ModuleLevel, "op": OpLevel}
