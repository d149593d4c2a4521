"""The mode that takes a record of every op that torch dispatches on a thread."""

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
from torchrepro.trace.digests import STAND_INS, is_unset
from torchrepro.trace.fingerprint import arrays, unobserved, widths
from torchrepro.trace.fingerprint_cache import NO_ENTRY, VIEW, WRITTEN, fingerprinted, is_nan
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
)
from torchrepro.trace.tensor_reads import version_of

if TYPE_CHECKING:
    from torchrepro.trace.buffer import DetailRecorder, RecordingState
    from torchrepro.trace.frames import CallSite, RunPosition

FEW = 8
"""Arguments of one kind of record that are remembered beside it."""

MANY = 1000
"""Lines that draw from generators of their own, above which no more are noted."""

_LOADING = "torch.utils.data"
_TRACING = "torch._subclasses"  # tensors of a compiler or an exporter, without numbers
_NUMBERS = frozenset({bool, int, float, complex})
_VALUES = _NUMBERS | {str, bytes}
"""The types of results that are no tensors, and are recorded by their value."""
_NO_OWN_PART = torch.Tensor.__torch_dispatch__  # of a parameter that has no shape yet
_facts: dict[int, OpFacts] = {}  # by id: ops take long to hash

# Torch has no public way to take a mode off the stack of its thread that a program may have entered
# others above. The stack is read and changed by three functions of its own, and a fourth one says
# whether a backward pass runs; were one of them gone, a mode would stay and do nothing there.
_read: Any = getattr(_python_dispatch, "_get_current_dispatch_mode_stack", None)
_push: Any = getattr(_python_dispatch, "_push_mode", None)
_pop: Any = getattr(_python_dispatch, "_pop_mode", None)
_backward_pass: Any = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001 - see above
_STACK_IS_KNOWN = None not in (_read, _push, _pop, _backward_pass)
_NO_PASS = -1


class RecordKind:
    """What records of one op at one place with the same shapes have in common.

    Steps repeat, so the kind of the next record is nearly always one of those that came next the
    last two times. To compare with these costs less than to look a kind up.
    """

    __slots__ = ("arguments", "before", "facts", "following", "phase", "place", "shapes", "site")

    def __init__(self) -> None:
        self.facts: OpFacts | None = None
        self.phase = ""
        self.place: CallSite | None = None
        self.shapes: Any = ()
        self.site = 0
        self.arguments: dict[bytes, int] = {b"": 0}  # the last that were not tensors, by their key
        self.following = self  # what came next the last time; itself where nothing did
        self.before = self  # what came next before that, and was another kind


class RecordingMode(TorchDispatchMode):
    """Takes a record of every op that torch dispatches on one thread.

    Autograd runs a thread's backward pass under the modes of that thread, whichever thread it
    uses. The program runs as without it: compiled code stays compiled and counts as one op,
    higher-order ops work, and subclasses of Tensor do their own part first.
    """

    supports_higher_order_operators = True

    def __init__(
        self, state: RecordingState, now: RunPosition, details: DetailRecorder | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = now
        self.details = details
        self.state = state
        # Only details are written by several threads. One that waited here for the end of a step
        # would have its op in the next.
        self.lock = nullcontext() if details is None else state.lock
        self.rereads = state.request.detail  # whether ops read inputs anew that were seen before
        self.buffer = state.buffer
        self.cache = state.cache
        self.entries = state.cache.entries
        self.spill = state.spill
        self.origin = OpOriginFinder(state.names, now)
        self.thread = state.buffer.new_thread()
        self.unwritten = state.unwritten
        self._kinds: dict[Hashable, RecordKind] = {}
        self._last = RecordKind()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Leave compiled code compiled in older torch, which lacks `ignore_compile_internals`.

        Its compiler gives way to every mode that is not part of torch.
        """
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, for two seconds, at the first op. Where a compiler
        # is loaded, `left_out_of_compilation` keeps it from compiling this.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now = self.now
        if now.aside and now.is_aside():
            return func(*args, **kwargs) if kwargs else func(*args)
        if types and not PLAIN.issuperset(types):
            if any(
                kind.__module__.startswith(_TRACING) or kind.__torch_dispatch__ is _NO_OWN_PART
                for kind in types
            ):
                return func(*args, **(kwargs or {}))
            return NotImplemented
        facts = _facts.get(address(func))
        if facts is None:
            facts = _facts[address(func)] = facts_of(func)
        if facts.transparent:
            return self._run_transparent(facts, args, kwargs)
        if self.details is not None or facts.compiled:
            return self._run_with_details(facts, args, kwargs or {})
        # Nearly every op comes here. It is written in one piece, and does itself what functions
        # could do: where an op takes microseconds, each call is a hundredth of the recording.
        cache, entries = self.cache, self.entries

        # What it reads.
        inputs: list[Any] = []
        plain: list[Any] = []
        for value in args[1:] if facts.overwrites else args:
            kind = value.__class__
            if kind in PLAIN:
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
                        cache.is_about_to_read(entry[2], value)
            elif kind is list or kind is tuple:
                cache.add_list(value, inputs, plain)
            else:
                plain.append(value)
        if kwargs:
            cache.add_named(facts, kwargs, inputs, plain)
            result = func(*args, **kwargs)
        else:
            result = func(*args)
        key = _key_of(plain) if plain else b""

        # What it has made or written.
        outputs: Any = None
        if result.__class__ in PLAIN:
            if facts.single:
                dtype = result.dtype
                try:
                    start = result.is_cpu and result.is_contiguous() and result.data_ptr()
                    # Autograd counts a write only after this.
                    version = result._version + facts.single_written  # noqa: SLF001 - see `version_of`
                    shapes: Any = ((result.shape, dtype),)
                except RuntimeError:  # nested, sparse, without memory or without a version
                    start = 0
                if (
                    start
                    and dtype in widths
                    and not (facts.keeps and inputs and is_unset(inputs[0]))
                ):
                    size = result.nbytes
                    outputs = xxh3_128_digest(arrays[size].from_address(start))
                    entries[address(result)] = ref(result), version, outputs[:INPUT], WRITTEN
                    cache.bytes_read += size
                    if facts.writes:
                        cache.update_base_of(result)
            elif facts.view_of_first and inputs and inputs[0].__class__ is bytes:
                base = inputs[0]
                if base[:4] not in STAND_INS:
                    # Autograd has a view count the writes of its base only after this.
                    version = version_of(args[0])
                    digest = xxh3_64_digest(base + key)
                    entries[address(result)] = ref(result), version, digest, VIEW
                    outputs, shapes = b"", (shape_of(result),)
        if outputs is None:
            outputs, shapes = self._outputs(facts, key, args, kwargs, inputs, result)
        if plain and any(map(_is_none, plain)):
            key += call_text(args, kwargs).encode()  # the key alone does not say which of them
        if cache.unset_inputs:
            self._note_unset(facts, args, result)
        self._append(facts, key, args, kwargs, inputs, outputs, shapes)
        return result

    def _run_transparent(self, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        result = facts.op(*args, **kwargs) if kwargs else facts.op(*args)
        if not args:
            return result
        given, cache = args[0], self.cache
        if facts.fresh:
            self._record_once_read(result, *self.origin.of(facts, args))
        elif cache.new:
            cache.pass_on(given, result)
        entry = cache.entries.get(address(given))
        if entry is not None and entry[0]() is given and isinstance(result, torch.Tensor):
            _, version, digest, source = entry
            cache.entries[address(result)] = ref(result), version, digest, source
            if get_ident() in self.now.optimizer:
                self.origin.passed_on(given, result)
        return result

    def _record_once_read(self, tensor: Any, phase: str, place: CallSite) -> None:
        def take(tensor: Any, fingerprint: Any) -> None:
            shape, buffer = shape_of(tensor), self.buffer
            key = NEW_TENSOR, phase, place, shape
            site = buffer.sites.get(key) or buffer.new_site(key, phase, place, NEW_TENSOR, (shape,))
            with self.lock:
                buffer.take(buffer.thread(self.thread), site, 0, (), (fingerprint,))
                if self.details is not None:
                    self.details.made(place, tensor)

        self.cache.expect(tensor, take)

    def _run_with_details(self, facts: OpFacts, args: Any, kwargs: Any) -> Any:
        if self.rereads:
            self.cache.distrust()
        inputs, plain = self.cache.inputs(facts, args, kwargs)
        before = None
        if self.details is not None:
            read = args[1:] if facts.overwrites else args
            before = self.details.before(self.origin.of(facts, args)[1], read, kwargs)
        # A region empties the list of its inputs, and writes some without saying which.
        written = _written_by_region(args) if facts.compiled else []
        returned = facts.op(*args, **kwargs)
        if facts.compiled:
            self.cache.entries.clear()  # it may have written anywhere
        result = (returned, written) if facts.compiled else returned
        key = _key_of(plain)
        outputs, shapes = self._outputs(facts, key, args, kwargs, inputs, result)
        if any(map(_is_none, plain)):
            key += call_text(args, kwargs).encode()
        self._note_unset(facts, args, returned)
        with self.lock:
            self._append(facts, key, args, kwargs, inputs, outputs, shapes)
            if self.details is not None:
                tensors = fingerprinted(facts, args, kwargs, result)
                if result.__class__ in _NUMBERS:
                    with unobserved():
                        tensors.append(torch.tensor(result, device="cpu"))
                self.details.after(before, tensors)
        return returned

    def _outputs(
        self, facts: OpFacts, key: bytes, args: Any, kwargs: Any, inputs: list[Any], result: Any
    ) -> tuple[Any, Any]:
        if facts.view:
            return b"", self.cache.views(args, key, inputs, result)
        if facts.keeps and inputs and is_unset(inputs[0]):
            return self.cache.unset_output(facts, key, inputs, result)
        found = self.cache.outputs(facts, args, kwargs, result)
        if result.__class__ in _VALUES:
            value: Any = result
            found[0].append(xxh3_128_digest(dumps(value, 2)))
            found[1].append(((), value.__class__.__name__))
        if facts.allocates:
            self.cache.allocated(result, self.origin.of(facts, args)[1])
        return found

    def _note_unset(self, facts: OpFacts, args: Any, result: Any) -> None:
        """Note what an op has read that nobody had written, and whether that made its result NaN.

        Ops that only pass it on, or take its shape alone, have not read it.
        """
        found, self.cache.unset_inputs = self.cache.unset_inputs, []
        if facts.view or facts.keeps or facts.allocates:
            return
        place = self.origin.of(facts, args)[1]
        unset = [tensor for _, tensor in found]
        for digest, tensor in found:
            if digest.place is None or any(args[at] is tensor for at in facts.scratch_arguments):
                continue
            read = self.unwritten.setdefault(
                (digest.place, place, facts.name), UninitializedReads()
            )
            if read.often < FEW and not (read.is_nan or digest.given_nan):
                read.is_nan = is_nan(result) and not any(
                    is_nan(each)
                    for each in tensors_in(args)
                    if not any(each is other for other in unset)
                )
            read.often += 1

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
        """Append a record, nearly always of the kind that came next the last time."""
        phase, place = self.origin.of(facts, args)
        kind = self._last.following
        if (
            kind.facts is not facts
            or kind.place is not place
            or kind.phase is not phase
            or kind.shapes != shapes
        ):
            last = self._last
            kind = last.before
            if (
                kind.facts is not facts
                or kind.place is not place
                or kind.phase is not phase
                or kind.shapes != shapes
            ):
                kind = self._kind_of(facts, phase, place, shapes)
            last.following, last.before = kind, last.following
        self._last = kind
        argument = kind.arguments.get(key)
        if argument is None:
            argument = self._learn_argument(kind, facts, key, args, kwargs)
        thread = self.thread if running_loop() is None else self.buffer.task(self.thread)
        if self.buffer.take(thread, kind.site, argument, inputs, outputs) >= IN_MEMORY:
            self.spill()

    def _kind_of(self, facts: OpFacts, phase: str, place: CallSite, shapes: Any) -> RecordKind:
        key = (facts, phase, place, *shapes)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = RecordKind()
            kind.facts, kind.phase, kind.place, kind.shapes = facts, phase, place, shapes
            kind.site = self.buffer.sites.get(key) or self.buffer.new_site(
                key, phase, place, facts.name, shapes
            )
        return kind

    def _learn_argument(
        self, kind: RecordKind, facts: OpFacts, key: bytes, args: Any, kwargs: Any
    ) -> int:
        number = self.buffer.arguments.get((facts, key))
        if number is None:
            number = self.buffer.new_argument((facts, key), call_text(args, kwargs))
        own = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, torch.Generator)]
        if own and kind.place is not None:
            self._learn_seed(source_of(kind.place), own[0])
        if len(kind.arguments) >= FEW:  # they may be others in every step
            kind.arguments = {b"": 0}
        kind.arguments[key] = number
        return number

    def _learn_seed(self, source: str, generator: Any) -> None:
        # A loader seeds generators of its own from the global one.
        modules = (str(each.f_globals.get("__name__")) for each in frames())
        if len(self.state.seeds) < MANY and not any(_LOADING in name for name in modules):
            first = *self.state.position(), str(generator.initial_seed())
            self.state.seeds.setdefault(source, first)


_is_none = partial(is_, None)  # an argument may be of a class that refuses to be compared


def _key_of(plain: list[Any]) -> bytes:
    """Return bytes that are equal for equal values of equal types, and only for those."""
    if not plain:
        return b""
    try:
        return dumps(plain, 2)  # version 2 writes equal values as equal bytes
    except ValueError:
        return value_text(plain).encode()


def _written_by_region(args: Any) -> list[Any]:
    """Return the tensors that a compiled region is about to write in place, from its graph.

    `args` are those of inductor's higher-order op: the callable and the list of inputs. A region
    whose graph is not available may write any of them.
    """
    callable_, inputs = args[0], list(args[1])
    graph = getattr(getattr(callable_, "original_gm", None), "graph", None)
    if graph is None:
        return inputs
    given = [node for node in graph.nodes if node.op == "placeholder"]
    # Functionalisation leaves one trace of a write in place: a last copy into the input.
    written = {
        node.args[0]
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).startswith("aten.copy_.")
    }
    return [
        tensor
        for node, tensor in zip(given, inputs, strict=False)
        if node in written and hasattr(tensor, "dtype")
    ]


class ModeTakenOff:
    """The mode that was taken off the stack of its thread while it has nothing to do.

    A mode on the stack costs a call of Python for every op, whatever it does. A thread's stack can
    be changed on that thread alone, and not within a backward pass: autograd puts back the stack
    with which the pass began. Modes stay where they are in a program whose steps end within
    backward passes, or on several threads.
    """

    def __init__(self) -> None:
        self._mode: Any = None
        self._thread: threading.Thread | None = None
        self._is_allowed = _STACK_IS_KNOWN

    def take_off(self, modes: Collection[Any]) -> None:
        """Take the one of `modes` that this thread has off its stack, wherever in it."""
        self._is_allowed = self._is_allowed and _backward_pass() == _NO_PASS
        own = [mode for mode in _of_thread() if mode in modes] if self._is_allowed else []
        if own:
            self._mode, self._thread = own[0], threading.current_thread()
            _remove(own[0])

    def put_back(self) -> bool:
        """Put it back at the bottom of its stack; returns whether no thread lacks its mode.

        Whatever the program has entered meanwhile stays above: it is what the program leaves next.
        """
        self._put_back_own()
        if self._thread is not None and self._thread.is_alive():
            self._is_allowed = False
            return False
        return True

    def before_backward(self) -> None:
        """Put the mode of this thread back if steps end within the pass that is about to begin."""
        if not self._is_allowed:
            self._put_back_own()

    def end(self, mode: Any) -> None:
        """Have `mode` at the top of this thread's stack, where leaving it takes it off."""
        if _STACK_IS_KNOWN:
            _remove(mode)
            _push(mode)

    def _put_back_own(self) -> None:
        if self._thread is threading.current_thread() and _backward_pass() == _NO_PASS:
            modes = _of_thread()
            self._thread = None
            _replace(modes, [self._mode, *modes])


def _of_thread() -> list[Any]:
    """Return the modes on this thread's stack that are not part of torch, the outermost first."""
    return [mode for mode in _read() if getattr(mode, "_mode_key", None) is None]


def _remove(mode: Any) -> None:
    modes = _of_thread()
    if mode in modes:
        _replace(modes, [each for each in modes if each is not mode])


def _replace(modes: list[Any], others: list[Any]) -> None:
    for _ in modes:
        _pop()
    for each in others:
        _push(each)
