"""Observes the state of a program at each backward pass, for the relation `resume`.

`Checkpoints` observes the checkpoints that the program writes and opens.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from torchrepro.ground.callers import address, frames, line, package, program_line
from torchrepro.lock.file_notes import SKIPPED_FOLDERS
from torchrepro.trace.fingerprint import fingerprint, unobserved
from torchrepro.trace.frames import is_of_program
from torchrepro.trace.generator_states import GeneratorStates
from torchrepro.trace.hooks import on_worker_started, watch_training, wrap_loader_iteration
from torchrepro.trace.op_facts import tensors_in
from torchrepro.verification.relations.notes import Notes, numbered
from torchrepro.verification.relations.reachable import (
    NUMBERS,
    batch_digest,
    generators,
    global_generators,
    reached,
    text_digest,
)

if TYPE_CHECKING:
    from torchrepro.seeding.generators import GeneratorKind

_MOST = 2000  # the most tensors of a program that are noted
_LINES = 300  # the most program lines to follow after a checkpoint is opened
_WEIGHTS = (torch.Tensor, torch.nn.Parameter)
_LONGEST_WAIT = 3  # passes after which a checkpoint counts as complete, even with new files
_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"\x89HDF")
_LONGEST_HEADER = 100_000_000  # of safetensors: https://huggingface.co/docs/safetensors
_lasting = ExitStack()  # as long as the process


def note_state(arguments: Mapping[str, Any]) -> None:
    """Note in `folder` the state that a resumed run must restore.

    At each backward pass, this state consists of parameters, gradients, optimizers, schedulers,
    scalers, generators, epochs of samplers, and batches. Buffers are noted at the start of the
    forward pass. The other keys of `arguments` are parameters of `Checkpoints`.
    """
    notes = Notes(arguments["folder"])
    on_worker_started(_lasting, notes.discard)
    of_checkpoints = {name: value for name, value in arguments.items() if name != "folder"}
    state = _State(notes, Checkpoints(notes, **of_checkpoints))
    state.checkpoints.on_read = state.follow
    on_worker_started(_lasting, state.stop_following)
    watch_training(_lasting, state)
    wrap_loader_iteration(_lasting, state.loader_begins)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(state.module_begins)
    _lasting.callback(hook.remove)


class _State:
    # The state is noted for each backward pass, because a checkpoint may be saved while gradients
    # accumulate, or after a scaler skipped steps. It is also noted for steps without such a pass.

    def __init__(self, notes: Notes, checkpoints: Checkpoints) -> None:
        self._notes, self.checkpoints = notes, checkpoints
        self._step = 0
        self._passes = 0  # passes that have begun
        self._in_step = 0  # passes in the current step
        self._losses = 0  # losses in the current step
        self._names: dict[int, str] = {}  # address -> name of a parameter
        self._models: dict[int, tuple[str, Any]] = {}  # kept alive, so that addresses stay unique
        self._positions: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._iterations = Counter[str]()
        self._global = GeneratorStates()
        # Address -> name, generator and reader. The generator is kept alive to keep its address.
        self._own: dict[int, tuple[str, Any, Callable[[], Any]]] = {}
        self._objects: list[tuple[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._first: dict[str, str] = {}  # the first values of the program's own variables
        self._moving: set[str] = set()  # the variables whose values have changed
        self._lines_left = 0  # lines still to follow; set when a checkpoint is opened
        self._line = ""  # the followed line that runs now
        self._followed: list[tuple[str, str, Any]] = []
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._buffers: dict[str, str] = {}
        self._called: set[int] = set()
        self._seen: dict[str, dict[str, None]] = {}
        self._drew: set[str] = set()
        self._batches: list[Any] = []

    def follow(self) -> None:
        """Trace the program until the first forward pass, and note lines that change a state."""
        if self._passes or sys.gettrace() not in (None, self._line_begins):
            return
        self._line, self._lines_left = program_line(sys._getframe(1)), _LINES  # noqa: SLF001
        self._sample()
        for frame in frames():
            if is_of_program(frame.f_code):
                frame.f_trace = self._line_begins
        sys.settrace(self._line_begins)

    def _line_begins(self, frame: Any, event: str, _value: Any) -> Any:
        is_generated = frame.f_code.co_filename[:1] == "<" and package(frame) != "__main__"
        if is_generated or not is_of_program(frame.f_code):
            return None
        with suppress(Exception):  # a partly initialized object can raise any exception
            self._sample()
        self._line = line(frame)
        self._lines_left -= 1
        if self._lines_left <= 0:
            self.stop_following()
        return self._line_begins

    def stop_following(self) -> None:
        self._line = ""
        if sys.gettrace() == self._line_begins:
            sys.settrace(None)

    @contextmanager
    def loader_begins(self, loader: Any) -> Iterator[None]:
        self._sample(loader)
        yield
        # A loader without workers and without a shuffling sampler draws a seed that is never used.
        is_used = bool(loader.num_workers) or hasattr(loader.sampler, "generator")
        self._sample(loader, counts=is_used)
        if loader.persistent_workers:  # the iterator of the previous epoch is reused
            # `_iterator` is private. The position is removed, so that an epoch counts from 0.
            self._positions.pop(getattr(loader, "_iterator", loader), None)
        self._objects = _objects_of_interest()

    def batch_begins(self, iterator: Any) -> None:
        self._sample(getattr(iterator, "_dataset", None))

    def batch_ends(self, iterator: Any, batch: Any) -> None:
        source_line = program_line(sys._getframe(2))  # noqa: SLF001 - as `callers` does
        if batch is not None:
            if iterator not in self._positions:
                self._iterations[source_line] += 1
                self._positions[iterator] = [self._iterations[source_line], 0]
            position = self._positions[iterator]  # the epoch, and the batch in the epoch
            position[1] += 1
            self._batches.append([source_line, *position, batch_digest(batch)])
        self._sample()

    def module_begins(self, module: Any, _args: Any) -> None:
        # The buffers of a model in training are noted once for each pass.
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if address(module) in self._called:
            return
        self.stop_following()
        is_first = not self._called
        self._called |= {address(part) for part in module.modules()}
        is_new = address(module) not in self._models
        prefix = f"{type(module).__name__}." if self._models else ""
        label, _ = self._models.setdefault(address(module), (prefix, module))
        if is_new:
            for name, parameter in module.named_parameters():
                self._names.setdefault(address(parameter), f"{label}{name}")
        with unobserved():
            for name, buffer in module.named_buffers():
                self._buffers[f"{label}{name}"] = fingerprint(buffer).hex()
        if is_first:
            self._sample()

    def backward_begins(self, losses: Any) -> None:
        with unobserved():
            digests = [fingerprint(loss).hex() for loss in tensors_in(losses)]
        self._pass_begins(digests)
        self._losses += len(digests)

    def backward_ends(self) -> None:
        self._buffers, self._called = {}, set()  # forget recomputed forward passes

    def optimizer_begins(self, _optimizer: Any, _closure: Any) -> None:
        if not self._in_step:
            self._pass_begins([])

    def optimizer_ends(self, _optimizer: Any) -> None:
        self._step += 1
        self._in_step = self._losses = 0
        self._sample()

    def _pass_begins(self, loss: list[str]) -> None:
        reachable = self._sample().items()
        self.stop_following()
        if self._passes < 2 or not self._objects:  # noqa: PLR2004 - the first step may create some
            self._objects = _objects_of_interest()
        with unobserved():
            state = self._of_optimizers()
        # A generator is named after the first variable that refers to it, which may be in any
        # function. At this point all runs have the same variables, and so the same names.
        names = {self._own[key][0]: name for key, (name, *_) in reachable if key in self._own}
        self._notes.add(
            step=self._step,
            within=self._in_step,
            losses=self._losses,
            loss=loss,
            **state,
            buffers=self._buffers,
            **_fields_of(self._objects),
            generators={names.get(name, name): [*states] for name, states in self._seen.items()},
            drew=sorted(names.get(name, name) for name in self._drew),
            batches=self._batches,
            followed=[(names.get(name, name), *change) for name, *change in self._followed],
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
        optimizers = [optimizer for kind, optimizer in self._objects if kind == "optimizer"]
        # A wrapper and the wrapped optimizer have the same groups: one of the two is enough.
        distinct = {address(optimizer.param_groups): optimizer for optimizer in optimizers}.values()
        groups = [(optimizer, group) for optimizer in distinct for group in optimizer.param_groups]
        for number, (optimizer, group) in enumerate(groups):
            for index, parameter in enumerate(group["params"]):
                name = self._names.get(address(parameter), f"{number}.{index}")
                parameters[name] = fingerprint(parameter).hex()
                gradient = parameter.grad
                # A zero gradient is equivalent to None. `any` of a DTensor would communicate.
                if type(gradient) is torch.Tensor and bool(gradient.any()):
                    gradients[name] = fingerprint(gradient).hex()
                moments = {**optimizer.state.get(parameter, {})}
                for key, value in moments.items():
                    is_tensor = isinstance(value, torch.Tensor)
                    mark = fingerprint(value).hex() if is_tensor else repr(value)
                    state[f"{key} of {name}"] = mark
                of_parameter = (parameter, gradient, *moments.values())
                known |= {address(value): value for value in of_parameter}
            for key, value in group.items():
                if isinstance(value, int | float | tuple):
                    state[f"{key} of group {number}"] = repr(value)
        shapes = {value.shape for value in known.values() if isinstance(value, torch.Tensor)}
        values = self._own_values(known, shapes)
        return {"parameters": parameters, "gradients": gradients, "optimizer": state, "own": values}

    def _own_values(self, known: dict[int, Any], shapes: set[Any]) -> dict[str, str]:
        """Return the program's own numbers, sizes of containers, and weights that are not trained.

        Before the first pass, returns all values. Later, returns only values that have changed.
        """
        texts: dict[str, str] = {}
        for name, value in reached(_roots()):
            tensors = [("", value)]
            if isinstance(value, torch.nn.Module):
                tensors = [(f".{path}", weight) for path, weight in value.named_parameters()]
            elif type(value) in NUMBERS:
                texts.setdefault(name, repr(value))
            elif isinstance(value, list | dict | deque):
                texts.setdefault(f"len({name})", repr(len(value)))
            for path, tensor in tensors:
                is_weight = type(tensor) in _WEIGHTS and tensor.ndim > 1 and tensor.shape in shapes
                if is_weight and address(tensor) not in known and len(known) < _MOST:
                    known[address(tensor)] = tensor
                    texts[f"weights {name}{path}"] = fingerprint(tensor).hex()
        for name, text in texts.items():
            if self._first.setdefault(name, text) != text:
                self._moving.add(name)
        is_all = not self._passes
        return {name: text for name, text in texts.items() if is_all or name in self._moving}

    def _sample(self, root: Any = None, *, counts: bool = True) -> dict[int, Any]:
        """Note the states of all generators, and return what `_generators` returns.

        If `counts`, note draws since the last sample too.
        """
        with unobserved():
            states: dict[str, Any] = dict(self._global.read())
            reachable = _generators(root)
            for key, (name, generator, kind) in reachable.items():
                if key not in self._own:
                    taken = {label for label, *_ in self._own.values()}
                    label = name if name not in taken else f"{name}#{len(taken)}"
                    self._own[key] = label, generator, kind.slot(generator).read
            drawn_from: dict[str, Any] = {"torch": torch.default_generator}
            for name, generator, read in self._own.values():
                state, drawn_from[name] = read(), generator
                is_tensor = isinstance(state, torch.Tensor)
                states[name] = fingerprint(state).hex() if is_tensor else text_digest(state)
        for name, now in states.items():
            self._seen.setdefault(name, {}).pop(now, None)
            self._seen[name][now] = None  # moves it to the end
            if counts and self._last.get(name, now) != now and not _is_fresh(drawn_from.get(name)):
                self._drew.add(name)
        if self._line:
            for group, by_name in _fields_of(_objects_of_interest()).items():
                states |= {f"{group} {name}": fields for name, fields in by_name.items()}
            changed = [name for name, now in states.items() if self._last.get(name, now) != now]
            self._followed += [(name, self._line, states[name]) for name in changed]
        self._last = states
        return reachable


def _is_fresh(generator: Any) -> bool:
    """Return whether a torch generator still has the state that it was seeded with."""
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
"""Kind -> an attribute that objects must have; a partly initialized object may not have it."""


def _objects_of_interest() -> list[tuple[str, Any]]:
    # The oldest objects come first. Types are checked, because there are fewer types than objects.
    alive = [candidate for generation in (2, 1, 0) for candidate in gc.get_objects(generation)]
    types, bases = {*map(type, alive)}, _KINDS.items()
    kinds = {cls: kind for cls in types for kind, base in bases if issubclass(cls, base)}
    known = [(kinds[type(made)], made) for made in alive if type(made) in kinds]
    return [(kind, made) for kind, made in known if hasattr(made, _NEEDED.get(kind, "__class__"))]


def _fields_of(objects: list[tuple[str, Any]]) -> dict[str, dict[str, dict[str, str]]]:
    fields: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS if kind != "optimizer"}
    seen = Counter[str]()
    for kind, tracked in objects:
        if kind != "optimizer":
            state = {"epoch": tracked.epoch} if kind == "sampler" else tracked.state_dict()
            plain = {key: repr(value) for key, value in state.items() if isinstance(value, _PLAIN)}
            fields[kind][numbered(type(tracked).__name__, seen)] = plain
    return fields


def _generators(root: Any = None) -> dict[int, tuple[str, Any, GeneratorKind]]:
    """Return the reachable generators of the program by address, with their names and kinds."""
    shared = {address(generator) for generator in global_generators().values()}
    by_address = {address(row[1]): row for row in generators(_roots(root))}
    return {key: generator for key, generator in by_address.items() if key not in shared}


def _roots(root: Any = None) -> Iterator[tuple[str, Any]]:
    """Yield `root`, and the local and global variables of the program's running functions."""
    yield "loader", root
    for frame in frames():
        if is_of_program(frame.f_code):
            for names in (frame.f_locals, frame.f_globals):
                yield from (pair for pair in [*names.items()] if pair[0][:2] != "__")


class Checkpoints:
    """Notes the checkpoints below `tree`, and may kill the process after one of them.

    `pattern` matches the paths or names of checkpoints. Without a pattern, a file is a checkpoint
    if it begins like a file of torch.save, pickle, safetensors or HDF5. `kill` is a number of
    backward passes. The process is killed once the first checkpoint that it writes after this
    number of passes is complete.

    The folder is scanned before every pass, because Python's audit events do not report files that
    C code opens, as in ``torch.save(path)`` and safetensors. A framework may write several files
    for one checkpoint while training continues. So a checkpoint counts as complete (settled) after
    a pass without a new file name, or after three passes.
    """

    def __init__(self, notes: Notes, tree: str, pattern: str = "", kill: int | None = None) -> None:
        self._notes = notes
        self.on_read: Callable[[], object] = tuple  # called when a checkpoint is opened
        self._tree = tree
        self._pattern = pattern
        self._kill = kill
        self._known = self._scan()
        self._names = set(self._known)
        self._unsettled: list[int] = []
        self._begun = 0
        self._is_checking = False
        sys.addaudithook(self._on_audit_event)
        atexit.register(lambda: self._note_changes(self._begun))

    def pass_begins(self, ended: int) -> None:
        """Look for new checkpoints as a backward pass begins, after `ended` earlier passes."""
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
                # A run has its own session. All its processes are killed, as in a power failure.
                if os.getsid(0) == os.getpgrp():
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        if changed:
            self._unsettled.append(ended)

    def _on_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        # A run resumes only from a checkpoint that it opens before its first pass.
        if event != "open" or self._begun or self._is_checking or str(args[1])[:1] != "r":
            return
        self._is_checking = True  # the check opens the file too, which raises another event
        with suppress(OSError, ValueError, TypeError):  # the argument is not a path
            path = os.path.relpath(os.fsdecode(args[0]), self._tree)
            if path in self._known and self._is_checkpoint(path):
                self._notes.add(opened=path)
                self.on_read()
        self._is_checking = False

    def _note_changes(self, saved: int) -> tuple[bool, bool]:
        states = self._scan()
        changed = [
            path
            for path, state in states.items()
            if self._known.get(path) != state and self._is_checkpoint(path)
        ]
        new = [path for path in changed if path not in self._names]
        self._known = states
        self._names.update(states)
        if changed:
            self._notes.add(saved=saved, files=sorted(changed))
        return bool(changed), bool(new)

    def _scan(self) -> dict[str, tuple[int, int, int]]:
        states = {}
        for folder, folders, files in os.walk(self._tree):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            for name in files:
                path = os.path.join(folder, name)  # noqa: PTH118 - many of them
                with suppress(OSError):  # removed since the listing
                    stat = os.lstat(path)
                    state = stat.st_mtime_ns, stat.st_size, stat.st_ino
                    states[os.path.relpath(path, self._tree)] = state
        return states

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
        # A safetensors file begins with the length of its header, which is JSON.
        return head[8:] == b"{" and 0 < int.from_bytes(head[:8], "little") < _LONGEST_HEADER

    def _is_open(self) -> bool:
        """Whether a process of this run is known to have a checkpoint open for writing."""
        session = os.getsid(0)
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError, ValueError, IndexError):
                process, path = link.parent.parent, os.path.realpath(link)
                is_ours = os.getsid(int(process.name)) == session
                if is_ours and path.startswith(self._tree + os.sep):
                    flags = (process / "fdinfo" / link.name).read_text().split("flags:")[1]
                    is_written = int(flags.split()[0], 8) & os.O_ACCMODE
                    if is_written and self._is_checkpoint(os.path.relpath(path, self._tree)):
                        return True
        return False
