"""The Trainer of Hugging Face: a callback that puts the state of a run into its checkpoints.

The Trainer gets its first callbacks from the list ``DEFAULT_CALLBACKS`` of `transformers.trainer`,
which is undocumented. The state of a callback that is an `ExportableState` is written with the
checkpoint (https://huggingface.co/docs/transformers/main_classes/callback). The Trainer reads it
again only where it is asked to, so the callback reads it by itself.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import ref

from torchrepro.console import say_once
from torchrepro.frameworks import run_state
from torchrepro.frameworks.accelerate import base_loader
from torchrepro.frameworks.hooking import Switch, in_force, log_profile, say_switches
from torchrepro.frameworks.run_state import KEY, ranks
from torchrepro.patching import MissingHookError, surround
from torchrepro.seeding.loader_places import kind_of
from torchrepro.seeding.state import forget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType

DEFAULT = "TorchreproDefaultCallback"
EXPLICIT = "TorchreproCallback"
"""Under the name of its class the Trainer keeps the state of a callback."""

_FRAMEWORK = "transformers"

# The `control` of the training that began last, and the callback of ours that attends to it.
_in_charge: list[tuple[ref[Any], ref[RunState]]] = []


def hook_trainer(module: ModuleType) -> ExitStack:
    """Put our callback among those that every `Trainer` of `module` gets.

    Raises `MissingHookError` where there is no list of them.
    """
    defaults = getattr(module, "DEFAULT_CALLBACKS", None)
    if not isinstance(defaults, list):
        raise MissingHookError(f"{module.__name__}.DEFAULT_CALLBACKS")
    callback = callback_class(DEFAULT)
    with ExitStack() as undo:
        defaults.append(callback)

        @undo.callback
        def _() -> None:
            if callback in defaults:
                defaults.remove(callback)

        with suppress(MissingHookError):  # without it, streams are read again in the first step
            surround(undo, module.Trainer, "_load_rng_state", _loading_generators)
        return undo.pop_all()


def _loading_generators(load: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    # The Trainer loads its own once more after it has read the batches of a step, which for a
    # stream come from them.
    attending = _in_charge[0][1]() if _in_charge else None
    if in_force() is not None and attending is not None and attending.has_gone_on:
        return None
    return load(trainer, *args, **kwargs)


def hook_reporters(module: ModuleType) -> ExitStack:
    """Have the Trainer's reporters write the profile as soon as they know where."""
    with ExitStack() as undo:
        for name, place in _REPORTERS.items():
            reporter = getattr(module, name, None)
            try:
                surround(undo, reporter, "on_train_begin", partial(_beginning, place))
            except (MissingHookError, TypeError):
                say_once(f"{_FRAMEWORK} has no {name}.on_train_begin: it is not given the profile")
        return undo.pop_all()


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
        return exported | {KEY: run_state.checkpoint_entry([self._state(), *others])}

    def _state(self) -> dict[str, Any]:
        state = run_state.state_of_rank(filter(None, [self._optimizer]))
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
            say_switches(_FRAMEWORK, _switches(args))
        if not state.global_step:
            forget()  # what the training before would have done at its first step
            return
        where = f"{_FRAMEWORK}: the checkpoint of step {state.global_step}"
        entry = None
        for name in (DEFAULT, EXPLICIT):
            exported = state.stateful_callbacks.get(name) or {}
            for each in exported if isinstance(exported, list) else [exported]:
                entry = entry or each.get(KEY)
        if entry is not None and None in entry.get("ranks", ()):
            run_state.say_not_resumed(where, "it holds the state of rank 0 alone")
            return
        run = run_state.own_state(entry, where)
        if run is not None and run_state.put_back(run, where):
            self.has_gone_on = True
            run_state.begin_interrupted_epochs(run)
            self._pending = run_state.generators_of(run)

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
            self._all_ranks = run_state.of_all_ranks(self._state())

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Gather them again where a checkpoint follows: an evaluation draws numbers."""
        if self._saves:
            self._all_ranks = run_state.of_all_ranks(self._state())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Attend no longer."""
        self._attends, self._saves = False, False


def _switches(args: Any) -> Iterator[Switch]:
    if args.full_determinism:
        for knob, value in _FULL_DETERMINISM.items():
            yield Switch("TrainingArguments(full_determinism=True)", knob, value)
    precision = "tf32" if args.tf32 else "ieee"
    for knob in _TF32 if args.tf32 is not None else ():
        yield Switch(f"TrainingArguments(tf32={args.tf32})", knob, precision)


_FULL_DETERMINISM = {
    "env.CUDA_LAUNCH_BLOCKING": "1",
    "env.CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "env.ASCEND_LAUNCH_BLOCKING": "1",
    "env.HCCL_DETERMINISTIC": "1",
    "env.FLASH_ATTENTION_DETERMINISTIC": "1",
    "backends.torch.deterministic_algorithms": "error",
    "backends.cudnn.deterministic": True,
    "backends.cudnn.benchmark": False,
}
_TF32 = (
    "backends.cuda.matmul_fp32_precision",
    "backends.cudnn.conv_fp32_precision",
    "backends.cudnn.rnn_fp32_precision",
)
