"""accelerate's Accelerator: the state of the run in what `save_state` writes, and its loaders.

An Accelerator calls hooks before it saves and before it loads, which are public. It loads its own
generators after that, and its loaders fetch one batch ahead: the generators are put back once more
before the first batch of an epoch that was interrupted.

accelerate, and with it the Hugging Face Trainer, resumes an epoch with `skip_first_batches`, which
returns another loader. The epoch of that one counts as one of the loader that it was made from.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress
from inspect import signature
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

from torchrepro.errors import SeedingError
from torchrepro.frameworks import run_state
from torchrepro.frameworks.hooking import Switch, in_force, log_profile, say_switches
from torchrepro.messages import shown
from torchrepro.patching import MissingHookError, surround, surround_everywhere
from torchrepro.seeding.loader_places import (
    batches_done,
    latest_delivery,
    reads_items,
    skip_batches,
)
from torchrepro.seeding.state import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

_HOOKS = ("register_save_state_pre_hook", "register_load_state_pre_hook")
_FILE = "torchrepro_{}.json"
"""The file of one rank in the folder of a checkpoint, as `random_states_0.pkl` is accelerate's."""

_attached: WeakSet[Any] = WeakSet()
# Loaders that skip their first batches, each with the one that it was made from.
_made_from: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()


def attach(accelerator: Any) -> None:
    """Have the checkpoints of `accelerator` hold the state of the run, and a run go on from it.

    `save_state` writes one more file for each rank: its generators, how far its loaders have come,
    and the profile with the manifest. After `load_state` and `skip_first_batches` the run is the
    uninterrupted one. Under a profile every `Accelerator` that is made is attached by itself; this
    is for one that was made before. Without a profile it changes nothing. Raises `SeedingError`
    for what is no Accelerator.
    """
    is_class = isinstance(accelerator, type)
    if is_class or not all(callable(getattr(accelerator, hook, None)) for hook in _HOOKS):
        raise SeedingError.about(
            "a class, not an Accelerator" if is_class else "not an Accelerator",
            found="None" if accelerator is None else shown(accelerator),  # Python, not YAML
            todo="pass the Accelerator: torchrepro.attach(accelerator)",
        )
    if accelerator in _attached:
        return
    _attached.add(accelerator)
    hooks = _Hooks(accelerator)
    accelerator.register_save_state_pre_hook(hooks.save)
    accelerator.register_load_state_pre_hook(hooks.load)


def hook_accelerator(module: ModuleType) -> ExitStack:
    """Attach every Accelerator that is made, and write the profile to its trackers.

    Raises `MissingHookError` where the class has no hooks.
    """
    accelerator = getattr(module, "Accelerator", None)
    for name in _HOOKS:
        if not hasattr(accelerator, name):
            raise MissingHookError(f"Accelerator.{name}")
    with ExitStack() as undo:
        surround(undo, accelerator, "__init__", _attaching)
        surround(undo, accelerator, "init_trackers", _logging)
        return undo.pop_all()


def hook_seeds(module: ModuleType) -> ExitStack:
    """Read the switch of `set_seed`, wherever it was imported to."""
    undo = ExitStack()
    surround_everywhere(undo, module, "set_seed", _saying_switches)
    return undo


def _attaching(__init__: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    __init__(self, *args, **kwargs)
    attach(self)


def _logging(init_trackers: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    returned = init_trackers(self, *args, **kwargs)
    if self.is_main_process:
        log_profile("accelerate", self.trackers, attrgetter("tracker"))
    return returned


def _saying_switches(set_seed: Any, *args: Any, **kwargs: Any) -> Any:
    given: Mapping[str, Any] = {}
    with suppress(TypeError):  # which the call itself raises as well
        given = signature(set_seed).bind(*args, **kwargs).arguments
    if given.get("deterministic"):
        knob = "backends.torch.deterministic_algorithms"
        say_switches("accelerate", [Switch("set_seed(deterministic=True)", knob, "error")])
    return set_seed(*args, **kwargs)


class _Hooks:
    """What one Accelerator calls before it saves its state, and before it loads one."""

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def _prepared(self) -> list[Any]:
        # Undocumented (`_dataloaders`); its own checkpoints number their files by it. Without it,
        # loaders are told apart by their data and the order in which they are first iterated.
        return list(getattr(self.accelerator, "_dataloaders", ()))

    def _optimizers(self) -> list[Any]:
        return list(getattr(self.accelerator, "_optimizers", ()))  # undocumented as well

    def save(self, models: Any, weights: Any, folder: str) -> None:
        """Write the complete state of this rank, before accelerate writes its own files."""
        if in_force() is None:
            return
        here, state, iterations = run_state.ranks(), run_state.state_of_rank(self._optimizers()), []
        is_at_end: dict[int, bool] = {}
        for loader in self._prepared():
            made = [each for each, origin in _made_from.items() if origin() is loader]
            deliveries = {each: latest_delivery(base_loader(each)) for each in (loader, *made)}
            begun = [(its.number, its, each) for each, its in deliveries.items() if its is not None]
            ends = False
            if begun:
                # A dispatcher reads batches ahead and sends them on, so that only it knows its end.
                number, latest, iterated = max(begun, key=itemgetter(0))
                ends = is_at_end[number] = getattr(iterated, "end_of_dataloader", latest.is_over)
            # accelerate counts an epoch when the program asks for one more batch than there are
            epoch = getattr(loader, "iteration", None)
            iterations.append(epoch if epoch is None else epoch + ends)
        all_places = state["interrupted"] + state["ended"]
        ended = [each for each in all_places if is_at_end.get(each["number"], each["over"])]
        state |= {
            "iterations": iterations,
            "interrupted": [each for each in all_places if each not in ended],
            "ended": [each for each in ended if each["over"]],  # not where another rank loads
        }
        entry = run_state.checkpoint_entry([state]) | here._asdict()
        write_atomically(Path(folder, _FILE.format(here.rank)), json.dumps(entry).encode())

    def load(self, models: Any, folder: str) -> None:
        """Put back the state of this rank; accelerate then loads what it has of the same."""
        if in_force() is None:
            return
        where, own = f"accelerate: {folder}", Path(folder, _FILE.format(run_state.ranks().rank))
        there = own if own.exists() else next(Path(folder).glob(_FILE.format("*")), None)
        entry = None
        try:
            if there is not None:  # a file holds the state of one rank
                entry = json.loads(there.read_text(encoding="utf-8"))
                states = [None] * entry["size"]
                (states[entry["rank"]],) = entry["ranks"]
                entry["ranks"] = states
        except (OSError, ValueError, KeyError, TypeError) as error:
            run_state.say_not_resumed(where, f"{own.name} is damaged: {error}")
            return
        state = run_state.own_state(entry, where)
        if state is not None and run_state.put_back(state, where):
            for loader, iteration in zip(self._prepared(), state["iterations"], strict=False):
                if iteration is not None and hasattr(loader, "iteration"):
                    loader.iteration = iteration
            run_state.begin_interrupted_epochs(state)


def hook_loaders(module: ModuleType) -> ExitStack:
    """Wrap what accelerate's `data_loader` makes loaders with, wherever it was imported to.

    Raises `MissingHookError` where a function is not there.
    """
    with ExitStack() as undo:
        surround_everywhere(undo, module, "skip_first_batches", _skipping)
        mixin = getattr(module, "DataLoaderStateMixin", None)
        if mixin is None:
            raise MissingHookError("DataLoaderStateMixin")
        surround(undo, mixin, "end", _ending)
        return undo.pop_all()


def base_loader(loader: Any) -> Any:
    """Return the loader of torch that one of accelerate's iterates; any other as it is."""
    return getattr(loader, "base_dataloader", loader)


def _skipping(skip_first_batches: Any, dataloader: Any, num_batches: int = 0) -> Any:
    if in_force() is None:
        return skip_first_batches(dataloader, num_batches)
    base = base_loader(dataloader)
    number, done = num_batches, batches_done(base)
    dispatched = type(dataloader).__name__ == "DataLoaderDispatcher"
    if reads_items(base):
        # accelerate cannot know where a stream without a length began again, and counts the
        # batches of all passes. It reads one batch ahead.
        number = number if done is None or number < done else done - 1
    elif dispatched and not dataloader.split_batches:
        # A `DataLoaderDispatcher` loads a batch for each process, and accelerate skips as many as
        # it is asked to where it has a sampler to skip in. A program may know that, and asks for
        # those of all. A batch for each process is read ahead, fewer where an epoch ends.
        size = dataloader.state.num_processes
        of_all = done is not None and number == (done - 1) // size * size
        number = number if of_all else number * size
    skipped = skip_first_batches(dataloader, number)
    leaves_nothing = skip_batches(base, base_loader(skipped), number)
    if not leaves_nothing and hasattr(dataloader, "iteration"):
        skipped.iteration = dataloader.iteration
        # accelerate's own does not reach the samplers through the sampler that skips
        dataloader.set_epoch(dataloader.iteration)
        _made_from[skipped] = ref(dataloader)
    return skipped


def _ending(end: Any, self: Any) -> Any:
    loader = _made_from[self]() if self in _made_from else None
    if loader is not None:
        loader.iteration = self.iteration
    return end(self)
