"""Records a process: collects records, and writes every finished step to the store.

At the end, stores digests of the program's final state. They reveal changes that no recorded op
shows: writes from outside torch, and changes of an optimizer after its last step.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import xxhash
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from torchrepro.ground.callers import program_files
from torchrepro.ground.console import say
from torchrepro.ground.errors import TraceError
from torchrepro.seeding.loader_hook import author_worker_init
from torchrepro.seeding.nondeterministic_calls import seed_of_generator
from torchrepro.seeding.nondeterministic_reads import recorded_watches
from torchrepro.seeding.observed_calls import on_modules_called
from torchrepro.seeding.resumed_run import ResumedRun
from torchrepro.seeding.streams import world
from torchrepro.trace.buffer import RecordingState, joined
from torchrepro.trace.followed_lines import step_ended
from torchrepro.trace.format import ARGUMENTS, INPUT, MAIN, OUTPUT, StepRow
from torchrepro.trace.frames import call_site_of_program, parameters_of, source_of
from torchrepro.trace.generator_states import GeneratorStates
from torchrepro.trace.hooks import (
    on_worker_started,
    watch_training,
    wrap_loader_iteration,
)
from torchrepro.trace.op_facts import PLAIN, value_text
from torchrepro.trace.recording_levels import LEVELS, StepLevel, arguments_of
from torchrepro.trace.request import level_of_step
from torchrepro.trace.store import SizeLimit, open_store
from torchrepro.trace.tensor_reads import fingerprint_of, fingerprints_of

if TYPE_CHECKING:
    from weakref import ReferenceType

    from torchrepro.trace.device_fingerprint import Digest
    from torchrepro.trace.recording_levels import Level
    from torchrepro.trace.request import RecordingRequest
    from torchrepro.trace.store import Store

    NamedValues = Iterator[tuple[str, str, Any]]
    """Group, name and value of each parameter, buffer, or part of an optimizer."""

_MOST_REPORTED = 64  # uninitialized reads, lines that hide ops, or optimizers
_DATAPIPES_INIT = "_sharding_worker_init_fn"  # torch's wrapper of a user's worker_init_fn
_PARAMETERS, _BUFFERS, _OPTIMIZERS = "parameters", "buffers", "optimizers"


class Recording:
    """The recording of one process, from `start` to `stop`.

    With `every`, the level changes between steps: steps that are not recorded in full use
    `StepLevel`. If steps end on several threads or during backward passes, the full level cannot
    resume, and the recording stays at `StepLevel`. The trace has the level of each step.
    """

    def __init__(self, request: RecordingRequest) -> None:
        self.request = request
        self.state = RecordingState(request, self.spill)
        self._full: Level = LEVELS[request.level](self.state)
        self._level = self._full  # of the running step; step 0 is always recorded in full
        self._coarse = StepLevel(self.state)
        self._naming = ExitStack()  # names modules while the full level is paused
        self._store: Store | None = None
        self._limit: SizeLimit | None = None
        self._open = ExitStack()
        self._sources = recorded_watches.begin(request.folder, in_detail=request.detail)
        self._losses: list[tuple[Any, Any, str, int]] = []  # tensor, fingerprint, source, thread
        self._gradients: dict[int, list[Any]] = {}  # by thread
        self._arguments: dict[int, list[Any]] = {}  # of optimizers, by thread
        self._optimizers: dict[int, ReferenceType[Any]] = {}  # by the id of the optimizer
        self._parameters_at_start: list[Sequence[Digest]] = []
        """Digests of the parameters of each optimizer whose first step began in this step."""
        self._start_digests: list[str] = []
        """One digest for each optimizer: its parameters when its first step began."""
        self._parallel: list[ReferenceType[DistributedDataParallel]] = []
        self._replicated = True  # whether DDP keeps all optimized parameters equal on all ranks
        self._generators = GeneratorStates()
        self._first_states: Mapping[str, str] = {}  # of generators, when the recording began
        self._files = program_files()  # now, because the main module's file is unknown at the end
        self._loaders: dict[Hashable, Mapping[str, Any]] = {}
        self._built: int | None = None  # the number of records before the first model
        self._failed = False
        self._is_writing = False
        self._skipped_steps = False
        self.ended = False
        self.refuse: Callable[[TraceError], None] = _raise
        """Called if the trace cannot be written, to end the program (`on_unwritable` is stop)."""

    def start(self) -> None:
        """Start recording this thread and the threads that it starts."""
        self._sources.position = self.state.position = self._position
        self._first_states = self._generators.read()
        # https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.module.register_module_parameter_registration_hook.html
        with ExitStack() as if_it_fails:
            undo = if_it_fails.enter_context(self._open)
            undo.callback(self._sources.stop)
            undo.callback(register_module_parameter_registration_hook(self._model_is_built).remove)
            undo.callback(register_module_module_registration_hook(self._module_is_wrapped).remove)
            watch_training(undo, self)
            on_worker_started(undo, self._ignore_worker)
            self._full.begin(undo)
            if not self.request.loading:
                wrap_loader_iteration(undo, lambda _: self._full.paused())
            undo.enter_context(self._naming)
            _recordings.append(self)
            undo.callback(_recordings.remove, self)
            if_it_fails.pop_all()

    def stop(self) -> None:
        """Stop recording and write the records of the unfinished step."""
        self._open.close()
        self.finish()

    def finish(self) -> None:
        """Write the remaining records, and mark the trace as complete.

        Does nothing when called again, or in a forked child.
        """
        if self.ended:
            return
        self._full.abandon()
        self.ended = True
        self._discard_if_interrupted()
        if self._failed:
            return
        if self.state.buffer.rows or self.state.buffer.moved or self._losses:
            self._write_step((), finished=False)
        folder, requested = self.request.folder, self.request.steps
        if self._store is None:
            if requested is not None and self._skipped_steps:
                say(f"{folder}: {_message_of_unreached(requested, self.state.step)}")
            return
        say(*(f"{folder}: no module matches `{pattern}`" for pattern in self._full.unmatched()))
        with self._unwritable_handled():
            self._store.finish(self._facts())
            if self._limit is not None and self._limit.count:
                say(f"{self._store.path}: {self._limit.summary()}")

    def abandon(self) -> None:
        """Stop recording without touching the store, which may belong to the parent process."""
        self._failed, self._store = True, None
        self._full.abandon()

    def _ignore_worker(self) -> None:
        """Stop recording in a worker of a data loader. The main process records the batches."""
        store = self._store
        self.abandon()
        if store is not None:  # not the parent's store, which a forked child has dropped
            store.discard()
            store.path.unlink(missing_ok=True)

    def spill(self) -> None:
        """Move the records of a long step to the store before the step ends."""
        with self.state.lock, self._full.paused(), self._guarded_write():
            if self._drops_step():
                return
            with self._unwritable_handled():
                self.state.buffer.move_to_store(self._store or self._open_store())
            self.state.cache.forget_dead()

    def end_step(self, parameters: Sequence[Digest] = ()) -> None:
        """End a step and write it in one transaction.

        `parameters` are digests of the parameters that an optimizer has updated.
        """
        if self.ended:
            raise TraceError.about(
                "has ended: it has no more steps to end",
                found=self.request.folder,
                todo="call end_step inside of the `with` block",
            )
        with self.state.lock, self._full.paused(), self._guarded_write():
            self._write_step(parameters, finished=True)
            step_ended(self.state.step)
            self.state.step += 1
            self.state.cache.end_step(on_main=not self._thread())
            if self._level is self._full:
                self._full.end_step()
            self._change_level()

    def _change_level(self) -> None:
        wanted = level_of_step(self.state.step, self.request.level, self.request.every)
        if wanted == self._level.name:
            return
        if wanted == self._coarse.name:
            self._full.pause()
            # Modules are named in the order of their first calls, which may be in any step.
            names = self.state.names
            self._naming.enter_context(
                on_modules_called(
                    lambda module, _: names.knows(module) or names.call_site_of(module)
                )
            )
            self._level = self._coarse
        elif self._full.resume():
            self._naming.close()
            self._level = self._full

    # The hooks of the training loop call these methods (see `watch_training`). A backward pass, or
    # the loading of a batch, may begin in one step and end in another. So the full level is called
    # at begin and end even while it is paused. Batches are recorded in the same way at each level.

    def backward_begins(self, losses: Any) -> None:
        source = source_of(call_site_of_program())
        with self._full.paused():
            sequence = (losses,) if isinstance(losses, torch.Tensor) else losses
            recorded = [
                (*_value_and_fingerprint(loss), source, self._thread())
                for loss in sequence
                if isinstance(loss, torch.Tensor)
            ]
            with self.state.lock:  # another thread may end a step
                self._losses += recorded
        self._full.backward_begins()

    def backward_ends(self) -> None:
        self._full.backward_ends()

    def optimizer_begins(self, optimizer: Any, closure: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = ref(optimizer)
            self._replicated = self._replicated and self._is_replicated(optimizer)
            if len(self._optimizers) <= _MOST_REPORTED:
                self._parameters_at_start.append(self._level.parameters_now(optimizer))
        arguments, gradients = self._level.optimizer_begins(
            optimizer, call_site_of_program(), closure
        )
        self._arguments.setdefault(self._thread(), []).extend(arguments)
        self._gradients.setdefault(self._thread(), []).extend(gradients)

    def optimizer_ends(self, optimizer: Any) -> None:
        self.end_step(self._level.optimizer_ends(optimizer))

    def batch_begins(self, iterator: Any) -> None:
        # Ops of workers are not recorded.
        self._full.batch_begins(_workers_of(iterator) or int(not self.request.loading))

    def batch_ends(self, iterator: Any, batch: Any) -> None:
        call_site = call_site_of_program()
        with suppress(Exception):  # attributes of a class of the program may raise any error
            dataset = getattr(iterator, "_dataset", None)
            loader = {
                "where": source_of(call_site),
                "workers": _workers_of(iterator),
                "dataset": type(dataset).__name__,
                "iterable": isinstance(dataset, IterableDataset),
                "worker_init_fn": _worker_init_name(getattr(iterator, "_worker_init_fn", None)),
            }
            self._loaders[tuple(loader.values())] = loader
        self._full.batch_ends(batch, call_site)

    def _facts(self) -> dict[str, Any]:
        explicit_seeds = (seed_of_generator(at, *seed) for at, seed in self.state.seeds.items())
        reads = islice(self.state.uninitialized_reads.items(), _MOST_REPORTED)
        facts: dict[str, Any] = {
            "sources": [read.to_json() for read in (*self._sources.reads(), *explicit_seeds)],
            "models": self.state.names.names_in_program(),
            "before": self._start_digests,
            "generators": self._first_states,
            "built": self._built,
            "left": f"{self.state.left_torch:x}" if self.state.left_torch else "",
            "unwritten": [
                {
                    "allocated": source_of(allocated),
                    "read": source_of(call_site),
                    "op": op,
                    "is_nan": read.is_nan,
                }
                for (allocated, call_site, op), read in reads
            ],
            "hidden": sorted(self.state.hidden)[:_MOST_REPORTED],
            "unread": self.state.cache.waiting.unread,
        }
        if self.request.steps is None:  # with a range of steps, the end is not requested
            references = [reference() for reference in self._optimizers.values()]
            optimizers = [optimizer for optimizer in references if optimizer is not None]
            facts["end"] = _end_state(self.state, optimizers, knows_ops=self._full.name == "op")
        return {
            **{key: value for key, value in facts.items() if value},
            **self._sources.files.to_json(),
            "loaders": list(self._loaders.values()),
            "modules": sorted({*self._files, *program_files()}),
            "resumed": "yes" if ResumedRun.active.is_resumed else "no",
            "replicated": self._replicated and bool(self._optimizers),
        }

    def _model_is_built(self, *_: Any) -> None:
        if self._built is None and not self.state.names.models:  # no model was called yet
            self._built = self._position()[1]

    def _module_is_wrapped(self, module: Any, *_: Any) -> None:
        if issubclass(type(module), DistributedDataParallel):
            self._parallel.append(ref(module))

    def _is_replicated(self, optimizer: Any) -> bool:
        """Whether DDP averages the gradients of all parameters of an optimizer over all ranks.

        Returns False if DDP averages within groups of ranks, or by a communication hook of the
        program, as in local SGD. In these cases, ranks may differ on purpose.
        """
        living = [wrapper for reference in self._parallel if (wrapper := reference()) is not None]
        averaged = {
            id(parameter)
            for wrapper in living
            # No public API lists hooks. A wrapper whose `__init__` failed has no list of hooks.
            if not getattr(wrapper, "_comm_hooks", True)
            if wrapper.process_group.size() == world().size
            for name, parameter in wrapper.module.named_parameters()
            if name not in wrapper.parameters_to_ignore
        }
        return averaged.issuperset(map(id, parameters_of(optimizer)))

    def _position(self) -> tuple[int, int]:
        written = self._store.records if self._store is not None else 0
        return self.state.step, written + len(self.state.buffer.rows)

    def _thread(self) -> int:
        return self.state.buffer.thread(MAIN)

    @contextmanager
    def _guarded_write(self) -> Iterator[None]:
        """Mark the block as a write of records to the store.

        If an exception such as ^C interrupts the block, the next write discards the step and ends
        the recording. Otherwise a part of a step would look like a whole step.
        """
        self._discard_if_interrupted()
        self._is_writing = True
        yield
        self._is_writing = False

    def _discard_if_interrupted(self) -> None:
        if self._is_writing:
            self._failed, store, self._store = True, self._store, None
            self._is_writing = False
            if store is not None:
                store.discard()

    def _drops_step(self) -> bool:
        if self._failed or not self.state.wants_step:
            self.state.buffer.rows.clear()
            self._losses, self._gradients, self._arguments = [], {}, {}
            self._skipped_steps = True
            return True
        return False

    def _write_step(self, parameters: Sequence[Digest], *, finished: bool) -> None:
        if self._drops_step():
            return
        with self._unwritable_handled():
            store = self._store or self._open_store()
            first, count = self.state.buffer.end_step(store)
            losses, self._losses = self._losses, []
            marks = joined([mark for _, mark, *_ in losses], OUTPUT)
            started = self._parameters_at_start
            self._start_digests += [_combined(parameters).hex() for parameters in started]
            self._parameters_at_start = []
            store.add_losses(
                (_real(value), marks[n * OUTPUT : (n + 1) * OUTPUT], source, thread)
                for n, (value, _, source, thread) in enumerate(losses)
            )
            self._level.write(store, first)
            cache = self.state.cache
            row = StepRow(
                step=self.state.step,
                first=first,
                records=count,
                bytes=cache.bytes_read,
                parameters=_combined(parameters),
                gradients=_combined(self._gradients.pop(self._thread(), ())),
                arguments=_combined(self._arguments.pop(self._thread(), ())),
                random=self._generators.read(),
                finished=finished,
                level=self._level.name,
                thread=self._thread(),
            )
            cache.bytes_read = 0
            store.end_step(row)
            if self._limit is not None:
                self._limit.make_room(row)

    def _open_store(self) -> Store:
        self._store = open_store(self.request)
        if self.request.max_size is not None:
            self._limit = SizeLimit(self._store, self.request.max_size)
        return self._store

    @contextmanager
    def _unwritable_handled(self) -> Iterator[None]:
        try:
            yield
        except TraceError as error:
            self._failed = True
            if self._store is not None:
                self._store.discard()
                self._store = None
            if self.request.on_unwritable == "stop":
                self.refuse(error)
                return
            say(f"{error}\n    the run continues without recording")


_recordings: list[Recording] = []


def running() -> tuple[Recording, ...]:
    """Return the recordings that are running, outermost first."""
    return tuple(_recordings)


def _raise(error: TraceError) -> None:
    raise error


def _abandon_in_forked_child() -> None:
    for recording in _recordings:
        recording.abandon()


os.register_at_fork(after_in_child=_abandon_in_forked_child)


def _message_of_unreached(requested: tuple[int, int], ended: int) -> str:
    first, last = requested
    wanted = f"step {first} was" if first == last else f"steps {first} to {last} were"
    if ended > 1:
        had = f"{ended:,} steps, 0 to {ended - 1}"
    else:
        had = "1 step, 0" if ended else "no steps"
    return f"the run had {had}; {wanted} not reached: nothing was recorded"


def _combined(digests: Sequence[Digest]) -> bytes:
    together = joined(digests, INPUT)
    return xxhash.xxh3_128_digest(together) if together else b""


def _value_and_fingerprint(loss: Any) -> tuple[Any, Any]:
    mark, value = fingerprint_of(loss), None
    with suppress(Exception):  # some tensors have no value, and subclasses may raise any error
        if loss.__class__ in PLAIN and loss.is_cpu:
            value = loss.item() if loss.numel() == 1 else None
        elif loss.numel() == 1:
            # Reading the value now would wait for the device. A copy is read when the step ends.
            value = loss.detach().clone()
    return value, mark


def _real(value: Any) -> float | None:
    try:
        value = value.item() if isinstance(value, torch.Tensor) else value
        return None if value is None or isinstance(value, complex) else float(value)
    except Exception:  # noqa: BLE001 - subclasses may raise any error
        return None


# The attributes of a loader's iterator are private. If a newer torch lacks an attribute, the fact
# is omitted. If reading an attribute raises, the loader is omitted.


def _workers_of(iterator: Any) -> int:
    return int(getattr(iterator, "_num_workers", 0))


def _worker_init_name(init: Any) -> str | None:
    if isinstance(init, partial) and getattr(init.func, "__name__", "") == _DATAPIPES_INIT:
        init = init.args[0]
    init = author_worker_init(init)
    if init is None:
        return None
    while isinstance(init, partial):
        init = init.func
    function = getattr(init, "__func__", init)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    name = getattr(function, "__name__", type(function).__name__)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def _end_state(
    state: RecordingState, optimizers: Sequence[Any], *, knows_ops: bool
) -> dict[str, dict[str, str]]:
    """Return a digest of each value of the program's final state, by group and name.

    Omits uninitialized memory, which is known only if ops were recorded (`knows_ops`). Otherwise,
    includes only the buffers that a checkpoint of a trained model has. Waits for devices.
    """
    values = [
        named
        for number, optimizer in enumerate(optimizers)
        for named in _values_of_optimizer(number, optimizer)
    ]
    values += _values_of_modules(state) if knows_ops else _buffers_of_trained(optimizers)
    digests: dict[str, dict[str, str]] = defaultdict(dict)
    tensors = []
    for group, name, value in values:
        if not isinstance(value, torch.Tensor):
            digests[group][name] = xxhash.xxh3_64_hexdigest(value_text(value).encode())
        elif not state.cache.has_uninitialized_memory(value):
            tensors.append((group, name, value))
    marks = joined(fingerprints_of([tensor for _, _, tensor in tensors]), OUTPUT)
    for number, (group, name, _) in enumerate(tensors):
        digests[group][name] = marks[number * OUTPUT : (number + 1) * OUTPUT].hex()[:OUTPUT]
    return dict(digests)


def _values_of_modules(state: RecordingState) -> NamedValues:
    for path, module in state.names.living():
        for name, value in module.named_parameters(recurse=False):
            yield _PARAMETERS, f"{path}.{name}", value
        for name, value in module.named_buffers(recurse=False):
            yield _BUFFERS, f"{path}.{name}", value


def _buffers_of_trained(optimizers: Iterable[Any]) -> NamedValues:
    """Yield the buffers of trained models, which are found by a search of all living objects."""
    trained = dict.fromkeys(
        id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)
    )
    indices = {parameter: index for index, parameter in enumerate(trained)}
    # `isinstance` would read `__class__` of all objects, which initializes lazy objects.
    modules = [living for living in gc.get_objects() if issubclass(type(living), torch.nn.Module)]
    built = [module for module in modules if "_modules" in vars(module)]  # `__init__` was called
    inner = {id(child) for module in built for child in module.children()}
    roots = []
    for module in built:
        if id(module) not in inner:
            used = [indices[key] for key in map(id, module.parameters()) if key in indices]
            if used:
                roots.append((min(used), module))
    for number, (_, root) in enumerate(sorted(roots, key=itemgetter(0))):
        for path, module in root.named_modules():
            # No public API lists the buffers that a checkpoint omits. If torch lacks this private
            # name, all buffers are compared, also uninitialized buffers.
            omitted = getattr(module, "_non_persistent_buffers_set", ())
            for name, value in module.named_buffers(recurse=False):
                if name not in omitted:
                    label = f"{path}.{name}" if path else name
                    yield _BUFFERS, f"{label} of model {number}" if number else label, value


def _values_of_optimizer(number: int, optimizer: Any) -> NamedValues:
    class_name = type(optimizer).__name__
    label = f"{class_name} {number}" if number else class_name
    arguments, _ = arguments_of(optimizer)
    yield _OPTIMIZERS, f"{ARGUMENTS}{label}", arguments
    for index, parameter in enumerate(parameters_of(optimizer)):
        yield _PARAMETERS, f"parameter {index} of {label}", parameter
        parameter_state = optimizer.state.get(parameter, {})
        if isinstance(parameter_state, dict):
            for name, value in parameter_state.items():
                yield _OPTIMIZERS, f"{name} of parameter {index} of {label}", value
