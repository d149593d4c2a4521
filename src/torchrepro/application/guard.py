"""Checks for drift: a knob that no longer has the value that an active profile has set.

Every active profile has a baseline: the values of the profile's knobs just after it was applied. If
several profiles set a knob, the baseline of the innermost profile counts. Knobs are read again when
a profile is restored. If the knob `guard` is `warn` or `error`, they are also read before optimizer
steps and at process exit.

Torch does not report which code changed a flag. So this module wraps the functions that change
flags and variables: setters of torch's C module, setters in the flags of ``torch.backends``, the
assignment to a compiler setting, and the two methods that change `os.environ`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from fnmatch import filter as names_like
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import ref

from torchrepro.ground.callers import frames, line, package, program_line
from torchrepro.ground.console import say
from torchrepro.ground.errors import DriftError, ExitStatus, by_write, shown
from torchrepro.ground.patching import wrap
from torchrepro.knobs.catalogue import CATALOGUE, knobs_by_name
from torchrepro.knobs.torch_state import Fp32Precision, InductorVariable
from torchrepro.reporting.outcomes import KnobChange, Writer, in_words, why_equivalent
from torchrepro.reporting.process_state import closed_latches
from torchrepro.seeding.streams import present_worker

if TYPE_CHECKING:
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.knobs.knob import Knob


PER_THREAD = frozenset({"backends.cpu.num_threads"})
"""Knobs that may differ between threads without any change: a thread keeps the number of threads
that was set when it first used torch."""

LOCKED = "TORCHREPRO_LOCKED"  # variable that ``torchrepro run --lock`` sets for its command

HELD_BY_LOCKS = ("backends.cpu.num_threads",)
"""Knobs that a lock fixes even if its profile does not name them."""

UNSEEN = Writer()


@dataclass(eq=False, slots=True)
class BaselineEntry:
    """One knob, the knob's value just after a profile was applied, and the writes since then.

    A value is at a distance of 0, 1 or 2 from the profile's value: it is the same value, an
    equivalent one, or drift.
    """

    knob: Knob
    value: Any
    thread: int  # the only thread that can read the baseline's value, or 0 for any thread
    last: Any  # the value after the last observed write
    first_writes: tuple[tuple[Any, Writer], ...] = ()
    """For each distance from 1 to that of `last`: the first write that was at least so far away.

    A write is the value that it left, and its writer. The first write is the one to report: it
    moved the knob, and later writes often only restore what they found.
    """

    @classmethod
    def of(cls, knob: Knob) -> BaselineEntry:
        """Return an entry with the value that `knob` has now in this thread."""
        # Each thread has its own values of inductor's options (torch/utils/_config_module.py).
        per_thread = knob.name in PER_THREAD or isinstance(knob.access, InductorVariable)
        now = reading(knob)
        return cls(knob, now, threading.get_ident() if per_thread else 0, now)

    @property
    def readable_here(self) -> bool:
        """Whether the current thread can read the knob's baseline value."""
        return self.thread in (0, threading.get_ident())

    def note_write(self, now: Any, writer: Writer) -> None:
        """Record that `writer` has set the knob to `now`. Earlier first writes stay."""
        distance = 0
        if now != self.value:
            distance = 1 if why_equivalent(self.knob, now) else 2
        write = now, writer
        self.first_writes = (*self.first_writes, write, write)[:distance]
        self.last = now

    def change(self, now: Any, when: str) -> KnobChange:
        """Return the change of the knob to `now`, with a `why` if `now` keeps the guarantee."""
        name, was, why = self.knob.name, self.value, why_equivalent(self.knob, now)
        first_writes = self.first_writes  # another thread may replace them
        observed = bool(first_writes) and self.last == now
        value, writer = first_writes[-1] if observed else (now, UNSEEN)
        if not why:
            moved_on = bool(writer.where) and value != now
            return KnobChange(name, was, now, when, *writer, moved_on=moved_on)
        if value != now:
            writer = UNSEEN
        by = writer.by or _switch_that_sets(self.knob.variable, now)
        if closed := closed_latches().get(self.knob.door):
            why = f"{why}; {closed}, and libraries that read it before keep {shown(was)}"
        return KnobChange(name, was, now, when, writer.where, writer.called, by, why=why)


@dataclass(eq=False, slots=True)
class Guard:
    """The baseline of one active profile, and the observed drift from this baseline."""

    refuse: Callable[[TorchreproError], None]  # called when the profile is no longer satisfied
    at_steps: bool = False  # whether knobs are read again before optimizer steps
    steps: int = 0  # optimizer steps since the profile was applied, of all optimizers
    baseline: dict[str, BaselineEntry] = field(default_factory=dict)
    drift: dict[tuple[str, str], KnobChange] = field(default_factory=dict)
    equivalents: dict[str, KnobChange] = field(default_factory=dict)
    """The knobs that now have another, equivalent value, by name."""

    switches: dict[str, Writer] = field(default_factory=dict)
    """The determinism switches of frameworks that have written knobs, by name."""

    reported: set[tuple[str, str]] = field(default_factory=set)

    @property
    def agreeing(self) -> tuple[Writer, ...]:
        """The determinism switches of frameworks that have written knobs and caused no drift."""
        causes = {drift.by for drift in self.drift.values()}
        return tuple(switch for switch in self.switches.values() if switch.by not in causes)

    @property
    def since(self) -> str:
        """The current moment in words, such as `after step 3`."""
        if not self.at_steps:
            return "at the end"
        return f"after step {self.steps - 1}" if self.steps else "before any step"


guards: list[Guard] = []  # one for every active profile, outermost first

_watched: list[tuple[BaselineEntry, Guard]] = []
"""For every knob its baseline, from the innermost profile that names the knob."""


def set_baseline(guard: Guard, knobs: Iterable[Knob]) -> ExitStack:
    """Store the current values of `knobs` as the baseline of `guard`.

    If the knob `guard` is not `none`, the first call also imports ``torch.optim``, registers a hook
    before optimizer steps and a hook at exit, and wraps the functions that write knobs. Closing
    the returned stack removes the baseline, the hooks and the wrappers.
    """
    with ExitStack() as undo:
        if guard not in guards:
            guards.append(guard)
            undo.callback(_update_watched)
            undo.callback(guards.remove, guard)
        guard.baseline |= {knob.name: BaselineEntry.of(knob) for knob in knobs}
        if LOCKED in os.environ and "torch" in sys.modules:
            names = [name for name in HELD_BY_LOCKS if name not in guard.baseline]
            guard.baseline |= {name: BaselineEntry.of(knobs_by_name()[name]) for name in names}
        _update_watched()
        if _mode() != "none" and not guard.at_steps:
            if not _guards_at_steps():
                from torch.optim.optimizer import register_optimizer_step_pre_hook

                undo.callback(_stepped.clear)
                undo.callback(register_optimizer_step_pre_hook(_before_step).remove)
                at_exit = partial(_at_exit, os.getpid())  # new, since unregister removes by object
                atexit.register(at_exit, ExitStatus())
                undo.callback(atexit.unregister, at_exit)
                undo.enter_context(watch_writers(_note_writer))
                undo.callback(_forget_writers)
            guard.at_steps = True
            undo.callback(setattr, guard, "at_steps", False)  # noqa: FBT003 - the value before
        return undo.pop_all()


def final_check(concerned: Collection[Guard]) -> Callable[[], None]:
    """Read the knobs of the guards `concerned`, just before the profiles are restored.

    The returned function reports the drift or raises `DriftError`. Call it after the restore.
    """
    return partial(_act_on, check(concerned), _mode())


def track_moved_knobs() -> Callable[[], tuple[Knob, ...]]:
    """Return a function that returns the watched knobs that have changed since this call.

    A profile may change knobs that it does not name, because torch changes some flags together. A
    profile may also correct earlier drift, so this drift is recorded first.
    """
    check(guards)
    before = [(baseline.knob, reading(baseline.knob)) for baseline, _ in _watched]
    return lambda: tuple(knob for knob, value in before if reading(knob) != value)


def check(
    concerned: Collection[Guard], moment: Callable[[Guard], str] = lambda guard: guard.since
) -> list[tuple[Guard, KnobChange]]:
    """Read the knobs of some guards again, and return the drift of each of these guards.

    `concerned` are the guards; `moment` returns the time in words. A loader's worker reads nothing.
    """
    if present_worker() is not None:
        return []
    drifts = []
    for baseline, guard in tuple(_watched):
        if guard not in concerned or not baseline.readable_here:
            continue
        now, name = reading(baseline.knob), baseline.knob.name
        if now == baseline.value:
            guard.equivalents.pop(name, None)
            continue
        known = guard.equivalents.get(name)
        if known is not None and known.now == now:
            continue  # keep the moment of the first observation
        guard.equivalents.pop(name, None)
        change = baseline.change(now, moment(guard))
        if change.why:
            guard.equivalents[name] = change
        else:
            drifts.append((guard, guard.drift.setdefault(_key(change), change)))
    return drifts


def reading(knob: Knob) -> Any:
    """Return the value of `knob`, or a text that says why the value can no longer be read."""
    try:
        now = knob.access.read()
    except Exception as error:  # noqa: BLE001 - a state that cannot be read any more has drifted
        return f"unreadable: {error}"
    # A float32 precision that is not set acts as ieee: torch only tests for tf32 and bf16
    # (https://github.com/pytorch/pytorch, aten/src/ATen/Context.cpp). The end of a block of
    # ``torch.backends.cudnn.flags`` resets the precisions of cuDNN to none.
    return "ieee" if now == "none" and isinstance(knob.access, Fp32Precision) else now


def _key(drift: KnobChange) -> tuple[str, str]:
    return drift.knob, shown(drift.now)


def _mode() -> str:
    return str(knobs_by_name()["guard"].access.read())


def _guards_at_steps() -> tuple[Guard, ...]:
    return tuple(guard for guard in tuple(guards) if guard.at_steps)  # threads may change the list


def _update_watched() -> None:
    """Choose again which profile's baseline is watched for each knob.

    Changes before this call come from a profile, so they do not count as drift.
    """
    before = {baseline.knob.name: baseline for baseline, _ in _watched}
    deciding: dict[str, tuple[BaselineEntry, Guard]] = {}
    for guard in tuple(guards):  # outermost first: the innermost profile replaces the others
        deciding |= {name: (baseline, guard) for name, baseline in guard.baseline.items()}
    for name, (baseline, _) in deciding.items():
        if baseline.readable_here:
            now, watched = reading(baseline.knob), before.get(name, baseline)
            baseline.first_writes = watched.first_writes if watched.last == now else ()
            baseline.note_write(now, UNSEEN)
    _watched[:] = deciding.values()  # in one step, since other threads read the list


def _before_step(optimizer: Any, *_: Any) -> None:
    known = _stepped.get(id(optimizer))
    if known is None or known[0]() is not optimizer:
        _stepped[id(optimizer)] = ref(optimizer), _smallest_parameter(optimizer)
        if len(_stepped) > _FEW:
            _stepped.pop(next(iter(_stepped)))
    mode, stepping, drifts = _mode(), _guards_at_steps(), []
    if mode != "none":
        drifts = check(stepping, lambda guard: f"before step {guard.steps}")
    for guard in stepping:
        guard.steps += 1
    _act_on(drifts, mode)


# torch.compile does not trace a function with this attribute. Torch's decorator that sets the
# attribute would import the compiler, which takes a second.
_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above


_stepped: dict[int, tuple[Any, Any]] = {}
"""Optimizers that have made a step, each with its smallest parameter.

One parameter per optimizer is enough: a loss that is NaN makes all of them NaN. The table keeps it
alive after the optimizer, until the process ends; the smallest one costs the least memory.
"""

_MOST, _FEW = 1 << 16, 16  # limits: bytes of a kept parameter, and optimizers


def _smallest_parameter(optimizer: Any) -> Any:
    with suppress(Exception):  # a tensor subclass may refuse any of these calls
        parameters = (weight for group in optimizer.param_groups for weight in group["params"])
        sizes = [(weight.untyped_storage().nbytes(), weight) for weight in parameters]
        size, smallest = min(sizes, key=itemgetter(0))
        return smallest if size <= _MOST else None
    return None


def _warn_if_nan() -> None:
    """Warn if parameters are NaN in a process that fills uninitialized memory with NaN."""
    import torch

    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if not (fills and torch.are_deterministic_algorithms_enabled()):
        return
    with suppress(Exception):  # a tensor subclass may refuse the calls; a device may be lost
        kept = [weight for _, weight in _stepped.values() if weight is not None]
        if any(bool(weight.isnan().any()) for weight in kept):
            say(
                "parameters are nan at the end. The profile fills uninitialized memory with nan "
                "to make reads of it visible: `torchrepro verify -- COMMAND` names the line if "
                "such a read is the cause"
            )


def _at_exit(process: int, status: ExitStatus) -> None:
    if os.getpid() != process:
        return  # a fork of the process, which may change its knobs freely
    _warn_if_nan()
    mode = _mode()
    drifts = check(_guards_at_steps()) if mode != "none" else []
    _report(drifts)
    if drifts and mode == "error":
        status.value = DriftError.exit_status


def _act_on(drifts: list[tuple[Guard, KnobChange]], mode: str) -> None:
    if not drifts or mode == "none":
        return
    if mode != "error":
        _report(drifts)
        return
    for guard, drift in drifts:
        guard.reported.add(_key(drift))
    innermost, _ = drifts[-1]
    innermost.refuse(DriftError([drift for _, drift in drifts]))


def _report(drifts: Iterable[tuple[Guard, KnobChange]]) -> None:
    new = []
    for guard, drift in drifts:
        if _key(drift) not in guard.reported:
            guard.reported.add(_key(drift))
            new.append(drift)
    for changes in by_write(new):
        say(f"drift: {in_words(changes)}")


# Attribution of writes.

_NOT_THE_PROGRAM = frozenset({"torch", "torch_npu", "torchrepro", *sys.stdlib_module_names})

_HUGGING_FACE = "transformers.trainer_utils"
_FULL_DETERMINISM = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
}
"""The variables that the switch of transformers sets; no other switch sets all of them."""

SWITCHES = {
    f"{_HUGGING_FACE}:enable_full_determinism": "transformers' enable_full_determinism",
    f"{_HUGGING_FACE}:set_seed": "transformers' set_seed(deterministic)",
    "accelerate.utils.random:set_seed": "accelerate's set_seed(deterministic)",
    "*lightning*.accelerator_connector:_set_torch_flags": "Lightning's Trainer(deterministic)",
    "ray.train.*.train_loop_utils:enable_reproducibility": "Ray Train's enable_reproducibility",
}
"""Patterns of functions with which frameworks switch determinism on or off -> names for users.

Only the displayed name depends on this table: a switch's writes count as drift as any others.
"""


def _forget_writers() -> None:
    for baseline, _ in tuple(_watched):  # later writes are not observed
        baseline.first_writes = ()
        baseline.note_write(baseline.last, UNSEEN)


def _note_writer() -> None:
    writer = _present_writer()
    for baseline, _ in tuple(_watched):
        now = reading(baseline.knob) if baseline.readable_here else baseline.last
        if now == baseline.last:
            continue
        if any(map(_is_worker_loop, frames())):
            baseline.value = now  # torch sets threads in its workers
        baseline.note_write(now, writer)
    if writer.by:
        for guard in _guards_at_steps():
            guard.switches.setdefault(writer.by, writer)


def _is_worker_loop(frame: FrameType) -> bool:
    # A spawned worker has our guard, and at exit `get_worker_info` no longer identifies the worker.
    function = frame.f_globals.get("__name__"), frame.f_code.co_name
    return function == ("torch.utils.data._utils.worker", "_worker_loop")


def watch_writers(notify: Callable[[], None]) -> ExitStack:
    """Call `notify` after every write of a knob, until the returned stack is closed.

    Replaces attributes of ``torch._C``, of the flags of ``torch.backends``, of the class of torch's
    compiler settings and of the class of `os.environ`. Does not observe a call of a function that
    was imported by name earlier (``from torch import set_num_threads``). Does not observe writes
    of opt_einsum's settings either, because these are plain attributes of a torch module.
    """
    listeners = [notify]

    def followed(setter: Callable[..., Any]) -> Any:
        def writing(*args: Any, **kwargs: Any) -> Any:
            try:
                return setter(*args, **kwargs)
            finally:  # some setters assign first and raise afterwards
                for listener in listeners:
                    listener()

        writing._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - as above
        return writing

    with ExitStack() as undo:
        undo.callback(listeners.clear)  # our wrapper stays if other code has wrapped it since
        for owner, name in tuple(setters()):
            wrap(undo, owner, name, followed)
        return undo.pop_all()


def setters() -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of every function that writes torch's state or `os.environ`.

    Torch does not report writes, so private functions are used: the setters of torch's C module
    (``torch._C._set_*``), the setters stored in the flags of ``torch.backends`` (``ContextProp``)
    and the assignment to a compiler setting (``ConfigModule``). If torch renames one of them, the
    guard still reports the step before which a knob was changed, but not the line.
    """
    torch: Any = import_module("torch")
    written_in_c = vars(torch._C)  # noqa: SLF001 - see above
    patterns = dict.fromkeys(pattern for knob in CATALOGUE for pattern in knob.setters)
    for name in [name for pattern in patterns for name in names_like(written_in_c, pattern)]:
        yield torch._C, name  # noqa: SLF001 - see above
        if vars(torch).get(name) is written_in_c[name]:
            yield torch, name
    backends = import_module("torch.backends")
    flag = getattr(backends, "ContextProp", ())
    for module in list(vars(backends).values()):
        # A flag stores its setter when it is defined, so a wrapper in torch._C does not affect it.
        flags = (value for value in vars(type(module)).values() if isinstance(value, flag))
        yield from ((value, "setter") for value in flags)
    with suppress(ImportError):  # an older torch has not loaded it yet
        import_module("torch.utils._config_module")
    settings = getattr(sys.modules.get("torch.utils._config_module"), "ConfigModule", None)
    if settings is not None and "__setattr__" in vars(settings):
        yield settings, "__setattr__"
    # Every change of `os.environ` calls one of these two, even `pop`, `update` and `clear`.
    yield from ((type(os.environ), name) for name in ("__setitem__", "__delitem__"))


def _present_writer() -> Writer:
    """Return the innermost call outside torch, torchrepro and the standard library."""
    nearest = next((frame for frame in frames() if package(frame) not in _NOT_THE_PROGRAM), None)
    if nearest is None:
        return UNSEEN
    source_line, called = line(nearest), program_line(nearest)
    function = f"{nearest.f_globals.get('__name__')}:{nearest.f_code.co_name}"
    by = next((words for named, words in SWITCHES.items() if fnmatchcase(function, named)), "")
    return Writer(source_line, called if called != source_line else "", by)


def _switch_that_sets(variable: str, text: str) -> str:
    """Return the name of the framework switch that has set `variable` to `text`, or "".

    The module of the switch must be loaded, and all variables must be as the switch sets them.
    """
    all_set = _FULL_DETERMINISM.items() <= os.environ.items()
    if _HUGGING_FACE in sys.modules and _FULL_DETERMINISM.get(variable) == text and all_set:
        return SWITCHES[f"{_HUGGING_FACE}:enable_full_determinism"]
    return ""
