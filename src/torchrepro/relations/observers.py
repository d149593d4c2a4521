"""What a process of a run notes of itself for a relation, each in a file of its own.

For `compile` it is what each region that torch.compile takes returns, and the modules outside of
them. For `resume` it is the state with which each step begins, and the checkpoints.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path, PurePath
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler, SequentialSampler

from torchrepro.callers import address, frames, line, package, program_place
from torchrepro.imports import AfterImport
from torchrepro.patching import wrap
from torchrepro.seeding.call_listeners import on_modules_called
from torchrepro.seeding.generators import Kind, generator_kind
from torchrepro.trace.buffer import statistics
from torchrepro.trace.fingerprint import fingerprint, unobserved
from torchrepro.trace.fingerprint_cache import GeneratorStates
from torchrepro.trace.frames import is_of_program
from torchrepro.trace.hooks import on_worker_begun, watch_training, within_loaders_begun
from torchrepro.trace.op_facts import tensors_in
from torchrepro.verification.file_notes import LEFT_OUT

_TENSORS = 64  # of one value that are noted
_MOST = 2000  # tensors of a program
_LINES = 300  # of the program that are followed after a checkpoint was opened
_OBJECTS, _DEEPEST = 2000, 4  # objects that are looked at in search of generators, and how deep
_lasting = ExitStack()  # as long as the process


class Notes:
    """The file of what this process notes."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._process = os.getpid()
        self._file: Any = None

    def add(self, **values: Any) -> None:
        """Write one line, at once: the process may be killed. A forked child writes none."""
        if os.getpid() != self._process:
            return
        if self._file is None:
            rank = os.environ.get("RANK", "0")
            place = self._folder / f"{rank}-{self._process}.jsonl"
            self._file = place.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps(values) + "\n")

    def discard(self) -> None:
        """Remove what was noted, and note nothing more; a forked child changes nothing."""
        if self._file is not None and os.getpid() == self._process:
            Path(self._file.name).unlink()
        self._process = 0


class _Training:
    """Hears of a training loop (see `watch_training`), and notes nothing of it."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._step = 0

    def _ignore(self, *_: Any) -> None: ...

    backward_begins: Any = _ignore
    backward_ends: Any = _ignore
    batch_begins: Any = _ignore
    batch_ends: Any = _ignore


def _numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def set_options(told: Mapping[str, Any]) -> None:
    """Set `options` of torch.compile to true, each once its module is imported."""

    def set_those(module: str) -> None:
        for option in told["options"]:
            if option.rpartition(".")[0] == module:
                setattr(sys.modules[module], option.rpartition(".")[2], True)

    AfterImport([each.rpartition(".")[0] for each in told["options"]], set_those).watch_all()


def note_regions(told: Mapping[str, Any]) -> None:
    """Note regions; `only`, if it is told, is the child of a region that alone is compiled."""
    notes = Notes(told["folder"])
    on_worker_begun(_lasting, notes.discard)
    regions = _Regions(notes, told.get("only"))
    wrap(_lasting, torch, "compile", regions.watched_compile)
    _lasting.enter_context(on_modules_called(regions.module_returned))
    watch_training(_lasting, regions)


class _Regions(_Training):
    # A region is called by the same name whether it is compiled or not: `torch.compile` is wrapped,
    # and what it returns is watched. Of a region that is not compiled the modules are noted too.

    def __init__(self, notes: Notes, only: tuple[str, str] | None) -> None:
        super().__init__(notes)
        self._only = only
        self._now = threading.local()  # how deep within regions a thread is
        self._names: dict[int, tuple[str, str]] = {}  # of modules, and their lines
        self._kept: list[Any] = []  # so that no other object gets the address of one
        self._owners: dict[int, str] = {}
        self._labels = Counter[str]()

    def watched_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(model: Any = None, **options: Any) -> Any:  # noqa: A001 - it stands for that
            if model is None:
                return lambda given: compile(given, **options)
            place = program_place(sys._getframe(1))  # noqa: SLF001 - as `callers` does
            is_bound = not isinstance(model, torch.nn.Module)
            module = getattr(model, "__self__", None) if is_bound else model
            if isinstance(module, torch.nn.Module):
                label = self._register(module, place)
                known = self._names.pop(address(module))
                is_split = self._is_split(original, module, label, options)
                compiled = model if is_split else original(model, **options)
                if is_bound:  # `module.compile()`, which compiles its hooks
                    return self._watched(compiled, label, place)
                self._kept.append(compiled)
                self._names[address(compiled)] = known
                compiled.register_forward_pre_hook(lambda *_: self._enter(1))
                compiled.register_forward_hook(lambda *_: self._enter(-1), always_call=True)
                return compiled
            if isinstance(getattr(model, "__code__", None), type(compile.__code__)):
                code = model.__code__
                place = f"{code.co_filename}:{code.co_firstlineno}"
            name = getattr(model, "__qualname__", type(model).__name__).replace("<locals>.", "")
            label = _numbered(name, self._labels)
            self._notes.add(region=label, where=place, children={})
            return self._watched(original(model, **options), label, place)

        return compile

    def _is_split(self, original: Callable[..., Any], model: Any, label: str, options: Any) -> bool:
        if self._only is None or self._only[0] != label:
            return False
        child = model.get_submodule(self._only[1])
        child.forward = original(child.forward, **options)
        return True

    def _register(self, model: Any, place: str) -> str:
        label = _numbered(type(model).__name__, self._labels)
        paths = {}
        for path, module in model.named_modules():
            self._names[address(module)] = f"{label}.{path}".strip("."), place
            self._kept.append(module)
            paths[path] = [f"{path}.{name}".strip(".") for name, _ in module.named_children()]
        for parameter in model.parameters():
            self._owners[address(parameter)] = label
        self._notes.add(region=label, where=place, children=paths)
        return label

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
        known = self._names.get(address(module))
        if known is not None:
            self._note(*known, "forward", result)
        elif not getattr(self._now, "depth", 0):
            place = program_place(sys._getframe(1))  # noqa: SLF001 - as `callers` does
            self._note(type(module).__name__, place, "forward", result)

    def _note(self, unit: str, where: str, phase: str, value: Any) -> None:
        with unobserved():
            outputs = [
                (str(t.dtype).removeprefix("torch."), fingerprint(t).hex(), *statistics(t))
                for t in tensors_in(value)[:_TENSORS]
            ]
        if outputs:
            self._notes.add(unit=unit, where=where, step=self._step, phase=phase, outputs=outputs)

    def backward_begins(self, losses: Any) -> None:
        place = program_place(sys._getframe(2))  # noqa: SLF001 - as `callers` does
        self._note("loss", place, "forward", losses)

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


def note_state(told: Mapping[str, Any]) -> None:
    """Note what a resumed run has to have again; the rest that is told is for `_Checkpoints`.

    It is parameters, gradients, optimizers, schedulers, scalers, generators, epochs of samplers
    and batches as each backward pass begins, and buffers as the forward pass before it did.
    """
    notes = Notes(told["folder"])
    on_worker_begun(_lasting, notes.discard)
    watched = {name: its for name, its in told.items() if name != "folder"}
    state = _State(notes, _Checkpoints(notes, **watched))
    state.checkpoints.when_read = state.follow
    watch_training(_lasting, state)
    within_loaders_begun(_lasting, state.loader_begins)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(state.module_begins)
    _lasting.callback(hook.remove)


class _State(_Training):
    # It is noted for each backward pass, and each step without one: a checkpoint may lie in a
    # window of accumulation, or after passes whose steps a scaler has skipped.

    def __init__(self, notes: Notes, checkpoints: _Checkpoints) -> None:
        super().__init__(notes)
        self.checkpoints = checkpoints
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
            self._follow_no_more()
        return self._line_begins

    def _follow_no_more(self) -> None:
        self._line = ""
        if sys.gettrace() == self._line_begins:
            sys.settrace(None)

    @contextmanager
    def loader_begins(self, loader: Any) -> Iterator[None]:
        self._sample(loader)
        yield
        # A loader without workers that draws no order draws a number that nothing depends on.
        alone = isinstance(loader.sampler, SequentialSampler) or not hasattr(
            loader.sampler, "generator"
        )
        self._sample(loader, counts=bool(loader.num_workers) or not alone)
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
            with unobserved():
                each = b"".join(fingerprint(tensor) for tensor in tensors_in(batch))
            self._batches.append([where, *place, xxhash.xxh3_128_hexdigest(each)])
        self._sample()

    def module_begins(self, module: Any, _args: Any) -> None:
        # The buffers of a model that is about to be trained are noted once for a pass.
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if address(module) in self._called:
            return
        self._follow_no_more()
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
        self._follow_no_more()
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
                state |= {f"{key} of {name}": _text_of(value) for key, value in its.items()}
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
        for name, value in _reached():
            tensors = [("", value)]
            if isinstance(value, torch.nn.Module):
                tensors = [(f".{each}", its) for each, its in value.named_parameters()]
            elif type(value) in _NUMBERS:
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
            for name, _, read in self._own.values():
                state = read()
                if isinstance(state, torch.Tensor):
                    found[name] = fingerprint(state).hex()
                else:
                    found[name] = xxhash.xxh3_128_hexdigest(repr(state).encode())
        for name, now in found.items():
            self._seen.setdefault(name, {}).pop(now, None)
            self._seen[name][now] = None  # as the last one
            if counts and self._last.get(name, now) != now:
                self._drew.add(name)
        if self._line:
            for sort, its in _fields_of(_objects_of_interest()).items():
                found |= {f"{sort} {name}": fields for name, fields in its.items()}
            changed = [name for name, now in found.items() if self._last.get(name, now) != now]
            self._followed += [(name, self._line, found[name]) for name in changed]
        self._last = found


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


def _text_of(value: Any) -> str:
    return fingerprint(value).hex() if isinstance(value, torch.Tensor) else repr(value)


def _fields_of(objects: list[tuple[str, Any]]) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS if kind != "optimizer"}
    seen = Counter[str]()
    for kind, each in objects:
        if kind != "optimizer":
            its = {"epoch": each.epoch} if kind == "sampler" else each.state_dict()
            plain = {key: repr(value) for key, value in its.items() if isinstance(value, _PLAIN)}
            found[kind][_numbered(type(each).__name__, seen)] = plain
    return found


_GLOBAL = (torch.default_generator, getattr(random.getstate, "__self__", None))


def _generators(root: Any = None) -> dict[int, tuple[str, Any, Kind]]:
    # What the program calls each of its generators that can be reached.
    found: dict[int, tuple[str, Any, Kind]] = {}
    for name, value in _reached(root):
        kind = None if isinstance(value, random.SystemRandom) else generator_kind(value)
        if kind is not None and not any(value is shared for shared in _GLOBAL):
            found[address(value)] = name, value, kind
    return found


def _reached(root: Any = None) -> Iterator[tuple[str, Any]]:
    # What is in variables of the program's functions, in its modules, and in what is in these.
    seen: set[int] = set()
    todo: list[tuple[str, Any, int]] = []
    for frame in frames():
        if is_of_program(frame.f_code):
            names = frame.f_locals
            todo += [(name, value, 0) for name, value in [*names.items()]]
            if names is not frame.f_globals:
                todo += [(name, value, 0) for name, value in [*frame.f_globals.items()]]
    todo = [("loader", root, 0), *reversed(todo)]
    while todo and len(seen) < _OBJECTS:
        name, value, depth = todo.pop()
        if type(value) in _NUMBERS:
            yield name, value  # of which many are one object
        elif address(value) not in seen and not isinstance(value, type(sys) | type):
            seen.add(address(value))
            yield name, value
            if (
                depth < _DEEPEST
                and generator_kind(value) is None
                and not isinstance(value, _LEAVES)
            ):
                todo += [(f"{name}{key}", its, depth + 1) for key, its in _parts_of(value)]


_NUMBERS = (int, float)
_WEIGHTS = (torch.Tensor, torch.nn.Parameter)
_LEAVES = (torch.Tensor, str, bytes)


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        its = enumerate(value[:100])
        return [(f"[{place}]", each) for place, each in its if type(each) not in _NUMBERS]
    if isinstance(value, dict):
        items = [*value.items()][:100]
        return [(f"[{key!r}]", its) for key, its in items if isinstance(key, str | int)]
    try:
        attributes = vars(value)
    except TypeError:
        return []
    return [(f".{name}", its) for name, its in [*attributes.items()][:200]]


_LONGEST_WAIT = (
    3  # backward passes after which a checkpoint has settled although new files keep appearing
)
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x89HDF")
_LONGEST_HEADER = 100_000_000  # of safetensors: https://huggingface.co/docs/safetensors


class _Checkpoints:
    """Notes each checkpoint below `tree`, and kills the process once that of `kill` has settled.

    `pattern` says which files are checkpoints, by their path or name; without one those are that
    begin as what torch.save, pickle, safetensors or HDF5 writes. `kill` is a number of backward
    passes: the first checkpoint that is written after so many is the last that the process writes.

    The folder is scanned before every pass: Python's audit events hear neither ``torch.save(path)``
    nor safetensors, which open files in C. A pass that wrote files may have begun a checkpoint that
    later ones complete: a framework writes a folder file by file, and may do so while training
    goes on. It has settled after a pass without a new name, or after three.
    """

    def __init__(self, notes: Notes, tree: str, pattern: str = "", kill: int | None = None) -> None:
        self._notes = notes
        self.when_read: Callable[[], object] = tuple  # called as a checkpoint is opened
        self._tree = tree
        self._pattern = pattern
        self._kill = kill
        self._known = self._scan()
        self._names = set(self._known)
        self._unsettled: list[int] = []
        self._begun = 0
        self._is_looking = False
        sys.addaudithook(self._hear)
        atexit.register(lambda: self._note_changes(self._begun))

    def pass_begins(self, ended: int) -> None:
        """Look for checkpoints before a backward pass, before which `ended` were made."""
        self._begun = ended + 1
        changed, has_new_name = self._note_changes(ended)
        for saved in [*self._unsettled]:
            is_last = self._kill is not None and saved >= self._kill
            waits = ended < saved + (_LONGEST_WAIT if has_new_name else 1)
            if waits or (is_last and self._is_open()):
                continue
            self._unsettled.remove(saved)
            self._notes.add(settled=saved)
            if is_last:
                self._notes.add(killed=ended)
                # The run has a session of its own: all of its processes end, as if a machine did.
                if os.getsid(0) == os.getpgrp():
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        if changed:
            self._unsettled.append(ended)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        # Which checkpoint it goes on from: none that is opened later.
        if event != "open" or self._begun or self._is_looking or str(args[1])[:1] != "r":
            return
        self._is_looking = True  # which opens the file
        with suppress(OSError, ValueError, TypeError):  # what is no path
            path = os.path.relpath(os.fsdecode(args[0]), self._tree)
            if path in self._known and self._is_checkpoint(path):
                self._notes.add(read=path)
                self.when_read()
        self._is_looking = False

    def _note_changes(self, saved: int) -> tuple[bool, bool]:
        found = self._scan()
        changed = [
            path
            for path, state in found.items()
            if self._known.get(path) != state and self._is_checkpoint(path)
        ]
        new = [path for path in changed if path not in self._names]
        self._known = found
        self._names.update(found)
        if changed:
            self._notes.add(saved=saved, files=sorted(changed))
        return bool(changed), bool(new)

    def _scan(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for folder, folders, files in os.walk(self._tree):
            folders[:] = [name for name in folders if name not in LEFT_OUT]
            for name in files:
                path = os.path.join(folder, name)  # noqa: PTH118 - many of them
                with suppress(OSError):  # it is gone again
                    its = os.lstat(path)
                    state = its.st_mtime_ns, its.st_size, its.st_ino
                    found[os.path.relpath(path, self._tree)] = state
        return found

    def _is_checkpoint(self, path: str) -> bool:
        if self._pattern:
            return PurePath(path).match(self._pattern)
        whole = Path(self._tree, path)
        if whole.is_symlink():
            return False
        try:
            with whole.open("rb") as file:
                head = file.read(9)
        except OSError:
            return False
        if head.startswith(_BEGINNINGS):
            return True
        # Safetensors begin with the length of a header, which is JSON.
        return head[8:] == b"{" and 0 < int.from_bytes(head[:8], "little") < _LONGEST_HEADER

    def _is_open(self) -> bool:
        """Whether a process of this run has a checkpoint open for writing, where that is known."""
        session = os.getsid(0)
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if os.getsid(int(process.name)) != session:
                    continue
                for link in (process / "fd").iterdir():
                    with suppress(OSError, ValueError, IndexError):
                        path = os.path.realpath(link)
                        if not path.startswith(self._tree + os.sep):
                            continue
                        flags = (process / "fdinfo" / link.name).read_text().split("flags:")[1]
                        if int(flags.split()[0], 8) & os.O_ACCMODE and self._is_checkpoint(
                            os.path.relpath(path, self._tree)
                        ):
                            return True
        return False
