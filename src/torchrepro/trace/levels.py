"""What is recorded at each level: every op, what modules return, or what steps come to."""

from __future__ import annotations

import ctypes
import marshal
import os
import random
import sys
import threading
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from torchrepro.seeding import generators
from torchrepro.trace.fingerprint import fingerprint
from torchrepro.trace.fingerprint_cache import fingerprint_of, size_of
from torchrepro.trace.frames import Place, RunPosition, place_of_user
from torchrepro.trace.hooks import on_modules_called, on_threads_started
from torchrepro.trace.mode import (
    RecordingMode,
    compiled_regions_seen,
    higher_order_ops_run,
    left_out_of_compilation,
)
from torchrepro.trace.op_facts import shape_of, tensors_in
from torchrepro.trace.reader import INPUT
from torchrepro.trace.statistics import DetailRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torchrepro.trace.buffer import RecordingState
    from torchrepro.trace.store import Store


def random_states() -> Mapping[str, str]:
    """Return a fingerprint of the state of every global generator; draws nothing."""
    found = {"python": xxhash.xxh3_128_hexdigest(marshal.dumps(random.getstate(), 2))}
    if "numpy.random" in sys.modules:
        found["numpy"] = _of_numpy(sys.modules["numpy.random"])
    found["torch"] = fingerprint(torch.get_rng_state()).hex()
    for name, module in generators.devices_in_use().items():
        for index in range(module.device_count()):
            found[f"{name}:{index}"] = fingerprint(module.get_rng_state(index)).hex()
    return found


_numpy_seen: dict[bytes, str] = {}  # the last state, as it lies in memory


def _of_numpy(numpy: Any) -> str:
    """Return a fingerprint of numpy's global generator, which takes long to say its state.

    As long as its memory is what it was, so is the state; only whether half a pair of normal
    numbers is left lies elsewhere, and is seen again with the next number drawn.
    """
    memory = _memory_of_numpy(numpy)
    if memory not in _numpy_seen:
        state = numpy.get_state(legacy=False)
        own = state["state"]
        digest = xxhash.xxh3_128(own["key"] if "key" in own else repr(own).encode())
        rest = (own.get("pos"), state.get("has_gauss"), state.get("gauss"))
        digest.update(repr(rest).encode())
        _numpy_seen.clear()
        _numpy_seen[memory] = digest.hexdigest()
    return _numpy_seen[memory]


def _memory_of_numpy(numpy: Any) -> bytes:
    """Return the state of numpy's global generator as bytes; never the same twice if unknown.

    A Mersenne twister is 624 words and a position:
    https://numpy.org/doc/stable/reference/random/bit_generators/mt19937.html
    """
    generator: Any = numpy.get_bit_generator() if hasattr(numpy, "get_bit_generator") else None
    if type(generator).__name__ != "MT19937":
        return os.urandom(16)
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


def parameters_of(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(parameters: Iterable[Any]) -> Iterator[Any]:
    """Yield the gradients that there are."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad


_PINNING = "_pin_memory_loop"  # what torch's loader runs on a thread of its own


class Level:
    """What all levels record: batches of data as they enter the program."""

    def __init__(self, state: RecordingState) -> None:
        self.state = state
        self.open = ExitStack()

    def __enter__(self) -> None:
        self.open.enter_context(left_out_of_compilation())

    def __exit__(self, *error: object) -> None:
        self.open.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the ops of this thread in the block: they are torchrepro's own."""
        yield

    def abandon(self) -> None:
        """Take no more records in this process."""

    def backward_begins(self) -> None:
        """Take note that a backward pass begins."""

    def backward_ends(self) -> None:
        """Take note that it has ended."""

    def optimizer_begins(self, optimizer: Any, place: Place, *, with_closure: bool) -> None:
        """Take note that an optimizer is about to make a step."""

    def optimizer_ends(self, optimizer: Any) -> None:
        """Take note that it has made the step."""

    def batch_begins(self, workers: int) -> None:
        """Take note that a loader with so many worker processes is about to hand over a batch."""

    def batch_ends(self, batch: Any, place: Place) -> None:
        """Record a batch; None if there was none."""
        tensors = tensors_in(batch)
        if tensors:
            self.take("data", place, "DataLoader", tensors)

    def write(self, store: Store, first: int) -> None:
        """Write what belongs to the records of a step, the first of which has this id."""

    def unmet(self) -> Iterable[str]:
        """Return the patterns of modules to keep that none fitted."""
        return self.state.request.keep

    def end_step(self) -> None:
        """Forget the step that has ended."""

    def take(
        self, phase: str, place: Place, op: str, tensors: Sequence[Any], text: str = ""
    ) -> None:
        """Take a record of tensors that no single op stands for."""
        buffer, cache = self.state.buffer, self.state.cache
        with self.paused():
            digests = [fingerprint_of(tensor) for tensor in tensors]
        for tensor, digest in zip(tensors, digests, strict=True):
            cache.read(tensor, digest[:INPUT] if digest.__class__ is bytes else digest)
            cache.bytes_read += size_of(tensor)
        shapes = [shape_of(tensor) for tensor in tensors]
        key = (op, phase, place, *shapes)
        site = buffer.sites.get(key) or buffer.new_site(key, phase, place, op, shapes)
        argument = buffer.arguments.get(text) or buffer.new_argument(text, text)
        buffer.take(0, site, argument, (), digests)


class StepLevel(Level):
    """Gradients before, and parameters after, each step of an optimizer."""

    def __enter__(self) -> None:
        super().__enter__()
        self._look_at_modules()

    def _look_at_modules(self) -> None:
        """Learn the names of parameters from the first calls of modules, until a step ends."""
        self._naming = ExitStack()
        self._naming.enter_context(on_modules_called(self._learn_names))
        self.open.callback(self._naming.close)

    def _learn_names(self, module: Any, _returned: Any) -> None:
        self.state.names.place_of(module)

    def end_step(self) -> None:
        self._naming.close()

    def optimizer_begins(self, optimizer: Any, place: Place, *, with_closure: bool) -> None:
        gradients = [(one, one.grad) for one in parameters_of(optimizer) if one.grad is not None]
        self._take_each("backward", "gradient", place, gradients)

    def optimizer_ends(self, optimizer: Any) -> None:
        parameters = [(one, one) for one in parameters_of(optimizer)]
        self._take_each("optimizer", "parameter", place_of_user(), parameters)

    def _take_each(
        self, phase: str, op: str, place: Place, tensors: Sequence[tuple[Any, Any]]
    ) -> None:
        for number, (parameter, tensor) in enumerate(tensors):
            module, name = self.state.names.of_parameter(parameter) or ("", str(number))
            self.take(phase, place.within(module), op, [tensor], name)


class ModuleLevel(StepLevel):
    """What every module returns, and the gradients that come back to it, besides steps."""

    def _look_at_modules(self) -> None:
        self.open.enter_context(on_modules_called(self._returned))

    def end_step(self) -> None:
        """Go on looking at modules."""

    def _returned(self, module: Any, result: Any) -> None:
        place = self.state.names.place_of(module)
        tensors = tensors_in(result)
        if tensors:
            self.take("forward", place, "module", tensors)
        for position, tensor in enumerate(tensors):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_taker(place, str(position)))

    def _gradient_taker(self, place: Place, position: str) -> Callable[[Any], None]:
        def take(gradient: Any) -> None:
            self.take("backward", place, "module", [gradient], position)

        return take


class OpLevel(Level):
    """Every op on every thread."""

    def __init__(self, state: RecordingState) -> None:
        super().__init__(state)
        self.now = RunPosition()
        self._details = DetailRecorder.of(state)
        self._modes: list[RecordingMode] = []

    def __enter__(self) -> None:
        super().__enter__()
        self.open.enter_context(compiled_regions_seen())
        self.open.enter_context(higher_order_ops_run())
        self.open.enter_context(on_threads_started(self._enter_thread))
        self.open.callback(self.abandon)
        self.open.enter_context(self._new_mode())

    def _enter_thread(self) -> None:
        if _PINNING in threading.current_thread().name:
            return  # it moves batches, whenever they come; they are recorded where they are used
        mode: Any = self._new_mode()
        mode.__enter__()  # and never left: a thread's stack of modes ends with the thread

    def _new_mode(self) -> RecordingMode:
        mode = RecordingMode(self.state, self.now, self._details)
        self._modes.append(mode)
        return mode

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = self.now.pause(get_ident())
        try:
            yield
        finally:
            self.now.pause(before)

    def abandon(self) -> None:
        self.now.stop()

    def backward_begins(self) -> None:
        self.now.optimizer = None  # a step that has failed did not say that it ended
        self.now.backward = get_ident()

    def backward_ends(self) -> None:
        self.now.backward = 0

    def optimizer_begins(self, optimizer: Any, place: Place, *, with_closure: bool) -> None:
        self.state.names.learn_optimizer(optimizer)
        self.now.owner = ""
        # A closure computes the loss inside of the step; its ops say themselves where they are.
        self.now.optimizer = None if with_closure else (get_ident(), place)

    def optimizer_ends(self, optimizer: Any) -> None:
        self.now.optimizer = None

    def batch_begins(self, workers: int) -> None:
        if workers:  # which of them is heard first is a matter of time; the batch is not
            self.now.pause(get_ident())
        else:
            self.now.loading = get_ident()

    def batch_ends(self, batch: Any, place: Place) -> None:
        self.now.loading = 0
        self.now.pause(0)
        super().batch_ends(batch, place)

    def unmet(self) -> Iterable[str]:
        return () if self._details is None else self._details.unmet()

    def write(self, store: Store, first: int) -> None:
        if self._details is not None:
            self._details.write(store, first)

    def end_step(self) -> None:
        for mode in self._modes:
            mode.origin.end_step()


LEVELS: Mapping[str, type[Level]] = {"step": StepLevel, "module": ModuleLevel, "op": OpLevel}
