"""A recording that is running: it takes records, and hands every finished step to the store.

As it ends it says what the program still holds: what is written from outside torch, or to an
optimizer after its last step, shows in no op.
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
from torchrepro.seeding.nondeterministic_reads import seed_of_generator, watch_for_recording
from torchrepro.seeding.observed_calls import on_modules_called
from torchrepro.seeding.state import is_resumed
from torchrepro.seeding.streams import world
from torchrepro.trace.buffer import RecordingState, joined
from torchrepro.trace.followed_lines import step_ended
from torchrepro.trace.format import ARGUMENTS, INPUT, MAIN, OUTPUT, StepRow
from torchrepro.trace.frames import parameters_of, place_of_user, source_of
from torchrepro.trace.generator_states import GeneratorStates
from torchrepro.trace.hooks import (
    on_worker_begun,
    watch_training,
    within_loaders_begun,
)
from torchrepro.trace.op_facts import PLAIN, value_text
from torchrepro.trace.recording_levels import LEVELS, StepLevel, arguments_of
from torchrepro.trace.request import level_of_step
from torchrepro.trace.store import SizeLimit, open_store
from torchrepro.trace.tensor_reads import fingerprint_of

if TYPE_CHECKING:
    from weakref import ReferenceType

    from torchrepro.trace.digests import Digest
    from torchrepro.trace.recording_levels import Level
    from torchrepro.trace.request import RecordingRequest
    from torchrepro.trace.store import Store

    Held = Iterator[tuple[str, str, Any]]
    """Kind, name and value of each."""

_MOST = 64  # reads of unwritten memory, lines that hide ops, and optimizers, that a trace names
_OF_DATAPIPES = "_sharding_worker_init_fn"  # torch's own, around that of the author
_PARAMETERS, _BUFFERS, _OPTIMIZERS = "parameters", "buffers", "optimizers"


class Recording:
    """One process being recorded, from `start` to `stop`.

    With `every`, the level changes between two steps: to `StepLevel` for those that are not to be
    recorded in full. Where the full level cannot be taken up at once, because the steps of a
    program end on several threads or have begun to end within backward passes, it stays there;
    each step says at which level it was recorded.
    """

    def __init__(self, request: RecordingRequest) -> None:
        self.request = request
        self.state = RecordingState(request, self.spill)
        self._full: Level = LEVELS[request.level](self.state)
        self._level = self._full  # of the running step; step 0 is a multiple of every number
        self._coarse = StepLevel(self.state)
        self._naming = ExitStack()  # of modules that are first called while the full level rests
        self._store: Store | None = None
        self._limit: SizeLimit | None = None
        self._open = ExitStack()
        self._sources = watch_for_recording(request.folder, in_detail=request.detail)
        self._losses: list[tuple[Any, Any, str, int]] = []  # tensor, fingerprint, source, thread
        self._gradients: dict[int, list[Any]] = {}  # by thread
        self._arguments: dict[int, list[Any]] = {}  # of optimizers, by thread
        self._optimizers: dict[int, ReferenceType[Any]] = {}  # by their identity
        self._begun: list[Sequence[Digest]] = []  # parameters of those that began in this step
        self._before: list[str] = []  # digests of the parameters of each, as its first step began
        self._parallel: list[ReferenceType[DistributedDataParallel]] = []
        self._replicated = True  # whether DDP keeps all that optimizers update equal on all ranks
        self._generators = GeneratorStates()
        self._first_states: Mapping[str, str] = {}  # of generators, as the recording began
        self._files = program_files()  # that of the main module is no longer known at the end
        self._loaders: dict[Hashable, Mapping[str, Any]] = {}
        self._built: int | None = None  # how many records came before the first model
        self._failed = False
        self._handing_over = False
        self._left_out = False
        self.ended = False
        self.refuse: Callable[[TraceError], None] = _raise
        """Called where the trace cannot be written and the program is not to go on."""

    def start(self) -> None:
        """Begin to take records on this thread and on those that it starts."""
        self._sources.position = self.state.position = self._position
        self._first_states = self._generators.read()
        # https://docs.pytorch.org/docs/stable/generated/torch.nn.modules.module.register_module_parameter_registration_hook.html
        with ExitStack() as if_it_fails:
            undo = if_it_fails.enter_context(self._open)
            undo.callback(self._sources.stop)
            undo.callback(register_module_parameter_registration_hook(self._model_is_built).remove)
            undo.callback(register_module_module_registration_hook(self._module_is_wrapped).remove)
            watch_training(undo, self)
            on_worker_begun(undo, self._leave_to_main_process)
            self._full.begin(undo)
            if not self.request.loading:
                within_loaders_begun(undo, lambda _: self._full.paused())
            undo.enter_context(self._naming)
            _recordings.append(self)
            undo.callback(_recordings.remove, self)
            if_it_fails.pop_all()

    def stop(self) -> None:
        """Take no more records, and write what is left of a step that has not ended."""
        self._open.close()
        self.finish()

    def finish(self) -> None:
        """Write what is left, and that the trace is complete; for a process that ends.

        Writes nothing the second time, nor in a child that was forked.
        """
        if self.ended:
            return
        self._full.abandon()
        self.ended = True
        self._give_up_if_cut()
        if self._failed:
            return
        if self.state.buffer.rows or self.state.buffer.moved or self._losses:
            self._write_step((), finished=False)
        folder, asked = self.request.folder, self.request.steps
        if self._store is None:
            if asked is not None and self._left_out:
                say(f"{folder}: {_not_reached(asked, self.state.step)}")
            return
        say(*(f"{folder}: no module matches `{pattern}`" for pattern in self._full.unmatched()))
        with self._unwritable_handled():
            self._store.finish(self._facts())
            if self._limit is not None and self._limit.count:
                say(f"{self._store.path}: {self._limit.in_words()}")

    def abandon(self) -> None:
        """Take no more records and leave the store alone: it is another process's."""
        self._failed, self._store = True, None
        self._full.abandon()

    def _leave_to_main_process(self) -> None:
        """Record nothing of a loader's worker: its batches are recorded where they are used."""
        store = self._store
        self.abandon()
        if store is not None:  # its own; a forked worker has left that of its parent alone
            store.discard()
            store.path.unlink(missing_ok=True)

    def spill(self) -> None:
        """Hand the records of a long step to the store before it ends."""
        with self.state.lock, self._full.paused(), self._in_one_piece():
            if self._drops_step():
                return
            with self._unwritable_handled():
                self.state.buffer.move(self._store or self._open_store())
            self.state.cache.forget_dead()

    def end_step(self, parameters: Sequence[Digest] = ()) -> None:
        """End a step: all that belongs to it is written in one transaction.

        `parameters` are digests of what an optimizer has updated.
        """
        if self.ended:
            raise TraceError.about(
                "has ended: no step of it can end any more",
                found=self.request.folder,
                todo="call end_step inside of the `with` block",
            )
        with self.state.lock, self._full.paused(), self._in_one_piece():
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
            self._full.rest()
            # Modules are named in the order of their first calls, in whichever steps these are.
            names = self.state.names
            self._naming.enter_context(
                on_modules_called(lambda module, _: names.knows(module) or names.place_of(module))
            )
            self._level = self._coarse
        elif self._full.resume():
            self._naming.close()
            self._level = self._full

    # Called by the hooks of the training loop (see `watch_training`). A backward pass, and the
    # loading of a batch, may begin in one step and end in another: the full level hears of both
    # ends, also while it rests. A batch is recorded alike at each level.

    def backward_begins(self, losses: Any) -> None:
        source = source_of(place_of_user())
        with self._full.paused():
            found = [
                (*_value_and_fingerprint(loss), source, self._thread())
                for loss in ((losses,) if isinstance(losses, torch.Tensor) else losses)
                if isinstance(loss, torch.Tensor)
            ]
            with self.state.lock:  # another thread may end a step
                self._losses += found
        self._full.backward_begins()

    def backward_ends(self) -> None:
        self._full.backward_ends()

    def optimizer_begins(self, optimizer: Any, closure: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = ref(optimizer)
            self._replicated = self._replicated and self._is_replicated(optimizer)
            if len(self._optimizers) <= _MOST:
                self._begun.append(self._level.parameters_now(optimizer))
        found = self._level.optimizer_begins(optimizer, place_of_user(), closure)
        for each, digests in zip((self._arguments, self._gradients), found, strict=True):
            each.setdefault(self._thread(), []).extend(digests)

    def optimizer_ends(self, optimizer: Any) -> None:
        self.end_step(self._level.optimizer_ends(optimizer))

    def batch_begins(self, iterator: Any) -> None:
        # What workers compute is not recorded.
        self._full.batch_begins(_workers_of(iterator) or int(not self.request.loading))

    def batch_ends(self, iterator: Any, batch: Any) -> None:
        place = place_of_user()
        with suppress(Exception):  # a class of the program's may raise what it likes
            dataset = getattr(iterator, "_dataset", None)
            its = {
                "where": source_of(place),
                "workers": _workers_of(iterator),
                "dataset": type(dataset).__name__,
                "iterable": isinstance(dataset, IterableDataset),
                "worker_init_fn": _own_init(getattr(iterator, "_worker_init_fn", None)),
            }
            self._loaders[tuple(its.values())] = its
        self._full.batch_ends(batch, place)

    def _facts(self) -> dict[str, Any]:
        own_seeds = (seed_of_generator(at, *seed) for at, seed in self.state.seeds.items())
        found: dict[str, Any] = {
            "sources": [read.to_json() for read in (*self._sources.reads(), *own_seeds)],
            "models": self.state.names.held(),
            "before": self._before,
            "generators": self._first_states,
            "built": self._built,
            "left": f"{self.state.left:x}" if self.state.left else "",
            "unwritten": [
                {
                    "allocated": source_of(allocated),
                    "read": source_of(place),
                    "op": op,
                    "is_nan": read.is_nan,
                }
                for (allocated, place, op), read in islice(self.state.unwritten.items(), _MOST)
            ],
            "hidden": sorted(self.state.hidden)[:_MOST],
        }
        if self.request.steps is None:  # what comes after them was not asked for
            optimizers = [one for each in self._optimizers.values() if (one := each()) is not None]
            found["end"] = _end_state(self.state, optimizers, knows_ops=self._full.name == "op")
        return {
            **{key: value for key, value in found.items() if value},
            **(self._sources.files.to_json() if self._sources.files is not None else {}),
            "loaders": list(self._loaders.values()),
            "modules": sorted({*self._files, *program_files()}),
            "resumed": "yes" if is_resumed() else "no",
            "replicated": self._replicated and bool(self._optimizers),
        }

    def _model_is_built(self, *_: Any) -> None:
        if self._built is None and not self.state.names.models:  # that has computed nothing yet
            self._built = self._position()[1]

    def _module_is_wrapped(self, module: Any, *_: Any) -> None:
        if issubclass(type(module), DistributedDataParallel):
            self._parallel.append(ref(module))

    def _is_replicated(self, optimizer: Any) -> bool:
        """Whether DDP averages the gradients of all parameters of an optimizer over all ranks.

        Within groups, or by a hook of the program as in local SGD, ranks may differ for a reason.
        """
        averaged = {
            id(parameter)
            for one in [each() for each in self._parallel]
            # No public API knows of hooks. One that failed as it was made has no such list.
            if one is not None and not getattr(one, "_comm_hooks", True)
            if one.process_group.size() == world().size
            for name, parameter in one.module.named_parameters()
            if name not in one.parameters_to_ignore
        }
        return averaged.issuperset(map(id, parameters_of(optimizer)))

    def _position(self) -> tuple[int, int]:
        written = self._store.records if self._store is not None else 0
        return self.state.step, written + len(self.state.buffer.rows)

    def _thread(self) -> int:
        return self.state.buffer.thread(MAIN)

    @contextmanager
    def _in_one_piece(self) -> Iterator[None]:
        """Hand records to the store. Where an exception of anybody's cuts this off, such as that of
        ^C, the steps before it are what is recorded: a rest of a step would look like a step.
        """
        self._give_up_if_cut()
        self._handing_over = True
        yield
        self._handing_over = False

    def _give_up_if_cut(self) -> None:
        if self._handing_over:
            self._failed, store, self._store = True, self._store, None
            self._handing_over = False
            if store is not None:
                store.discard()

    def _drops_step(self) -> bool:
        if self._failed or not self.state.wants_step:
            self.state.buffer.rows.clear()
            self._losses, self._gradients, self._arguments = [], {}, {}
            self._left_out = True
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
            self._before += [_combined(each).hex() for each in self._begun]
            self._begun = []
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
                self._limit.hold(row)

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
            say(f"{error}\n    the run goes on, unrecorded from here")


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


def _not_reached(asked: tuple[int, int], ended: int) -> str:
    first, last = asked
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
    with suppress(Exception):  # not every tensor has a value, and subclasses raise what they like
        if loss.__class__ in PLAIN and loss.is_cpu:
            value = loss.item() if loss.numel() == 1 else None
        elif loss.numel() == 1:
            # To ask a device now would wait for it: a copy stays there until the step ends.
            value = loss.detach().clone()
    return value, mark


def _real(value: Any) -> float | None:
    try:
        value = value.item() if isinstance(value, torch.Tensor) else value
        return None if value is None or isinstance(value, complex) else float(value)
    except Exception:  # noqa: BLE001 - as above
        return None


# What is read of an iterator of torch's loader is private. A fact that a newer torch no longer has
# there is left out, and so is a loader whose objects raise where they are read.


def _workers_of(iterator: Any) -> int:
    return int(getattr(iterator, "_num_workers", 0))


def _own_init(init: Any) -> str | None:
    if isinstance(init, partial) and getattr(init.func, "__name__", "") == _OF_DATAPIPES:
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
    """Return a digest of each value that is left, by its kind and name; waits for devices.

    Left out is memory that nothing has written. Which memory that is only ops tell: without them
    (`knows_ops`) buffers are those that a checkpoint would hold of a model that is trained.
    """
    held = [each for at, one in enumerate(optimizers) for each in _of_optimizer(at, one)]
    held += _of_modules(state) if knows_ops else _buffers_of_trained(optimizers)
    tensors = [each for each in held if isinstance(each[2], torch.Tensor)]
    tensors = [each for each in tensors if not state.cache.is_never_written(each[2])]
    marks = joined([fingerprint_of(tensor) for _, _, tensor in tensors], OUTPUT)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for kind, name, value in held:
        if not isinstance(value, torch.Tensor):
            found[kind][name] = xxhash.xxh3_64_hexdigest(value_text(value).encode())
    for number, (kind, name, _) in enumerate(tensors):
        found[kind][name] = marks[number * OUTPUT : (number + 1) * OUTPUT].hex()[:OUTPUT]
    return dict(found)


def _of_modules(state: RecordingState) -> Held:
    for path, module in state.names.living():
        for name, value in module.named_parameters(recurse=False):
            yield _PARAMETERS, f"{path}.{name}", value
        for name, value in module.named_buffers(recurse=False):
            yield _BUFFERS, f"{path}.{name}", value


def _buffers_of_trained(optimizers: Iterable[Any]) -> Held:
    """Find models by what the program still holds, as nothing has followed their calls."""
    trained = dict.fromkeys(id(one) for each in optimizers for one in parameters_of(each))
    places = {parameter: place for place, parameter in enumerate(trained)}
    # `isinstance` would ask objects of the program for their `__class__`, and wake lazy ones.
    every = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    built = [each for each in every if "_modules" in vars(each)]  # its `__init__` was called
    inner = {id(child) for module in built for child in module.children()}
    roots = [
        (min(its), root)
        for root in built
        if id(root) not in inner
        and (its := [places[id(one)] for one in root.parameters() if id(one) in places])
    ]
    for number, (_, root) in enumerate(sorted(roots, key=itemgetter(0))):
        for path, module in root.named_modules():
            # No public API says which buffers are left out of a checkpoint. Without this name
            # all are compared, those whose memory nothing has written as well.
            left_out = getattr(module, "_non_persistent_buffers_set", ())
            for name, value in module.named_buffers(recurse=False):
                if name not in left_out:
                    own = f"{path}.{name}" if path else name
                    yield _BUFFERS, f"{own} of model {number}" if number else own, value


def _of_optimizer(number: int, optimizer: Any) -> Held:
    kind = type(optimizer).__name__
    own = f"{kind} {number}" if number else kind
    arguments, _ = arguments_of(optimizer)
    yield _OPTIMIZERS, f"{ARGUMENTS}{own}", arguments
    for place, parameter in enumerate(parameters_of(optimizer)):
        yield _PARAMETERS, f"parameter {place} of {own}", parameter
        its = optimizer.state.get(parameter, {})
        if isinstance(its, dict):
            for name, value in its.items():
                yield _OPTIMIZERS, f"{name} of parameter {place} of {own}", value
