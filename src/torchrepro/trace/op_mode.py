"""The `TorchDispatchMode` that records every op of a thread."""

from __future__ import annotations

import threading
from asyncio import _get_running_loop as running_loop
from collections.abc import Collection, Hashable
from contextlib import nullcontext
from functools import partial
from marshal import dumps
from operator import is_
from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from xxhash import xxh3_64_digest, xxh3_128_digest

from torchrepro.ground.callers import address, frames
from torchrepro.trace.buffer import IN_MEMORY, UninitializedReads
from torchrepro.trace.digests import PLACEHOLDERS, is_uninitialized
from torchrepro.trace.fingerprint import arrays, unobserved, widths
from torchrepro.trace.fingerprint_cache import (
    NO_ENTRY,
    VIEW,
    WRITTEN,
    contains_nan,
    fingerprinted_tensors,
)
from torchrepro.trace.format import INPUT, NEW_TENSOR
from torchrepro.trace.frames import OpOriginFinder, source_of
from torchrepro.trace.op_facts import (
    PLAIN,
    OpFacts,
    call_text,
    facts_of,
    shape_of,
    tensors_in,
    value_text,
    version_of,
)

if TYPE_CHECKING:
    from torchrepro.trace.buffer import DetailRecorder, RecordingState
    from torchrepro.trace.frames import CallSite, RunPosition

FEW = 8
"""The most arguments that a template caches, and reads at one call site checked for NaN."""

MANY = 1000
"""The most lines whose generator's seed is noted."""

_LOADER_MODULES = "torch.utils.data"
_FAKE_TENSORS = (
    "torch._subclasses"  # fake tensors of a compiler or an exporter, which have no values
)
_NUMBER_TYPES = frozenset({bool, int, float, complex})
_VALUE_TYPES = _NUMBER_TYPES | {str, bytes}
"""The types of results that are not tensors but recorded, by value."""
_DEFAULT_DISPATCH = torch.Tensor.__torch_dispatch__  # of lazy parameters, which have no shape yet
_facts: dict[int, OpFacts] = {}  # by id, because hashing an op is slow

# Torch has no public way to remove a mode from the middle of its thread's stack. These private
# functions read and change the stack, and report whether a backward pass runs. If one is missing,
# paused modes stay on the stack and record nothing.
_read_stack: Any = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
_push_mode: Any = getattr(_python_dispatch, "_push_mode", None)
_pop_mode: Any = getattr(_python_dispatch, "_pop_mode", None)
_backward_pass: Any = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001 - see above
_STACK_IS_KNOWN = None not in (_read_stack, _push_mode, _pop_mode, _backward_pass)
_NO_PASS = -1


class RecordTemplate:
    """The fields that records with the same op, phase, call site and shapes share.

    Steps repeat, so the next record nearly always has one of the last two templates that followed
    this template. Comparing the record with these two is faster than a lookup in a dictionary.
    """

    __slots__ = (
        "arguments",
        "before",
        "call_site",
        "facts",
        "following",
        "phase",
        "shapes",
        "site",
    )

    def __init__(
        self,
        facts: OpFacts | None = None,
        phase: str = "",
        call_site: CallSite | None = None,
        shapes: Any = (),
        site: int = 0,
    ) -> None:
        self.facts = facts
        self.phase = phase
        self.call_site = call_site
        self.shapes = shapes
        self.site = site
        self.arguments: dict[bytes, int] = {b"": 0}  # numbers of recent plain arguments, by key
        self.following = self  # the template that followed last; at first, this template
        self.before = self  # the template that followed before `following` did


class RecordingMode(TorchDispatchMode):
    """Records every op that torch dispatches on one thread.

    Ops of backward passes are recorded too, because autograd runs a backward pass under the modes
    of the thread that started it. The program runs as without the mode. A compiled region stays
    compiled and is recorded as one op. Subclasses of Tensor dispatch before the mode.
    """

    supports_higher_order_operators = True

    def __init__(
        self, state: RecordingState, now: RunPosition, details: DetailRecorder | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = now
        self.details = details
        self.state = state
        # Only details need a lock, because threads share them. Without details no lock is used: a
        # thread that waited until a step ends would record its op in the next step.
        self.lock = nullcontext() if details is None else state.lock
        self.rereads_inputs = state.request.detail  # also inputs with a digest in the cache
        self.buffer = state.buffer
        self.cache = state.cache
        self.entries = state.cache.entries
        self.waiting_storages = state.cache.waiting.storages
        self.spill = state.spill
        self.origin = OpOriginFinder(state.names, now)
        self.thread = state.buffer.new_thread()
        self.uninitialized_reads = state.uninitialized_reads
        self._templates: dict[Hashable, RecordTemplate] = {}
        self._last = RecordTemplate()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True in older torch, which lacks `ignore_compile_internals`.

        Under a mode that is not an infra mode, the older compiler falls back to eager code.
        """
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If True, torch would import its compiler at the first op, which takes two seconds. If the
        # compiler is loaded, `exclude_from_compilation` keeps it from compiling this method.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now = self.now
        if now.paused_threads and now.is_paused():
            self.cache.waiting.launch()  # the op may write what waits
            return func(*args, **(kwargs or {}))
        if types and not PLAIN.issuperset(types):
            if any(
                tensor_type.__module__.startswith(_FAKE_TENSORS)
                or tensor_type.__torch_dispatch__ is _DEFAULT_DISPATCH
                for tensor_type in types
            ):
                return func(*args, **(kwargs or {}))
            return NotImplemented
        facts = _facts.get(address(func))
        if facts is None:
            facts = _facts[address(func)] = facts_of(func)
        if facts.transparent:
            return self._run_transparent(facts, args, kwargs)
        # This is inlined on purpose: an op takes microseconds, so each function call would make
        # recording one percent slower.
        cache, entries, details = self.cache, self.entries, self.details
        if details is not None and self.rereads_inputs:
            cache.distrust()
        inputs: list[Any] = []
        plain: list[Any] = []
        arguments = args[1:] if facts.overwrites else args
        for value in arguments:
            value_type = value.__class__
            if value_type in PLAIN:
                entry = entries.get(address(value), NO_ENTRY)
                try:
                    valid = entry[1] == value._version and entry[0]() is value  # noqa: SLF001 - see `version_of`
                except RuntimeError:  # an inference tensor has no version
                    valid = cache.valid(value) is not None
                if not valid:
                    inputs.append(cache.missing_input(facts, value))
                else:
                    inputs.append(entry[2])
                    if entry[2].__class__ is not bytes:
                        cache.note_unfinished_input(entry[2], value)
            elif value_type is list or value_type is tuple:
                cache.add_list(value, inputs, plain)
            else:
                plain.append(value)
        if kwargs:
            cache.add_named(facts, kwargs, inputs, plain)
        before = None if details is None else self._kept_inputs(details, facts, args, kwargs)
        if self.waiting_storages and facts.may_write:
            cache.waiting.before(facts, args, kwargs)
        # Find the written inputs now: a compiled region empties the list, and has no schema.
        written = _written_by_region(args) if facts.compiled else None
        returned = result = func(*args, **kwargs) if kwargs else func(*args)
        if written is not None:
            entries.clear()  # the region may have written any memory
            result = returned, written
        key = _key_of(plain) if plain else b""

        outputs: Any = None
        if result.__class__ in PLAIN:
            if facts.single:
                dtype = result.dtype
                try:
                    start = result.is_cpu and result.is_contiguous() and result.data_ptr()
                    # Autograd counts the write only after this mode returns.
                    version = result._version + facts.single_written  # noqa: SLF001 - see `version_of`
                    shapes: Any = ((result.shape, dtype),)
                except RuntimeError:  # nested, sparse, without memory or without a version
                    start = 0
                if (
                    start
                    and dtype in widths
                    and not (facts.keeps and inputs and is_uninitialized(inputs[0]))
                ):
                    size = result.nbytes
                    outputs = xxh3_128_digest(arrays[size].from_address(start))
                    entries[address(result)] = ref(result), version, outputs[:INPUT], WRITTEN
                    cache.bytes_read += size
                    if facts.writes:
                        cache.update_base_of(result)
            elif facts.view_of_first and inputs and inputs[0].__class__ is bytes:
                base = inputs[0]
                if base[:4] not in PLACEHOLDERS:
                    # Autograd gives the view the version of its base after this mode returns.
                    version = version_of(args[0])
                    digest = xxh3_64_digest(base + key)
                    entries[address(result)] = ref(result), version, digest, VIEW
                    outputs, shapes = b"", (shape_of(result),)
        if outputs is None:
            outputs, shapes = self._outputs(facts, key, args, kwargs, inputs, result)
        if plain and any(map(_is_none, plain)):
            key += call_text(args, kwargs).encode()  # the key does not show which argument was None
        if cache.uninitialized_inputs:
            self._note_uninitialized_reads(facts, args, returned)
        if details is None:
            self._append(facts, key, args, kwargs, inputs, outputs, shapes)
            return returned
        with self.lock:
            self._append(facts, key, args, kwargs, inputs, outputs, shapes)
            details.after(before, _recorded_tensors(facts, args, kwargs, result))
        return returned

    def _run_transparent(self, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        result = facts.op(*args, **kwargs) if kwargs else facts.op(*args)
        if not args:
            return result
        argument, cache = args[0], self.cache
        if facts.fresh:
            self._record_at_first_read(result, *self.origin.of(facts, args))
        elif cache.new:
            cache.pass_on(argument, result)
        entry = cache.entries.get(address(argument))
        if entry is not None and entry[0]() is argument and isinstance(result, torch.Tensor):
            _, version, digest, source = entry
            cache.entries[address(result)] = ref(result), version, digest, source
            if get_ident() in self.now.optimizer:
                self.origin.name_result_like(argument, result)
        return result

    def _record_at_first_read(self, tensor: Any, phase: str, call_site: CallSite) -> None:
        def take(tensor: Any, fingerprint: Any) -> None:
            shape, buffer = shape_of(tensor), self.buffer
            key = NEW_TENSOR, phase, call_site, shape
            site = buffer.sites.get(key) or buffer.new_site(
                key, phase, call_site, NEW_TENSOR, (shape,)
            )
            with self.lock:
                buffer.add(buffer.thread(self.thread), site, 0, (), (fingerprint,))
                if self.details is not None:
                    self.details.new_tensor(call_site, tensor)

        self.cache.expect(tensor, take)

    def _kept_inputs(self, details: DetailRecorder, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        read = args[1:] if facts.overwrites else args
        return details.before(self.origin.of(facts, args)[1], read, kwargs)

    def _outputs(
        self, facts: OpFacts, key: bytes, args: Any, kwargs: Any, inputs: list[Any], result: Any
    ) -> tuple[Any, Any]:
        if facts.view:
            return b"", self.cache.views(args, key, inputs, result)
        if facts.keeps and inputs and is_uninitialized(inputs[0]):
            return self.cache.output_partly_uninitialized(facts, key, inputs, result)
        fingerprints, shapes = self.cache.outputs(facts, args, kwargs, result)
        if result.__class__ in _VALUE_TYPES:
            value: Any = result
            fingerprints.append(xxh3_128_digest(dumps(value, 2)))
            shapes.append(((), value.__class__.__name__))
        if facts.allocates:
            self.cache.allocated(result, self.origin.of(facts, args)[1])
        return fingerprints, shapes

    def _note_uninitialized_reads(self, facts: OpFacts, args: Any, result: Any) -> None:
        """Note reads of uninitialized memory by an op, and whether such a read made a result NaN.

        Views, copies and allocations are not reads, because they compute nothing from the values.
        """
        inputs, self.cache.uninitialized_inputs = self.cache.uninitialized_inputs, []
        if facts.view or facts.keeps or facts.allocates:
            return
        call_site = self.origin.of(facts, args)[1]
        uninitialized = {id(tensor) for _, tensor in inputs}
        for digest, tensor in inputs:
            if digest.allocated_at is None or any(
                args[at] is tensor for at in facts.scratch_arguments
            ):
                continue
            read = self.uninitialized_reads.setdefault(
                (digest.allocated_at, call_site, facts.name), UninitializedReads()
            )
            if read.count < FEW and not (read.is_nan or digest.may_be_nan):
                initialized = (
                    tensor for tensor in tensors_in(args) if id(tensor) not in uninitialized
                )
                read.is_nan = contains_nan(result) and not any(map(contains_nan, initialized))
            read.count += 1

    def _append(
        self,
        facts: OpFacts,
        key: bytes,
        args: Any,
        kwargs: Any,
        inputs: Any,
        outputs: Any,
        shapes: Any,
    ) -> None:
        """Append a record. Tries two likely templates before a lookup (see `RecordTemplate`)."""
        phase, call_site = self.origin.of(facts, args)
        template = self._last.following
        if (
            template.facts is not facts
            or template.call_site is not call_site
            or template.phase is not phase
            or template.shapes != shapes
        ):
            last = self._last
            template = last.before
            if (
                template.facts is not facts
                or template.call_site is not call_site
                or template.phase is not phase
                or template.shapes != shapes
            ):
                template = self._template_of(facts, phase, call_site, shapes)
            last.following, last.before = template, last.following
        self._last = template
        argument = template.arguments.get(key)
        if argument is None:
            argument = self._number_of_argument(template, facts, key, args, kwargs)
        thread = self.thread if running_loop() is None else self.buffer.task(self.thread)
        if self.buffer.add(thread, template.site, argument, inputs, outputs) >= IN_MEMORY:
            self.spill()

    def _template_of(
        self, facts: OpFacts, phase: str, call_site: CallSite, shapes: Any
    ) -> RecordTemplate:
        key = (facts, phase, call_site, *shapes)
        template = self._templates.get(key)
        if template is None:
            site = self.buffer.sites.get(key) or self.buffer.new_site(
                key, phase, call_site, facts.name, shapes
            )
            template = RecordTemplate(facts, phase, call_site, shapes, site)
            self._templates[key] = template
        return template

    def _number_of_argument(
        self, template: RecordTemplate, facts: OpFacts, key: bytes, args: Any, kwargs: Any
    ) -> int:
        number = self.buffer.arguments.get((facts, key))
        if number is None:
            number = self.buffer.new_argument((facts, key), call_text(args, kwargs))
        values = (*args, *(kwargs or {}).values())
        generator = next((value for value in values if isinstance(value, torch.Generator)), None)
        if generator is not None and template.call_site is not None:
            self._note_seed(source_of(template.call_site), generator)
        if len(template.arguments) >= FEW:  # arguments that differ in every step would fill it
            template.arguments = {b"": 0}
        template.arguments[key] = number
        return number

    def _note_seed(self, source: str, generator: Any) -> None:
        # Ignores the generators of loaders: these are seeded from the global generator.
        modules = (str(frame.f_globals.get("__name__")) for frame in frames())
        if len(self.state.seeds) < MANY and not any(_LOADER_MODULES in name for name in modules):
            first = *self.state.position(), str(generator.initial_seed())
            self.state.seeds.setdefault(source, first)


_is_none = partial(is_, None)  # by identity: some classes raise when compared


def _key_of(plain: list[Any]) -> bytes:
    """Return a key of `plain`. Equal keys mean equal values of equal types."""
    if not plain:
        return b""
    try:
        return dumps(plain, 2)  # version 2 writes equal values as equal bytes
    except ValueError:
        return value_text(plain).encode()


def _recorded_tensors(facts: OpFacts, args: Any, kwargs: Any, result: Any) -> list[Any]:
    """Return the tensors of a record, in its order. A number is returned as a tensor."""
    tensors = fingerprinted_tensors(facts, args, kwargs, result)
    if result.__class__ in _NUMBER_TYPES:
        with unobserved():
            tensors.append(torch.tensor(result, device="cpu"))
    return tensors


def _written_by_region(args: Any) -> list[Any]:
    """Return the inputs that a compiled region will write in place.

    `args` are the arguments of inductor's higher-order op: the callable and the list of inputs. If
    the graph of the region is not available, returns all inputs, as any of them may be written.
    """
    callable_, inputs = args[0], list(args[1])
    graph = getattr(getattr(callable_, "original_gm", None), "graph", None)
    if graph is None:
        return inputs
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    # Functionalization replaces a write in place by a copy into the input at the end.
    written = {
        node.args[0]
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).startswith("aten.copy_.")
    }
    return [
        tensor
        for node, tensor in zip(placeholders, inputs, strict=False)
        if node in written and hasattr(tensor, "dtype")
    ]


class SuspendedMode:
    """Removes a paused recording mode from the mode stack of a thread, and restores it later.

    Even a paused mode costs a Python call for every op. A stack can be changed only on its own
    thread, and not during a backward pass: after the pass, autograd restores the earlier stack. So
    a mode stays on the stack if steps end during backward passes, or on several threads.
    """

    def __init__(self) -> None:
        self._mode: Any = None
        self._thread: threading.Thread | None = None
        self._is_allowed = _STACK_IS_KNOWN

    def suspend(self, modes: Collection[Any]) -> None:
        """Remove the first of `modes` that is on this thread's stack, at any depth."""
        self._is_allowed = self._is_allowed and _backward_pass() == _NO_PASS
        if not self._is_allowed:
            return
        mode = next((mode for mode in _modes_of_thread() if mode in modes), None)
        if mode is not None:
            self._mode, self._thread = mode, threading.current_thread()
            _remove_from_stack(mode)

    def restore(self) -> bool:
        """Insert the removed mode at the bottom of the stack of its thread.

        Returns False during a backward pass, or if that thread is alive but not this thread. Modes
        that the program has entered since stay above, because the program exits them first.
        """
        self._restore_own()
        if self._thread is not None and self._thread.is_alive():
            self._is_allowed = False
            return False
        return True

    def before_backward(self) -> None:
        """Restore the removed mode before a backward pass, if `restore` has failed earlier."""
        if not self._is_allowed:
            self._restore_own()

    def end(self, mode: Any) -> None:
        """Move `mode` to the top of this thread's stack, so that exiting `mode` removes it."""
        if _STACK_IS_KNOWN:
            _remove_from_stack(mode)
            _push_mode(mode)

    def _restore_own(self) -> None:
        if self._thread is threading.current_thread() and _backward_pass() == _NO_PASS:
            modes = _modes_of_thread()
            self._thread = None
            _replace_modes(modes, [self._mode, *modes])


_entered = threading.local()
"""The `EnteredMode` objects of each thread, which Python frees as the thread ends."""


class EnteredMode:
    """A mode on the stack of this thread, from the creation of this object until the thread ends.

    Torch frees a mode that is left on the stack, but only after the thread has released Python's
    lock. If the interpreter ends while the thread waits for the lock, the process aborts. A
    `weakref.finalize` does not suffice: it does nothing once the exit handlers have run.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode.__enter__()
        vars(_entered).setdefault("modes", []).append(self)

    def __del__(self) -> None:
        if _STACK_IS_KNOWN:  # None while the interpreter frees this module
            _remove_from_stack(self._mode)


def _modes_of_thread() -> list[Any]:
    """Return the modes on this thread's stack, outermost first. Omits the modes of torch itself."""
    return [mode for mode in _read_stack() if getattr(mode, "_mode_key", None) is None]


def _remove_from_stack(mode: Any) -> None:
    modes = _modes_of_thread()
    if mode in modes:
        _replace_modes(modes, [kept for kept in modes if kept is not mode])


def _replace_modes(modes: list[Any], replacements: list[Any]) -> None:
    for _ in modes:
        _pop_mode()
    for mode in replacements:
        _push_mode(mode)
