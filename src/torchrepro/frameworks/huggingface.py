"""What Hugging Face makes: accelerate's Accelerator and the Trainer of transformers.

An Accelerator calls hooks before it saves and before it loads, which are public. It loads its own
generators after that, and its loaders fetch one batch ahead: the generators are put back once more
before the first batch of an epoch that was interrupted.

accelerate, and with it the Trainer, resumes an epoch with `skip_first_batches`, which returns
another loader. The epoch of that one counts as one of the loader that it was made from.

The Trainer gets its first callbacks from the list ``DEFAULT_CALLBACKS`` of `transformers.trainer`,
which is undocumented. The state of a callback that is an `ExportableState` is written with the
checkpoint (https://huggingface.co/docs/transformers/main_classes/callback). The Trainer reads it
again only where it is asked to, so the callback reads it by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib import import_module
from operator import attrgetter, itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torchrepro.frameworks import hooking
from torchrepro.frameworks.hooking import KEY, in_force, log_profile, ranks
from torchrepro.ground.console import say_once
from torchrepro.ground.errors import SeedingError
from torchrepro.ground.messages import shown
from torchrepro.ground.patching import MissingHookError, surround, surround_everywhere
from torchrepro.ground.writing import write_atomically
from torchrepro.seeding.loader_positions import (
    batches_done,
    kind_of,
    latest_delivery,
    reads_items,
    skip_batches,
)
from torchrepro.seeding.state import forget

_REGISTER = ("register_save_state_pre_hook", "register_load_state_pre_hook")
_FILE = "torchrepro_{}.json"
"""The file of one rank in the folder of a checkpoint, as `random_states_0.pkl` is accelerate's."""

# Loaders that skip their first batches, each with the one that it was made from.
_made_from: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()


def attach(accelerator: Any) -> None:
    """Check that the checkpoints of `accelerator` hold the state of the run under a profile.

    Under a profile `save_state` of every Accelerator writes one more file for each rank: its
    generators, how far its loaders have come, and the profile with the manifest. After `load_state`
    and `skip_first_batches` the run is the uninterrupted one. So nothing has to be called, also for
    one that was made before the profile. Without a profile nothing is written. Changes nothing;
    raises `SeedingError` for what is no Accelerator.
    """
    is_class = isinstance(accelerator, type)
    if is_class or not all(callable(getattr(accelerator, name, None)) for name in _REGISTER):
        raise SeedingError.about(
            "a class, not an Accelerator" if is_class else "not an Accelerator",
            found="None" if accelerator is None else shown(accelerator),  # Python, not YAML
            todo="pass the Accelerator: torchrepro.attach(accelerator)",
        )


def hook_accelerator(module: ModuleType, undo: ExitStack) -> None:
    """Have every Accelerator save and load the state of the run, and log the profile.

    Raises `MissingHookError` where the class has no hooks.
    """
    accelerator = getattr(module, "Accelerator", None)
    for name in _REGISTER:
        if not hasattr(accelerator, name):
            raise MissingHookError(f"Accelerator.{name}")
    hooks = {"save_state": _save, "load_state": _load}
    for register, (method, hook) in zip(_REGISTER, hooks.items(), strict=True):
        surround(undo, accelerator, method, partial(_hooked, register, hook))
    surround(undo, accelerator, "init_trackers", _logging)


def _hooked(
    register: str, hook: Any, method: Any, accelerator: Any, /, *args: Any, **kwargs: Any
) -> Any:
    # For this call alone: an Accelerator that kept a hook of ours would be kept alive by it, and
    # could not be unpickled where torchrepro is not installed.
    registered = getattr(accelerator, register)(partial(hook, accelerator))
    try:
        return method(accelerator, *args, **kwargs)
    finally:
        registered.remove()


def hook_seeds(module: ModuleType, undo: ExitStack) -> None:
    """Read the switch of `set_seed`, wherever it was imported to."""
    around = partial(hooking.saying_switches, "accelerate", "set_seed")
    surround_everywhere(undo, module, "set_seed", around)


def _logging(init_trackers: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    returned = init_trackers(self, *args, **kwargs)
    if self.is_main_process:
        log_profile("accelerate", self.trackers, attrgetter("tracker"))
    return returned


def _save(accelerator: Any, models: Any, weights: Any, folder: str) -> None:
    if in_force() is None:
        return
    optimizers = getattr(accelerator, "_optimizers", ())  # undocumented as well
    here, state, iterations = hooking.ranks(), hooking.state_of_rank(optimizers), []
    is_at_end: dict[int, bool] = {}
    for loader in _loaders_of(accelerator):
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
    entry = hooking.checkpoint_entry([state]) | here._asdict()
    write_atomically(Path(folder, _FILE.format(here.rank)), json.dumps(entry).encode())


def _load(accelerator: Any, models: Any, folder: str) -> None:
    # accelerate then loads what it has of the same state.
    if in_force() is None:
        return
    where, own = f"accelerate: {folder}", Path(folder, _FILE.format(hooking.ranks().rank))
    there = own if own.exists() else next(Path(folder).glob(_FILE.format("*")), None)
    entry = None
    try:
        if there is not None:  # a file holds the state of one rank
            entry = json.loads(there.read_text(encoding="utf-8"))
            states = [None] * entry["size"]
            (states[entry["rank"]],) = entry["ranks"]
            entry["ranks"] = states
    except (OSError, ValueError, KeyError, TypeError) as error:
        hooking.say_not_resumed(where, f"{own.name} is damaged: {error}")
        return
    state = hooking.go_on_from(entry, where)
    if state is not None:
        for loader, iteration in zip(_loaders_of(accelerator), state["iterations"], strict=False):
            if iteration is not None and hasattr(loader, "iteration"):
                loader.iteration = iteration
        hooking.begin_interrupted_epochs(state)


def _loaders_of(accelerator: Any) -> list[Any]:
    # Undocumented (`_dataloaders`); its own checkpoints number their files by it. Without it,
    # loaders are told apart by their data and the order in which they are first iterated.
    return list(getattr(accelerator, "_dataloaders", ()))


def hook_loaders(module: ModuleType, undo: ExitStack) -> None:
    """Wrap what accelerate's `data_loader` makes loaders with, wherever it was imported to.

    Raises `MissingHookError` where a function is not there.
    """
    surround_everywhere(undo, module, "skip_first_batches", _skipping)
    mixin = getattr(module, "DataLoaderStateMixin", None)
    if mixin is None:
        raise MissingHookError("DataLoaderStateMixin")
    surround(undo, mixin, "end", _ending)


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


# The Trainer.

DEFAULT = "TorchreproDefaultCallback"
EXPLICIT = "TorchreproCallback"
"""Under the name of its class the Trainer keeps the state of a callback."""

_FRAMEWORK = "transformers"

# The `control` of the training that began last, and the callback of ours that attends to it.
_in_charge: list[tuple[ref[Any], ref[RunState]]] = []


def hook_trainer(module: ModuleType, undo: ExitStack) -> None:
    """Put our callback among those that every `Trainer` of `module` gets.

    Raises `MissingHookError` where there is no list of them.
    """
    defaults = getattr(module, "DEFAULT_CALLBACKS", None)
    if not isinstance(defaults, list):
        raise MissingHookError(f"{module.__name__}.DEFAULT_CALLBACKS")
    callback = callback_class(DEFAULT)
    defaults.append(callback)

    @undo.callback
    def _() -> None:
        if callback in defaults:
            defaults.remove(callback)

    with suppress(MissingHookError):  # without it, streams are read again in the first step
        surround(undo, module.Trainer, "_load_rng_state", _loading_generators)


def _loading_generators(load: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    # The Trainer loads its own once more after it has read the batches of a step, which for a
    # stream come from them.
    attending = _in_charge[0][1]() if _in_charge else None
    if in_force() is not None and attending is not None and attending.has_gone_on:
        return None
    return load(trainer, *args, **kwargs)


def hook_reporters(module: ModuleType, undo: ExitStack) -> None:
    """Have the Trainer's reporters write the profile as soon as they know where."""
    for name, place in _REPORTERS.items():
        reporter = getattr(module, name, None)
        try:
            surround(undo, reporter, "on_train_begin", partial(_beginning, place))
        except (MissingHookError, TypeError):
            say_once(f"{_FRAMEWORK} has no {name}.on_train_begin: it is not given the profile")


def _active_in(name: str) -> Any:
    from torchrepro.manifest.destinations import DESTINATIONS

    return next(each for each in DESTINATIONS if each.name == name).active()


_REPORTERS: Mapping[str, Callable[[Any], Any]] = {
    "TensorBoardCallback": lambda reporter: reporter.tb_writer,
    "WandbCallback": lambda _: _active_in("wandb"),
    "MLflowCallback": lambda _: _active_in("mlflow"),
}
"""Class of a reporter -> what gives the place that it writes to, or None."""


def _beginning(place: Callable[[Any], Any], begin: Any, *args: Any, **kwargs: Any) -> Any:
    result = begin(*args, **kwargs)
    reporter, _, state, *_ = args
    if state.is_world_process_zero:
        log_profile(_FRAMEWORK, [reporter], place)
    return result


@cache
def callback_class(name: str) -> type:
    """Return a class of our callbacks: the `DEFAULT` one, or the one that a program names.

    They are two, because the Trainer warns of two callbacks of one class. Raises `ImportError`
    where transformers is not installed, and `MissingHookError` where it has no base for them.
    """
    try:
        module: Any = import_module("transformers.trainer_callback")
    except ModuleNotFoundError as missing:
        raise ImportError(
            "torchrepro.hf.Callback is a callback for the Trainer of Hugging Face, and "
            f"transformers cannot be imported: {missing}"
        ) from None
    for base in ("TrainerCallback", "ExportableState"):
        if not hasattr(module, base):
            raise MissingHookError(f"{module.__name__}.{base}")
    bases = (RunState, module.TrainerCallback, module.ExportableState)
    return type(name, bases, {"__module__": __name__, "__doc__": RunState.__doc__})


def __getattr__(name: str) -> Any:
    if name not in (DEFAULT, EXPLICIT):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return callback_class(name)


class RunState:
    """Puts the state of the run into the checkpoints of a `Trainer`, and takes it up again."""

    def __init__(self) -> None:
        self._attends = False
        self._saves = False
        self._all_ranks: list[dict[str, Any]] = []
        self._pending: Callable[[], None] | None = None
        self._within_step = False
        self._kind = ""  # of the loader that is trained on
        self._optimizer: Any = None
        # Whether this training goes on from a checkpoint with the generators in it.
        self.has_gone_on = False

    def state(self) -> dict[str, Any]:
        """Return what the Trainer writes with a checkpoint; it asks for it on rank 0 alone."""
        exported: dict[str, Any] = {"args": {}, "attributes": {}}
        if not self._attends or in_force() is None:
            return exported
        if self._within_step:
            say_once(
                f"{_FRAMEWORK}: a checkpoint is saved in the middle of a step; a run that goes on "
                "from it does that step again with other random numbers"
            )
        size = ranks().size
        if size > 1 and not self._all_ranks:
            say_once(
                f"{_FRAMEWORK}: a checkpoint holds the state of rank 0 alone, because a callback "
                "asked for it at a step at which the Trainer by itself saves nothing; a run that "
                "goes on from it is not the uninterrupted one"
            )
        others: list[Any] = [*self._all_ranks[1:]] or [None] * (size - 1)
        return exported | {KEY: hooking.checkpoint_entry([self._state(), *others])}

    def _state(self) -> dict[str, Any]:
        state = hooking.state_of_rank(filter(None, [self._optimizer]))
        # Each evaluation has a loader of its own, and with it a generator that was just seeded.
        state["resting"] = [each for each in state["resting"] if each["kind"] == self._kind]
        return state

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        train_dataloader: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Go on from the checkpoint that the Trainer has read its own state from, if any."""
        # Saving, the Trainer looks it up, and the state of a checkpoint without us lacks it.
        state.stateful_callbacks.setdefault(type(self).__name__, {})
        # The first of ours to see a training begin attends to it.
        training, attending = _in_charge[0] if _in_charge else (ref(control), ref(self))
        self._attends = training() is not control or attending() in (None, self)
        if self._attends:
            _in_charge[:] = [(ref(control), ref(self))]
        self._kind, self._optimizer = kind_of(base_loader(train_dataloader)), optimizer
        self._saves, self._all_ranks, self._pending = False, [], None
        self._within_step, self.has_gone_on = False, False
        if not self._attends or in_force() is None:
            return
        if state.is_world_process_zero:
            hooking.say_switches(_FRAMEWORK, "TrainingArguments", vars(args))
        if not state.global_step:
            forget()  # what the training before would have done at its first step
            return
        where = f"{_FRAMEWORK}: the checkpoint of step {state.global_step}"
        exported = (state.stateful_callbacks.get(name) or {} for name in (DEFAULT, EXPLICIT))
        entry = next((each[KEY] for each in exported if KEY in each), None)
        if entry is not None and None in entry.get("ranks", ()):
            hooking.say_not_resumed(where, "it holds the state of rank 0 alone")
            return
        run = hooking.go_on_from(entry, where)
        if run is not None:
            self.has_gone_on = True
            hooking.begin_interrupted_epochs(run)
            self._pending = hooking.generators_of(run)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Put the generators back once more: what the start of the training drew does not count."""
        if self._pending is not None:
            self._pending()
            self._pending = None

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Note that the step has drawn numbers: the Trainer's JIT checkpoints may be saved here."""
        self._within_step = True

    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gather the states of all ranks where this step is followed by a checkpoint."""
        self._within_step = False
        self._gather_if_saved("on_step_end", args, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gather the states of all ranks where this epoch is followed by a checkpoint."""
        self._gather_if_saved("on_epoch_end", args, state)

    def _gather_if_saved(self, event: str, args: Any, state: Any) -> None:
        # If the Trainer by itself saves after `event`. Its own strategy answers that alike on all
        # ranks. What another callback wants, it may want on one rank only, which would then wait
        # for the others forever.
        self._all_ranks = []
        if not self._attends or in_force() is None or ranks().size == 1:
            return
        callbacks: Any = import_module("transformers.trainer_callback")
        asked = callbacks.TrainerControl()
        getattr(callbacks.DefaultFlowCallback(), event)(args, state, asked)
        if_better = asked.should_evaluate and args.save_strategy == "best"
        self._saves = asked.should_save or if_better
        if self._saves:
            self._all_ranks = hooking.of_all_ranks(self._state())

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Gather them again where a checkpoint follows: an evaluation draws numbers."""
        if self._saves:
            self._all_ranks = hooking.of_all_ranks(self._state())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Attend no longer."""
        self._attends, self._saves = False, False
