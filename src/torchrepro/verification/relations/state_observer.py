"""What processes note for `resume`: the state with which each backward pass begins."""

from __future__ import annotations

import gc
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from torchrepro.ground.callers import address, frames, line, package, program_place
from torchrepro.trace.fingerprint import fingerprint, unobserved
from torchrepro.trace.frames import is_of_program
from torchrepro.trace.generator_states import GeneratorStates
from torchrepro.trace.hooks import on_worker_begun, watch_training, within_loaders_begun
from torchrepro.trace.op_facts import tensors_in
from torchrepro.verification.relations.checkpoint_observer import Checkpoints
from torchrepro.verification.relations.notes import Notes, numbered
from torchrepro.verification.relations.reachable import (
    NUMBERS,
    batch_digest,
    generators,
    global_generators,
    reached,
)

if TYPE_CHECKING:
    from torchrepro.seeding.generators import GeneratorKind

_MOST = 2000  # tensors of a program
_LINES = 300  # of the program that are followed after a checkpoint was opened
_WEIGHTS = (torch.Tensor, torch.nn.Parameter)
_lasting = ExitStack()  # as long as the process


def note_state(told: Mapping[str, Any]) -> None:
    """Note what a resumed run has to have again; the rest that is told is for `Checkpoints`.

    It is parameters, gradients, optimizers, schedulers, scalers, generators, epochs of samplers
    and batches as each backward pass begins, and buffers as the forward pass before it did.
    """
    notes = Notes(told["folder"])
    on_worker_begun(_lasting, notes.discard)
    watched = {name: its for name, its in told.items() if name != "folder"}
    state = _State(notes, Checkpoints(notes, **watched))
    state.checkpoints.when_read = state.follow
    on_worker_begun(_lasting, state.follow_no_more)
    watch_training(_lasting, state)
    within_loaders_begun(_lasting, state.loader_begins)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(state.module_begins)
    _lasting.callback(hook.remove)


class _State:
    # It is noted for each backward pass, and each step without one: a checkpoint may lie in a
    # window of accumulation, or after passes whose steps a scaler has skipped.

    def __init__(self, notes: Notes, checkpoints: Checkpoints) -> None:
        self._notes, self.checkpoints = notes, checkpoints
        self._step = 0
        self._passes = 0  # that have begun
        self._in_step = 0  # passes of the running step
        self._losses = 0  # of the running step
        self._names: dict[int, str] = {}  # of parameters
        self._models: dict[int, tuple[str, Any]] = {}  # kept, so that addresses stay theirs
        self._positions: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._iterations = Counter[str]()
        self._global = GeneratorStates()
        # What it is called, the generator, whose address stays its own, and what reads its state.
        self._own: dict[int, tuple[str, Any, Callable[[], Any]]] = {}
        self._objects: list[tuple[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._first: dict[str, str] = {}  # what was first seen of the program's own values
        self._moving: set[str] = set()  # which of them have changed
        self._lines_left = 0  # of the program that are followed; none but after a checkpoint
        self._line = ""  # of them the one that runs
        self._followed: list[tuple[str, str, Any]] = []
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._buffers: dict[str, str] = {}
        self._called: set[int] = set()
        self._seen: dict[str, dict[str, None]] = {}
        self._drew: set[str] = set()
        self._batches: list[Any] = []

    def follow(self) -> None:
        """Note which lines of the program change a state, up to the first forward pass."""
        if self._passes or sys.gettrace() not in (None, self._line_begins):
            return
        self._line, self._lines_left = program_place(sys._getframe(1)), _LINES  # noqa: SLF001
        self._sample()
        for frame in frames():
            if is_of_program(frame.f_code):
                frame.f_trace = self._line_begins
        sys.settrace(self._line_begins)

    def _line_begins(self, frame: Any, event: str, _value: Any) -> Any:
        is_generated = frame.f_code.co_filename[:1] == "<" and package(frame) != "__main__"
        if is_generated or not is_of_program(frame.f_code):
            return None
        with suppress(Exception):  # an object that is only half made raises what it likes
            self._sample()
        self._line = line(frame)
        self._lines_left -= 1
        if self._lines_left <= 0:
            self.follow_no_more()
        return self._line_begins

    def follow_no_more(self) -> None:
        self._line = ""
        if sys.gettrace() == self._line_begins:
            sys.settrace(None)

    @contextmanager
    def loader_begins(self, loader: Any) -> Iterator[None]:
        self._sample(loader)
        yield
        # A loader without workers that draws no order draws a number that nothing depends on: its
        # sampler has no generator.
        self._sample(
            loader, counts=bool(loader.num_workers) or hasattr(loader.sampler, "generator")
        )
        if loader.persistent_workers:  # the iterator is the one of the epoch before
            # No public place has it. Without it, positions go on counting through the epochs.
            self._positions.pop(getattr(loader, "_iterator", loader), None)
        self._objects = _objects_of_interest()

    def batch_begins(self, iterator: Any) -> None:
        self._sample(getattr(iterator, "_dataset", None))

    def batch_ends(self, iterator: Any, batch: Any) -> None:
        where = program_place(sys._getframe(2))  # noqa: SLF001 - as `callers` does
        if batch is not None:
            if iterator not in self._positions:
                self._iterations[where] += 1
                self._positions[iterator] = [self._iterations[where], 0]
            place = self._positions[iterator]
            place[1] += 1
            self._batches.append([where, *place, batch_digest(batch)])
        self._sample()

    def module_begins(self, module: Any, _args: Any) -> None:
        # The buffers of a model that is about to be trained are noted once for a pass.
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if address(module) in self._called:
            return
        self.follow_no_more()
        first = not self._called
        self._called |= {address(each) for each in module.modules()}
        new = address(module) not in self._models
        beside = f"{type(module).__name__}." if self._models else ""
        label, _ = self._models.setdefault(address(module), (beside, module))
        for name, parameter in module.named_parameters() if new else ():
            self._names.setdefault(address(parameter), f"{label}{name}")
        with unobserved():
            for name, buffer in module.named_buffers():
                self._buffers[f"{label}{name}"] = fingerprint(buffer).hex()
        if first:
            self._sample()

    def backward_begins(self, losses: Any) -> None:
        with unobserved():
            digest = [fingerprint(each).hex() for each in tensors_in(losses)]
        self._pass_begins(digest)
        self._losses += len(digest)

    def backward_ends(self) -> None:
        self._buffers, self._called = {}, set()  # a forward pass within it was no new one

    def optimizer_begins(self, _optimizer: Any, _closure: Any) -> None:
        if not self._in_step:
            self._pass_begins([])

    def optimizer_ends(self, _optimizer: Any) -> None:
        self._step += 1
        self._in_step = self._losses = 0
        self._sample()

    def _pass_begins(self, loss: list[str]) -> None:
        self._sample()
        self.follow_no_more()
        if self._passes < 2 or not self._objects:  # noqa: PLR2004 - some are made in the first step
            self._objects = _objects_of_interest()
        with unobserved():
            state = self._of_optimizers()
        # A generator was found in variables of any function: here they are the same in all runs.
        found = _generators().items()
        names = {self._own[at][0]: name for at, (name, *_) in found if at in self._own}
        self._notes.add(
            step=self._step,
            within=self._in_step,
            losses=self._losses,
            loss=loss,
            **state,
            buffers=self._buffers,
            **_fields_of(self._objects),
            generators={names.get(name, name): [*its] for name, its in self._seen.items()},
            drew=sorted(names.get(name, name) for name in self._drew),
            batches=self._batches,
            followed=[(names.get(name, name), *its) for name, *its in self._followed],
            is_followed=self._lines_left > 0,
        )
        self._followed = []
        self.checkpoints.pass_begins(self._passes)
        self._passes += 1
        self._in_step += 1
        self._begin_pass()

    def _of_optimizers(self) -> dict[str, Any]:
        parameters, gradients, state = {}, {}, dict[str, str]()
        known: dict[int, Any] = {}
        optimizers = [each for kind, each in self._objects if kind == "optimizer"]
        # A wrapper shares its groups with what it wraps.
        unlike = {address(each.param_groups): each for each in optimizers}.values()
        groups = [(each, its) for each in unlike for its in each.param_groups]
        for number, (optimizer, group) in enumerate(groups):
            for place, each in enumerate(group["params"]):
                name = self._names.get(address(each), f"{number}.{place}")
                parameters[name] = fingerprint(each).hex()
                # A gradient of zeros is as good as none. Any of a distributed one is collective.
                if type(each.grad) is torch.Tensor and bool(each.grad.any()):
                    gradients[name] = fingerprint(each.grad).hex()
                its = {**optimizer.state.get(each, {})}
                for key, value in its.items():
                    is_tensor = isinstance(value, torch.Tensor)
                    state[f"{key} of {name}"] = (
                        fingerprint(value).hex() if is_tensor else repr(value)
                    )
                known |= {address(value): value for value in (each, each.grad, *its.values())}
            for key, value in group.items():
                if isinstance(value, int | float | tuple):
                    state[f"{key} of group {number}"] = repr(value)
        shapes = {value.shape for value in known.values() if isinstance(value, torch.Tensor)}
        own = self._own_values(known, shapes)
        return {"parameters": parameters, "gradients": gradients, "optimizer": state, "own": own}

    def _own_values(self, known: dict[int, Any], shapes: set[Any]) -> dict[str, str]:
        # Numbers of the program, how much is in its containers, and weights that nothing trains: at
        # first all, then those that have changed.
        found: dict[str, str] = {}
        for name, value in reached(_roots()):
            tensors = [("", value)]
            if isinstance(value, torch.nn.Module):
                tensors = [(f".{each}", its) for each, its in value.named_parameters()]
            elif type(value) in NUMBERS:
                found.setdefault(name, repr(value))
            elif isinstance(value, list | dict | deque):
                found.setdefault(f"len({name})", repr(len(value)))
            for each, its in tensors:
                is_weight = type(its) in _WEIGHTS and its.ndim > 1 and its.shape in shapes
                if is_weight and address(its) not in known and len(known) < _MOST:
                    known[address(its)] = its
                    found[f"weights {name}{each}"] = fingerprint(its).hex()
        for name, text in found.items():
            if self._first.setdefault(name, text) != text:
                self._moving.add(name)
        return {name: found[name] for name in found if name in self._moving or not self._passes}

    def _sample(self, root: Any = None, *, counts: bool = True) -> None:
        """Note the states of all generators; `counts` is whether a draw since the last counts."""
        with unobserved():
            found: dict[str, Any] = dict(self._global.read())
            for number, (name, generator, kind) in _generators(root).items():
                if number not in self._own:
                    taken = {each for each, *_ in self._own.values()}
                    label = name if name not in taken else f"{name}#{len(taken)}"
                    self._own[number] = label, generator, kind.slot(generator).read
            drawn_from: dict[str, Any] = {"torch": torch.default_generator}
            for name, generator, read in self._own.values():
                state, drawn_from[name] = read(), generator
                if isinstance(state, torch.Tensor):
                    found[name] = fingerprint(state).hex()
                else:
                    found[name] = xxhash.xxh3_128_hexdigest(repr(state).encode())
        for name, now in found.items():
            self._seen.setdefault(name, {}).pop(now, None)
            self._seen[name][now] = None  # as the last one
            if counts and self._last.get(name, now) != now and not _is_fresh(drawn_from.get(name)):
                self._drew.add(name)
        if self._line:
            for sort, its in _fields_of(_objects_of_interest()).items():
                found |= {f"{sort} {name}": fields for name, fields in its.items()}
            changed = [name for name, now in found.items() if self._last.get(name, now) != now]
            self._followed += [(name, self._line, found[name]) for name in changed]
        self._last = found


def _is_fresh(generator: Any) -> bool:
    """Whether nothing was drawn from a generator of torch since it was seeded."""
    if not isinstance(generator, torch.Generator):
        return False
    with unobserved():
        seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
        return torch.equal(seeded.get_state(), generator.get_state())


_PLAIN = (int, float, str, bool, list, tuple)
_KINDS = {
    "optimizer": torch.optim.Optimizer,
    "scheduler": LRScheduler,
    "scaler": torch.amp.GradScaler,
    "sampler": Sampler,
}
_NEEDED = {"optimizer": "param_groups", "sampler": "epoch"}
"""Kind -> the attribute without which one is not looked at, such as one that is only half made."""


def _objects_of_interest() -> list[tuple[str, Any]]:
    # The oldest first. There are many objects of few types.
    alive = [each for number in (2, 1, 0) for each in gc.get_objects(number)]
    types, bases = {*map(type, alive)}, _KINDS.items()
    kinds = {its: kind for its in types for kind, base in bases if issubclass(its, base)}
    found = [(kinds[type(each)], each) for each in alive if type(each) in kinds]
    return [(kind, each) for kind, each in found if hasattr(each, _NEEDED.get(kind, "__class__"))]


def _fields_of(objects: list[tuple[str, Any]]) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS if kind != "optimizer"}
    seen = Counter[str]()
    for kind, each in objects:
        if kind != "optimizer":
            its = {"epoch": each.epoch} if kind == "sampler" else each.state_dict()
            plain = {key: repr(value) for key, value in its.items() if isinstance(value, _PLAIN)}
            found[kind][numbered(type(each).__name__, seen)] = plain
    return found


def _generators(root: Any = None) -> dict[int, tuple[str, Any, GeneratorKind]]:
    # What the program calls each of its generators that can be reached.
    shared = {address(each) for each in global_generators().values()}
    found = {address(value): (name, value, kind) for name, value, kind in generators(_roots(root))}
    return {number: each for number, each in found.items() if number not in shared}


def _roots(root: Any = None) -> Iterator[tuple[str, Any]]:
    # What is in variables of the program's functions and in its modules.
    yield "loader", root
    for frame in frames():
        if is_of_program(frame.f_code):
            for names in (frame.f_locals, frame.f_globals):
                yield from (pair for pair in [*names.items()] if pair[0][:2] != "__")
