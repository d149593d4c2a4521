"""What is recorded at each level: every op, the results of modules, or the state after steps."""

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
    parameters_of,
    place_of_user,
)
from torchrepro.trace.op_facts import shape_of, tensors_in, value_text
from torchrepro.trace.op_mode import ModeTakenOff, RecordingMode
from torchrepro.trace.tensor_reads import fingerprint_of, read_each

if TYPE_CHECKING:
    from weakref import ReferenceType

    from torchrepro.trace.buffer import RecordingState
    from torchrepro.trace.digests import Digest
    from torchrepro.trace.store import Store

    Begun = tuple[Sequence[Digest], Sequence[Digest]]
    """Digests of the arguments of an optimizer, and of its gradients."""

Origin = tuple[str, CallSite, str]
"""The phase, the place and the op of records of one kind."""

_NO_ARGUMENTS = ("params", "param_names")  # of the entries of an optimizer's groups
_encode = json.JSONEncoder(default=value_text).encode


def arguments_of(optimizer: Any) -> tuple[str, list[Any]]:
    """Return the arguments of an optimizer as JSON, a list of one mapping for each group.

    Those that are tensors, as a learning rate may be, are returned beside it. What is none of the
    optimizer's defaults is a note of the program's own, as a time is: were it used, an op would
    show it. An optimizer without defaults is given all its arguments in its groups.
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
    return [each[:INPUT] if each.__class__ is bytes else each for each in fingerprints]


class Level:
    """What all levels record: batches as they enter the program, and arguments of optimizers.

    What has no body here is for levels that do something then.
    """

    name: str

    def __init__(self, state: RecordingState) -> None:
        self.state = state

    def begin(self, undo: ExitStack) -> None:
        """Begin to record, until `undo` is closed."""
        hooks.left_out_of_compilation(undo, RecordingMode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the ops of this thread in the block: they are torchrepro's own."""
        yield

    def backward_begins(self) -> None: ...
    def backward_ends(self) -> None: ...
    def batch_begins(self, workers: int) -> None: ...
    def write(self, store: Store, first: int) -> None: ...  # of a step's details, by its first id
    def end_step(self) -> None: ...
    def rest(self) -> None: ...  # between two steps, until `resume`
    def abandon(self) -> None: ...  # for good

    def resume(self) -> bool:
        """Record all again, from the next step on; returns whether it could be done."""
        return True

    def unmatched(self) -> Iterable[str]:
        """Return the patterns of modules to keep that matched no module."""
        return self.state.request.keep

    def optimizer_begins(self, optimizer: Any, place: CallSite, closure: Any) -> Begun:
        """Record the arguments with which an optimizer is about to make a step."""
        arguments = self._take_arguments(optimizer, place)
        gradients = [one.grad for one in parameters_of(optimizer) if one.grad is not None]
        return arguments, self._digests(gradients)

    def optimizer_ends(self, optimizer: Any) -> Sequence[Digest]:
        """Return the digests of the parameters, now that the step is made."""
        return self._digests(parameters_of(optimizer))

    def parameters_now(self, optimizer: Any) -> Sequence[Digest]:
        """Return the digests of an optimizer's parameters, as after a step."""
        if not self.state.wants_step:
            return ()
        with self.paused():
            return _first_parts(read_each(parameters_of(optimizer))[0])

    def _digests(self, tensors: Iterable[Any]) -> Sequence[Digest]:
        if not self.state.wants_step:
            return ()
        with self.paused():
            return [*map(self.state.cache.digest_of_memory, tensors)]

    def _take_arguments(self, optimizer: Any, place: CallSite) -> Sequence[Digest]:
        text, tensors = arguments_of(optimizer)
        argument = self.state.buffer.passing_argument(id(optimizer), text)
        name = type(optimizer).__name__ + OPTIMIZER_STEP
        digests = self._take_tensors(("optimizer", place, name), tensors, argument)
        return xxh3_128_digest(text.encode()), *digests

    def batch_ends(self, batch: Any, place: CallSite) -> None:
        """Record a batch; None if there was none."""
        tensors = tensors_in(batch)
        if tensors:
            self._take_tensors(("data", place, "DataLoader"), tensors)

    def _take_tensors(
        self, origin: Origin, tensors: Sequence[Any], argument: int = 0
    ) -> Sequence[Digest]:
        digests: list[Any] = []
        if tensors:
            with self.paused():
                digests = [*map(fingerprint_of, tensors)]
            for tensor, digest in zip(tensors, digests, strict=True):
                self.state.cache.add(tensor, digest)
        self._take(origin, [*map(shape_of, tensors)], digests, argument)
        return digests

    def _take(self, origin: Origin, shapes: Any, digests: Sequence[Any], argument: int) -> None:
        buffer, site = self.state.buffer, self._site(origin, shapes)
        with self.state.lock:
            if buffer.take(buffer.thread(0), site, argument, (), digests) >= IN_MEMORY:
                self.state.spill()

    def _argument(self, text: str) -> int:
        buffer = self.state.buffer
        return buffer.arguments.get(text) or buffer.new_argument(text, text)

    def _site(self, origin: Origin, shapes: Any) -> int:
        buffer = self.state.buffer
        phase, place, op = origin
        key = (op, phase, place, *shapes)
        return buffer.sites.get(key) or buffer.new_site(key, phase, place, op, shapes)


class StepLevel(Level):
    """Gradients before, and parameters after, each step of an optimizer."""

    name = "step"

    def __init__(self, state: RecordingState) -> None:
        super().__init__(state)
        # By kind of record and by optimizer: what its records have in common, its parameters, and
        # the sites and arguments of them.
        self._known: dict[
            tuple[str, int], tuple[Any, list[ReferenceType[Any]], list[int], list[int]]
        ] = {}
        self._watching = ExitStack()

    def begin(self, undo: ExitStack) -> None:
        self.state.buffer.new_thread()
        hooks.on_threads_started(undo, self.state.buffer.new_thread)
        super().begin(undo)
        undo.enter_context(self._watching)
        self._watch()

    def _watch(self) -> None:
        # The names of parameters are learnt from the first calls of modules, until a step ends.
        names = self.state.names
        self._watching.enter_context(on_modules_called(lambda module, _: names.place_of(module)))

    def end_step(self) -> None:
        if not self.state.buffer.thread(MAIN):  # other threads may come to their models later
            self._watching.close()

    def optimizer_begins(self, optimizer: Any, place: CallSite, closure: Any) -> Begun:
        parameters = parameters_of(optimizer)
        gradients = [grad for one in parameters if (grad := one.grad) is not None]
        if len(gradients) < len(parameters):
            parameters = [one for one in parameters if one.grad is not None]
        origin = "backward", place, "gradient"
        digests = self._take_each(origin, id(optimizer), parameters, gradients)
        return self._take_arguments(optimizer, place), digests

    def optimizer_ends(self, optimizer: Any) -> Sequence[Digest]:
        parameters = parameters_of(optimizer)
        origin = "optimizer", place_of_user(), "parameter"
        return self._take_each(origin, id(optimizer), parameters, parameters)

    def _take_each(
        self, origin: Origin, owner: int, parameters: list[Any], tensors: list[Any]
    ) -> Sequence[Digest]:
        state = self.state
        fingerprints, shapes, size = read_each(tensors)
        phase, place, op = origin
        kind = origin, shapes, state.names.models
        known = self._known.get((op, owner))
        if (
            known is None
            or known[0] != kind
            or not all(map(is_, [reference() for reference in known[1]], parameters))
        ):
            sites, arguments = [], []
            for number, (parameter, shape) in enumerate(zip(parameters, shapes, strict=True)):
                module, name = state.names.of_parameter(parameter) or ("", str(number))
                sites.append(self._site((phase, place.within(module), op), [shape]))
                arguments.append(self._argument(name))
            known = self._known[op, owner] = kind, [*map(ref, parameters)], sites, arguments
        state.cache.bytes_read += size
        if state.buffer.take_each(*known[2:], fingerprints) >= IN_MEMORY:
            state.spill()
        return _first_parts(fingerprints)


class ModuleLevel(StepLevel):
    """What every module returns, and the gradients that come back to it, besides steps."""

    name = "module"

    def _watch(self) -> None:
        self.resume()

    def end_step(self) -> None:
        """Go on watching modules."""

    def rest(self) -> None:
        self._watching.close()

    def resume(self) -> bool:
        self._watching.enter_context(on_modules_called(self._returned))
        return True

    def _returned(self, module: Any, result: Any) -> None:
        place = self.state.names.place_of(module)
        tensors = tensors_in(result)
        if tensors:
            self._take_tensors(("forward", place, "module"), tensors)
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad:
                argument = self._argument(str(position))

                def take(gradient: Any, argument: int = argument) -> None:
                    self._take_tensors(("backward", place, "module"), [gradient], argument)

                tensor.register_hook(take)


class OpLevel(Level):
    """Every op on every thread."""

    name = "op"

    def __init__(self, state: RecordingState) -> None:
        super().__init__(state)
        self.now = RunPosition()
        request = state.request
        wanted = request.statistics or request.keep or request.detail
        self._details = DetailRecorder(state) if wanted else None
        self._by_thread: WeakValueDictionary[int, RecordingMode] = WeakValueDictionary()
        self._taken_off = ModeTakenOff()

    def begin(self, undo: ExitStack) -> None:
        super().begin(undo)
        hooks.compiled_regions_seen(undo)
        hooks.higher_order_ops_run(undo, RecordingMode)
        hooks.hidden_ops_noted(undo, self.state.hidden.add)
        hooks.on_threads_started(undo, self._enter_thread)
        hooks.objects_sent_within(undo, self.paused)
        hooks.values_that_leave_noted(undo, self._leaves)
        undo.callback(self.abandon)
        undo.callback(self._taken_off.end, undo.enter_context(self._new_mode()))

    def _leaves(self, tensor: Any) -> None:
        if self.state.wants_step:
            with self.paused(), self.state.lock:
                self.state.left += int.from_bytes(
                    joined([fingerprint_of(tensor)], OUTPUT), "little"
                )

    def _enter_thread(self) -> None:
        mode: Any = self._new_mode()
        mode.__enter__()  # and never left: a thread's stack of modes ends with the thread

    def _new_mode(self) -> RecordingMode:
        mode = RecordingMode(self.state, self.now, self._details)
        self._by_thread[mode.thread] = mode
        return mode

    def _modes(self) -> list[RecordingMode]:
        # Of threads that have not ended: the stack of a thread holds its own. Others may begin or
        # end meanwhile.
        return [mode for known in self._by_thread.valuerefs() if (mode := known()) is not None]

    @contextmanager
    def paused(self) -> Iterator[None]:
        try:
            self.now.pause()
            yield
        finally:
            self.now.go_on()

    def abandon(self) -> None:
        self.now.stop()

    def backward_begins(self) -> None:
        self._taken_off.before_backward()
        self.now.optimizer.pop(get_ident(), None)  # a step that failed did not say that it ended
        self.now.backward.add(get_ident())

    def backward_ends(self) -> None:
        self.now.backward.discard(get_ident())

    def optimizer_begins(self, optimizer: Any, place: CallSite, closure: Any) -> Begun:
        found = super().optimizer_begins(optimizer, place, closure)
        self.state.names.learn_optimizer(optimizer)
        # A closure computes the loss inside of the step; its ops say themselves where they are.
        if not closure:
            self.now.optimizer[get_ident()] = OptimizerStep(place)
        return found

    def optimizer_ends(self, optimizer: Any) -> Sequence[Digest]:
        self.now.optimizer.pop(get_ident(), None)
        return super().optimizer_ends(optimizer)

    def batch_begins(self, workers: int) -> None:
        if workers:  # timing decides which of them is heard first; the batch does not depend on it
            self.now.pause()
        else:
            self.now.loading.add(get_ident())

    def batch_ends(self, batch: Any, place: CallSite) -> None:
        self.now.loading.discard(get_ident())
        self.now.go_on()
        super().batch_ends(batch, place)

    def unmatched(self) -> Iterable[str]:
        return () if self._details is None else self._details.unmatched()

    def write(self, store: Store, first: int) -> None:
        if self._details is not None:
            self._details.write(store, first)

    def end_step(self) -> None:
        own = self.state.buffer.thread(MAIN)
        for mode in self._modes():
            mode.origin.end_step(of_this_thread=mode.thread == own)

    def rest(self) -> None:
        self.now.rest()
        self.state.cache.distrust()  # ops may change all else while none is seen
        self.state.cache.new.clear()
        self._taken_off.take_off(self._modes())

    def resume(self) -> bool:
        if not self._taken_off.put_back():
            return False
        self.state.cache.resume()
        self.end_step()  # the graphs of steps that were not seen
        self.now.resume()
        return True


LEVELS: Mapping[str, type[Level]] = {"step": StepLevel, "module": ModuleLevel, "op": OpLevel}
