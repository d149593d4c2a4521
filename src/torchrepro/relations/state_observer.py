"""Notes the state with which each step of a run begins, and the checkpoints that it writes.

The state is what a resumed run has to have again: parameters, buffers, optimizers, schedulers,
scalers, generators, the epochs of samplers, and the batches. It is read where a step has not
changed it yet: before the first forward pass, or before the optimizer.
"""

from __future__ import annotations

import gc
import random
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler, SequentialSampler

from torchrepro.callers import address, frames, program_place
from torchrepro.relations.checkpoint_watch import CheckpointWatch
from torchrepro.trace.fingerprint import fingerprint, unobserved
from torchrepro.trace.fingerprint_cache import GeneratorStates
from torchrepro.trace.frames import is_of_program
from torchrepro.trace.hooks import watch_training, within_loaders_begun
from torchrepro.trace.op_facts import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torchrepro.relations.observations import Notes

_MOST = 2000  # objects that are looked at in search of generators
_DEEPEST = 4
_lasting = ExitStack()  # as long as the process


def observe(notes: Notes, told: Mapping[str, Any]) -> None:
    """Begin to note; `told` is for `CheckpointWatch`."""
    state = _State(notes, CheckpointWatch(notes, **told))
    _lasting.enter_context(watch_training(state))
    _lasting.enter_context(within_loaders_begun(state.loader_begins))
    hook = torch.nn.modules.module.register_module_forward_pre_hook(state.module_begins)
    _lasting.callback(hook.remove)


class _State:
    def __init__(self, notes: Notes, watch: CheckpointWatch) -> None:
        self._notes = notes
        self._watch = watch
        self._step = 0
        self._names: dict[int, str] = {}  # of parameters
        self._models: dict[int, Any] = {}
        self._positions: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._iterations: dict[str, int] = {}
        self._global = GeneratorStates()
        self._own: dict[int, tuple[str, Any]] = {}
        self._objects: list[Any] = []
        self._last: dict[str, str] = {}
        self._begin_step()

    def _begin_step(self) -> None:
        self._noted = False
        self._buffers: dict[str, str] = {}
        self._called: set[int] = set()
        self._seen: dict[str, dict[str, None]] = {}
        self._drew: set[str] = set()
        self._batches: list[Any] = []

    # What happens in a step, in its order.

    @contextmanager
    def loader_begins(self, loader: Any) -> Iterator[None]:
        """Sample the generators before and after a loader begins to be iterated.

        A loader without workers that draws no order draws a number that nothing depends on.
        """
        self._sample(loader)
        yield
        alone = isinstance(loader.sampler, SequentialSampler) or not hasattr(
            loader.sampler, "generator"
        )
        self._sample(loader, counts=bool(loader.num_workers) or not alone)
        self._objects = _objects_of_interest()

    def batch_begins(self, iterator: Any) -> None:
        """Sample the generators before a batch, which may draw from them."""
        self._sample(getattr(iterator, "_dataset", None))

    def batch_ends(self, iterator: Any, batch: Any) -> None:
        """Note a batch with its place."""
        where = program_place(sys._getframe(2))  # noqa: SLF001 - as `callers` does
        if batch is not None:
            if iterator not in self._positions:
                self._iterations[where] = self._iterations.get(where, 0) + 1
                self._positions[iterator] = [self._iterations[where], 0]
            place = self._positions[iterator]
            place[1] += 1
            with unobserved():
                digest = _digest(fingerprint(tensor) for tensor in tensors_in(batch))
            self._batches.append([where, *place, digest])
        self._sample()

    def module_begins(self, module: Any, _args: Any) -> None:
        """Note the buffers of a model that is about to be trained, once in a step."""
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        if address(module) in self._called:
            return
        first = not self._called
        self._called |= {address(each) for each in module.modules()}
        if address(module) not in self._models:
            label = type(module).__name__ if self._models else ""
            self._models[address(module)] = label, module
            for name, parameter in module.named_parameters():
                self._names.setdefault(address(parameter), _dotted(label, name))
        label, _ = self._models[address(module)]
        with unobserved():
            for name, buffer in module.named_buffers():
                self._buffers[_dotted(label, name)] = fingerprint(buffer).hex()
        if first:
            self._sample()

    def backward_begins(self, losses: Any) -> None:
        """The state is noted before the optimizer."""

    def backward_ends(self) -> None:
        """The state is noted before the optimizer."""

    def optimizer_begins(self, optimizer: Any, _closure: Any) -> None:
        """Note the state with which the step began."""
        if self._step < 2 or not self._objects:  # noqa: PLR2004 - some are made in the first step
            self._objects = _objects_of_interest()
        schedulers = [each for each in self._objects if isinstance(each, LRScheduler)]
        scalers = [each for each in self._objects if isinstance(each, torch.amp.GradScaler)]
        samplers = [each for each in self._objects if isinstance(each, Sampler)]
        with unobserved():
            parameters = {
                self._names.get(address(each), f"{group}.{place}"): fingerprint(each).hex()
                for group, its in enumerate(optimizer.param_groups)
                for place, each in enumerate(its["params"])
            }
            state = {
                f"{key} of {self._names.get(address(parameter), '')}": _text_of(value)
                for parameter, its in optimizer.state.items()
                for key, value in its.items()
            }
        for group, its in enumerate(optimizer.param_groups):
            for key, value in its.items():
                if isinstance(value, int | float | tuple):
                    state[f"{key} of group {group}"] = repr(value)
        self._notes.add(
            step=self._step,
            parameters=parameters,
            buffers=self._buffers,
            optimizer=state,
            scheduler=_named(schedulers, lambda each: _plain(each.state_dict())),
            scaler=_named(scalers, lambda each: _plain(each.state_dict())),
            sampler=_named(samplers, lambda each: repr(each.epoch)),
            generators={name: list(seen) for name, seen in self._seen.items()},
            drew=sorted(self._drew),
            batches=self._batches,
        )

    def optimizer_ends(self, _optimizer: Any) -> None:
        """End the step, and the process, if a checkpoint has settled after which it is to end."""
        self._step += 1
        self._begin_step()
        self._sample()
        self._watch.step_ended(self._step)

    def _sample(self, root: Any = None, *, counts: bool = True) -> None:
        """Note the states of all generators; `counts` is whether a draw since the last counts."""
        with unobserved():
            found = dict(self._global.read())
            for number, (name, generator) in _generators(root).items():
                if number not in self._own:
                    taken = {each for each, _ in self._own.values()}
                    label = name if name not in taken else f"{name}#{len(taken)}"
                    self._own[number] = label, generator
            for name, generator in self._own.values():
                found[name] = _state_of(generator)
        for name, digest in found.items():
            self._seen.setdefault(name, {})[digest] = None
            if counts and self._last.get(name, digest) != digest:
                self._drew.add(name)
        self._last = found


def _objects_of_interest() -> list[Any]:
    kinds = (LRScheduler, torch.amp.GradScaler, Sampler)
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return [
        each
        for each in found
        if not isinstance(each, Sampler) or isinstance(getattr(each, "epoch", None), int)
    ]


def _named(objects: list[Any], text: Callable[[Any], str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in objects:
        kind = type(each).__name__
        number = 1 + sum(name.partition("#")[0] == kind for name in found)
        found[kind if number == 1 else f"{kind}#{number}"] = text(each)
    return found


def _plain(state: Mapping[str, Any]) -> str:
    kept = int, float, str, bool, list, tuple
    return repr({key: its for key, its in state.items() if isinstance(its, kept)})


def _text_of(value: Any) -> str:
    return fingerprint(value).hex() if isinstance(value, torch.Tensor) else repr(value)


def _dotted(label: str, name: str) -> str:
    return f"{label}.{name}" if label else name


def _digest(texts: Any) -> str:
    digest = xxhash.xxh3_128()
    for text in texts:
        digest.update(text)
    return digest.hexdigest()


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom) and value is not _OF_PYTHON
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState)


_OF_PYTHON = getattr(random.getstate, "__self__", None)


def _state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return fingerprint(generator.get_state()).hex()
    if isinstance(generator, random.Random):
        return _digest([repr(generator.getstate()).encode()])
    bits = getattr(generator, "bit_generator", None)
    state = bits.state if bits is not None else generator.get_state(legacy=False)
    return _digest([repr(state).encode()])


def _generators(root: Any) -> dict[int, tuple[str, Any]]:
    """Return the generators of the program that can be reached, by what it calls them.

    They are in variables of its functions, in its modules, and in what is in these.
    """
    found: dict[int, tuple[str, Any]] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any, int]] = [] if root is None else [("loader", root, 0)]
    for frame in frames():
        if is_of_program(frame.f_code):
            names = frame.f_locals
            todo += [(name, value, 0) for name, value in [*names.items()]]
            if names is not frame.f_globals:
                todo += [(name, value, 0) for name, value in [*frame.f_globals.items()]]
    todo.reverse()
    while todo and len(seen) < _MOST:
        name, value, depth = todo.pop()
        if address(value) in seen or isinstance(value, type(sys) | type):
            continue
        seen.add(address(value))
        if _is_generator(value):
            found[address(value)] = name, value
        elif depth < _DEEPEST and not isinstance(value, torch.Tensor | str | bytes):
            todo += [(f"{name}{key}", its, depth + 1) for key, its in _parts_of(value)]
    return found


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(f"[{place}]", its) for place, its in enumerate(value[:100])]
    if isinstance(value, dict):
        items = [*value.items()][:100]
        return [(f"[{key!r}]", its) for key, its in items if isinstance(key, str | int)]
    try:
        attributes = vars(value)
    except TypeError:
        return []
    return [(f".{name}", its) for name, its in [*attributes.items()][:200]]
