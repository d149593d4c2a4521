"""Hooks into Hugging Face: accelerate's Accelerator and the Trainer of transformers.

An Accelerator calls public hooks before it saves and before it loads. After our hook, accelerate
restores the generators from its own file, and its loaders fetch one batch ahead. So the generators
are restored a second time before the first batch of an interrupted epoch.

accelerate, and with it the Trainer, resumes an epoch with `skip_first_batches`, which returns a new
loader. An epoch of the new loader counts as an epoch of the original loader.

The Trainer takes its default callbacks from the undocumented list ``DEFAULT_CALLBACKS`` of
`transformers.trainer`. The Trainer writes the state of an `ExportableState` callback to the
checkpoint (https://huggingface.co/docs/transformers/main_classes/callback). The Trainer reads the
state only if a program requests it, so our callback reads the state itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib import import_module
from operator import attrgetter, itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from weakref import ReferenceType, WeakKeyDictionary, ref

from torchrepro.frameworks import hooking
from torchrepro.frameworks.hooking import KEY, active_profile, log_profile, ranks
from torchrepro.ground.console import say_once
from torchrepro.ground.errors import SeedingError, shown
from torchrepro.ground.patching import MissingHookError, surround, surround_everywhere
from torchrepro.ground.writing import write_atomically
from torchrepro.seeding.loader_positions import epochs, kind_of, reads_items
from torchrepro.seeding.resumed_run import ResumedRun
from torchrepro.seeding.state import forget

_REGISTER = ("register_save_state_pre_hook", "register_load_state_pre_hook")
_FILE = "torchrepro_{}.json"
"""The file of one rank in a checkpoint's folder, like accelerate's `random_states_0.pkl`."""

# Loader that skips first batches -> original loader.
_original_of: WeakKeyDictionary[Any, ReferenceType[Any]] = WeakKeyDictionary()


def attach(accelerator: Any) -> None:
    """Check that `accelerator` is an Accelerator. This is optional and has no other effect.

    Under a profile, `save_state` of every Accelerator writes one more file for each rank, with the
    rank's generators, the positions of its loaders, the profile and the manifest. After
    `load_state` and `skip_first_batches` the run continues like the uninterrupted run, even if
    the Accelerator was created before the profile was applied. Without a profile nothing is
    written. Raises `SeedingError` for any other object.
    """
    is_class = isinstance(accelerator, type)
    if is_class or not all(callable(getattr(accelerator, name, None)) for name in _REGISTER):
        raise SeedingError.about(
            "a class, not an Accelerator" if is_class else "not an Accelerator",
            found="None" if accelerator is None else shown(accelerator),  # Python, not YAML
            todo="pass the Accelerator: torchrepro.attach(accelerator)",
        )


def hook_accelerator(module: ModuleType, undo: ExitStack) -> None:
    """Hook into every Accelerator to save and load the state of the run, and to log the profile.

    Raises `MissingHookError` if the class has no hooks.
    """
    accelerator = getattr(module, "Accelerator", None)
    for register, method, hook in zip(
        _REGISTER, ("save_state", "load_state"), (_save, _load), strict=True
    ):
        if not hasattr(accelerator, register):
            raise MissingHookError(f"Accelerator.{register}")
        surround(undo, accelerator, method, partial(_hooked, register, hook))
    surround(undo, accelerator, "init_trackers", _logging)


def _hooked(
    register: str, hook: Any, method: Any, accelerator: Any, /, *args: Any, **kwargs: Any
) -> Any:
    # The hook is registered only during the call, because the hook would keep the Accelerator
    # alive, and a pickled Accelerator could not be loaded without torchrepro.
    registered = getattr(accelerator, register)(partial(hook, accelerator))
    try:
        return method(accelerator, *args, **kwargs)
    finally:
        registered.remove()


def hook_seeds(module: ModuleType, undo: ExitStack) -> None:
    """Wrap accelerate's `set_seed` in all modules, to report its determinism switch."""
    around = partial(hooking.call_reporting_switches, "accelerate", "set_seed")
    surround_everywhere(undo, module, "set_seed", around)


def _logging(init_trackers: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    returned = init_trackers(self, *args, **kwargs)
    if self.is_main_process:
        log_profile("accelerate", self.trackers, attrgetter("tracker"))
    return returned


def _save(accelerator: Any, models: Any, weights: Any, folder: str) -> None:
    if active_profile() is None:
        return
    optimizers = getattr(accelerator, "_optimizers", ())  # undocumented
    world, state, iterations = hooking.ranks(), hooking.state_of_rank(optimizers), []
    is_at_end: dict[int, bool] = {}
    for loader in _loaders_of(accelerator):
        skipping = [made for made, original in _original_of.items() if original() is loader]
        latest = [(epochs.latest(base_loader(made)), made) for made in (loader, *skipping)]
        begun = [(epoch.number, epoch.is_over, made) for epoch, made in latest if epoch is not None]
        ends = False
        if begun:
            # A dispatcher reads ahead for all ranks, so only the dispatcher knows when it ends.
            number, is_over, iterated = max(begun, key=itemgetter(0))
            ends = is_at_end[number] = getattr(iterated, "end_of_dataloader", is_over)
        # accelerate counts an epoch only when the program requests a batch after the last batch
        epoch = getattr(loader, "iteration", None)
        iterations.append(epoch if epoch is None else epoch + ends)
    positions = state["interrupted"] + state["ended"]
    ended = [saved for saved in positions if is_at_end.get(saved["number"], saved["over"])]
    state |= {
        "iterations": iterations,
        "interrupted": [saved for saved in positions if saved not in ended],
        "ended": [saved for saved in ended if saved["over"]],  # a dispatcher reads on rank 0 only
    }
    entry = hooking.checkpoint_entry([state]) | world._asdict()
    write_atomically(Path(folder, _FILE.format(world.rank)), json.dumps(entry).encode())


def _load(accelerator: Any, models: Any, folder: str) -> None:
    # Runs before accelerate loads its own states.
    if active_profile() is None:
        return
    checkpoint, own_file = f"accelerate: {folder}", Path(folder, _FILE.format(hooking.ranks().rank))
    files = [own_file] if own_file.exists() else [*Path(folder).glob(_FILE.format("*"))]
    entry = None
    try:
        if files:  # each file has the state of one rank
            entry = json.loads(files[0].read_text(encoding="utf-8"))
            states = [None] * entry["size"]
            (states[entry["rank"]],) = entry["ranks"]
            entry["ranks"] = states
    except (OSError, ValueError, KeyError, TypeError) as error:
        hooking.report_not_resumed(checkpoint, f"{own_file.name} is damaged: {error}")
        return
    run = hooking.resume_from(entry, checkpoint)
    if run is not None:
        iterations = run.state["iterations"]
        for loader, iteration in zip(_loaders_of(accelerator), iterations, strict=False):
            if iteration is not None and hasattr(loader, "iteration"):
                loader.iteration = iteration


def _loaders_of(accelerator: Any) -> list[Any]:
    # The undocumented `_dataloaders` also numbers the files of accelerate's checkpoints. Without
    # it, loaders are identified by their data and the order of their first iterations.
    return list(getattr(accelerator, "_dataloaders", ()))


def hook_loaders(module: ModuleType, undo: ExitStack) -> None:
    """Wrap accelerate's `skip_first_batches` in all modules, and `DataLoaderStateMixin.end`.

    Raises `MissingHookError` if accelerate's `data_loader` lacks one of the two.
    """
    surround_everywhere(undo, module, "skip_first_batches", _skipping)
    surround(undo, hooking.part_of(module, "DataLoaderStateMixin"), "end", _ending)


def base_loader(loader: Any) -> Any:
    """Return torch's loader within a loader of accelerate; return any other loader unchanged."""
    return getattr(loader, "base_dataloader", loader)


def _skipping(skip_first_batches: Any, dataloader: Any, num_batches: int = 0) -> Any:
    if active_profile() is None:
        return skip_first_batches(dataloader, num_batches)
    base = base_loader(dataloader)
    number, done = num_batches, ResumedRun.active.batches_done(base)
    dispatched = type(dataloader).__name__ == "DataLoaderDispatcher"
    if reads_items(base):
        # Without a length, accelerate counts the batches of all passes over the dataset, so
        # `number` may be too large. `done` includes the batch that accelerate reads ahead.
        number = number if done is None or number < done else done - 1
    elif dispatched and not dataloader.split_batches:
        # A `DataLoaderDispatcher` loads a batch for each process. If the dispatcher has a sampler,
        # accelerate skips only the requested number, so some programs request the batches of all
        # processes. A dispatcher reads one batch per process ahead, fewer at the end of an epoch.
        size = dataloader.state.num_processes
        of_all = done is not None and number == (done - 1) // size * size
        number = number if of_all else number * size
    skipped = skip_first_batches(dataloader, number)
    leaves_nothing = ResumedRun.active.skipped(base, base_loader(skipped), number)
    if not leaves_nothing and hasattr(dataloader, "iteration"):
        skipped.iteration = dataloader.iteration
        # the new loader's `set_epoch` does not reach the samplers below its skipping sampler
        dataloader.set_epoch(dataloader.iteration)
        _original_of[skipped] = ref(dataloader)
    return skipped


def _ending(end: Any, self: Any) -> Any:
    loader = _original_of[self]() if self in _original_of else None
    if loader is not None:
        loader.iteration = self.iteration
    return end(self)


# The Trainer.

DEFAULT = "TorchreproDefaultCallback"
EXPLICIT = "TorchreproCallback"
"""Class names of our callbacks: the Trainer stores a callback's state under its class name."""

_FRAMEWORK = "transformers"


def hook_trainer(module: ModuleType, undo: ExitStack) -> None:
    """Add our callback to the default callbacks of every `Trainer` of `module`.

    Raises `MissingHookError` if `module` has no list of default callbacks.
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

    with suppress(MissingHookError):  # without it, an IterableDataset repeats draws
        surround(undo, module.Trainer, "_load_rng_state", _loading_generators)


def _loading_generators(load: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    # The Trainer restores the generators again after it has read the batches of a step. An
    # IterableDataset has drawn from them by that time, and would repeat these draws.
    attending = RunState.handled[1]() if RunState.handled else None
    if active_profile() is not None and attending is not None and attending.run is not None:
        return None
    return load(trainer, *args, **kwargs)


def hook_reporters(module: ModuleType, undo: ExitStack) -> None:
    """Hook into the Trainer's reporters, to log the profile when a reporter starts its run."""
    for name, target_of in _REPORTERS.items():
        reporter = getattr(module, name, None)
        try:
            surround(undo, reporter, "on_train_begin", partial(_beginning, target_of))
        except (MissingHookError, TypeError):
            say_once(f"{_FRAMEWORK} has no {name}.on_train_begin: the profile is not logged to it")


def _active_in(name: str) -> Any:
    from torchrepro.manifest.destinations import DESTINATIONS

    (destination,) = [known for known in DESTINATIONS if known.name == name]
    return destination.active()


_REPORTERS: Mapping[str, Callable[[Any], Any]] = {
    "TensorBoardCallback": lambda reporter: reporter.tb_writer,
    "WandbCallback": lambda _: _active_in("wandb"),
    "MLflowCallback": lambda _: _active_in("mlflow"),
}
"""Class of a reporter -> function that returns the reporter's target, or None."""


def _beginning(target_of: Callable[[Any], Any], begin: Any, *args: Any, **kwargs: Any) -> Any:
    returned = begin(*args, **kwargs)
    reporter, _, state, *_ = args
    if state.is_world_process_zero:
        log_profile(_FRAMEWORK, [reporter], target_of)
    return returned


@cache
def callback_class(name: str) -> type:
    """Return our callback class: `DEFAULT`, or `EXPLICIT` for a callback that the program passes.

    There are two classes, since the Trainer warns about two callbacks of one class. Raises
    `ImportError` if transformers cannot be imported, `MissingHookError` if it has no base class.
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
    """Adds the state of the run to the checkpoints of a `Trainer`, and restores it."""

    # The `control` of the training that began last, and our callback for that training.
    handled: ClassVar[tuple[ref[Any], ref[RunState]] | None] = None
    run: ResumedRun | None = None  # None if the training was not resumed from our state
    _is_handling = _within_step = False
    _all_ranks: Sequence[dict[str, Any]] = ()  # gathered for the next checkpoint
    _loader_kind = ""  # of the training loader
    _optimizer: Any = None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; the Trainer calls this on rank 0 only."""
        exported: dict[str, Any] = {"args": {}, "attributes": {}}
        if not self._is_handling or active_profile() is None:
            return exported
        if self._within_step:
            say_once(
                f"{_FRAMEWORK}: a checkpoint is saved in the middle of a step; a run resumed from "
                "it repeats that step with other random numbers"
            )
        size = ranks().size
        if size > 1 and not self._all_ranks:
            say_once(
                f"{_FRAMEWORK}: a checkpoint has the state of rank 0 only, because a callback "
                "requested it at a step at which the Trainer itself saves no checkpoint; a run "
                "resumed from it differs from the uninterrupted run"
            )
        rest: list[Any] = [*self._all_ranks[1:]] or [None] * (size - 1)
        return exported | {KEY: hooking.checkpoint_entry([self._state(), *rest])}

    def _state(self) -> dict[str, Any]:
        state = hooking.state_of_rank(filter(None, [self._optimizer]))
        # Each evaluation creates a loader with a newly seeded generator: its state is not saved.
        kind = self._loader_kind
        state["resting"] = [loader for loader in state["resting"] if loader["kind"] == kind]
        return state

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Restore the run's state from the checkpoint that the Trainer resumes from, if any."""
        # The Trainer looks up this entry when it saves; a checkpoint without our state lacks it.
        state.stateful_callbacks.setdefault(type(self).__name__, {})
        # Of several callbacks of ours, the first one that is called handles the training.
        training, attending = RunState.handled or (ref(control), ref(self))
        self._is_handling = training() is not control or attending() in (None, self)
        if self._is_handling:
            RunState.handled = ref(control), ref(self)
        self._loader_kind = kind_of(base_loader(parts.get("train_dataloader")))
        self._optimizer = parts.get("optimizer")
        self._within_step, self._all_ranks, self.run = False, (), None
        if not self._is_handling or active_profile() is None:
            return
        if state.is_world_process_zero:
            hooking.report_switches(_FRAMEWORK, "TrainingArguments", vars(args))
        if not state.global_step:
            forget()  # an earlier training may have left a check for its first step
            return
        checkpoint = f"{_FRAMEWORK}: the checkpoint of step {state.global_step}"
        exported = (state.stateful_callbacks.get(name) or {} for name in (DEFAULT, EXPLICIT))
        entry = next((callback[KEY] for callback in exported if KEY in callback), None)
        if entry is not None and None in entry.get("ranks", ()):
            hooking.report_not_resumed(checkpoint, "it has the state of rank 0 only")
            return
        self.run = hooking.resume_from(entry, checkpoint)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Restore the generators again, since the start of the training has drawn from them."""
        if self.run is not None:
            self.run.restore_once()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Note that the step has drawn numbers: the Trainer may save a checkpoint in the step."""
        self._within_step = True

    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gather the states of all ranks if a checkpoint follows this step."""
        self._within_step = False
        self._gather_if_saved("on_step_end", args, state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gather the states of all ranks if a checkpoint follows this epoch."""
        self._gather_if_saved("on_epoch_end", args, state)

    def _gather_if_saved(self, event: str, args: Any, state: Any) -> None:
        # Only the Trainer's own save strategy counts: it decides the same on all ranks. Another
        # callback may request a save on one rank only, which would wait forever for the rest.
        self._all_ranks = ()
        if not self._is_handling or active_profile() is None or ranks().size == 1:
            return
        callbacks: Any = import_module("transformers.trainer_callback")
        control = callbacks.TrainerControl()
        getattr(callbacks.DefaultFlowCallback(), event)(args, state, control)
        if_better = control.should_evaluate and args.save_strategy == "best"
        if control.should_save or if_better:
            self._all_ranks = hooking.of_all_ranks(self._state())

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Gather the states again if a checkpoint follows, since an evaluation draws numbers."""
        if self._all_ranks:
            self._all_ranks = hooking.of_all_ranks(self._state())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stop handling the training."""
        self._is_handling, self._all_ranks = False, ()
