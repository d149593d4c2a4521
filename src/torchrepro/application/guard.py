"""The drift guard: whether knobs still hold what the profiles in force have set.

There is one guard in a process, and what it does about drift is the knob `guard`. Every profile
that is put in force adds what it has set. A knob that several of them name is held to the
innermost. Knobs are read again when a profile is taken back, whatever the guard; with a guard that
warns or refuses, also before optimizer steps and as the process ends.

Nothing in torch says who changed a flag, so while a guard wants to know, the functions through
which flags and variables change are wrapped: those of torch's C module that torch itself looks up
whenever it needs them, those that the flags of ``torch.backends`` keep, the assignment to a setting
of the compiler, and the two methods behind `os.environ`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import filter as names_like
from functools import partial
from importlib import import_module
from operator import itemgetter
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from torchrepro.ground.callers import frames, line, package, program_place
from torchrepro.ground.console import say
from torchrepro.ground.errors import DriftError, ExitStatus, by_write
from torchrepro.ground.messages import shown
from torchrepro.ground.patching import wrap
from torchrepro.knobs.catalogue import knobs_by_name
from torchrepro.knobs.torch_state import Fp32Precision, InductorVariable
from torchrepro.reporting.outcomes import KnobChange, Writer, in_words, why_equivalent
from torchrepro.reporting.process_state import closed_doors
from torchrepro.seeding.streams import present_worker

if TYPE_CHECKING:
    from torchrepro.ground.errors import TorchreproError
    from torchrepro.knobs.knob import Knob


PER_THREAD = frozenset({"backends.cpu.num_threads"})
"""Knobs of which other threads may read another value although nobody changed it: a thread keeps
the number of threads with which it first used torch."""

LOCKED = "TORCHREPRO_LOCKED"  # variable that is set below ``torchrepro run --lock``

HELD_BY_LOCKS = ("backends.cpu.num_threads",)
"""Knobs whose value a lock was written for although its profile may not name them."""

UNSEEN = Writer()


class LastWrite(NamedTuple):
    """What a knob read after the last write that was seen, and which writes led there.

    Of a write: what the knob read after it, and who made it.
    """

    value: Any
    first_change: tuple[Any, Writer] = (None, UNSEEN)
    """The first write since the knob read the profile's value."""

    first_break: tuple[Any, Writer] = (None, UNSEEN)
    """The first write since it read that, or an equivalent value."""


@dataclass(eq=False, slots=True)
class BaselineEntry:
    """One knob, and what it read when a profile had set it."""

    knob: Knob
    value: Any
    thread: int  # the only thread in which the knob can be read, or 0 for any
    last: LastWrite

    @classmethod
    def of(cls, knob: Knob) -> BaselineEntry:
        """Hold `knob` to what it reads now in this thread."""
        # Inductor's options are context variables (torch/utils/_config_module.py of pytorch).
        per_thread = knob.name in PER_THREAD or isinstance(knob.access, InductorVariable)
        now = reading(knob)
        return cls(knob, now, threading.get_ident() if per_thread else 0, LastWrite(now))

    @property
    def readable_here(self) -> bool:
        """Whether what the present thread reads is what is held."""
        return self.thread in (0, threading.get_ident())

    def note_write(self, now: Any, writer: Writer) -> None:
        """Take note that `writer` has made the knob read `now`."""
        was, this = self.last, (now, writer)
        if now == self.value:
            self.last = LastWrite(now)
            return
        # Whoever writes once it has been moved changes nothing about who moved it first.
        was_held = was.value == self.value
        change = this if was_held else was.first_change
        if why_equivalent(self.knob, now):
            self.last = LastWrite(now, change)
        else:
            unbroken = was_held or why_equivalent(self.knob, was.value)
            self.last = LastWrite(now, change, this if unbroken else was.first_break)

    def change(self, now: Any, when: str) -> KnobChange:
        """Return the knob's change to `now`, which has a reason if `now` is equivalent."""
        name, was, why = self.knob.name, self.value, why_equivalent(self.knob, now)
        value, writer = self.last.first_change if why else self.last.first_break
        if self.last.value != now or (why and value != now):
            writer = UNSEEN
        if not why:
            moved_on = bool(writer.where) and value != now
            return KnobChange(name, was, now, when, *writer, moved_on=moved_on)
        by = writer.by or _switch_that_sets(self.knob.variable, now)
        if closed := closed_doors().get(self.knob.door):
            why = f"{why}; {closed}, and what has read it by then goes on with {shown(was)}"
        return KnobChange(name, was, now, when, writer.where, writer.called, by, why=why)


@dataclass(eq=False, slots=True)
class Guard:
    """What one profile in force has set, and the drift from it that was seen so far."""

    refuse: Callable[[TorchreproError], None]  # what is done when the profile turns out not to hold
    at_steps: bool = False  # whether knobs are read again before optimizer steps
    steps: int = 0  # optimizer steps since the profile was put in force, of all optimizers
    baseline: dict[str, BaselineEntry] = field(default_factory=dict)
    drift: dict[tuple[str, str], KnobChange] = field(default_factory=dict)
    as_good: dict[str, KnobChange] = field(default_factory=dict)
    """The knobs that now read another, equivalent value, by name."""

    switches: dict[str, Writer] = field(default_factory=dict)
    """The determinism switches of frameworks that were seen to write, by name."""

    said: set[tuple[str, str]] = field(default_factory=set)

    @property
    def agreeing(self) -> tuple[Writer, ...]:
        """The switches that were seen to write, and that no drift comes from."""
        blamed = {drift.by for drift in self.drift.values()}
        return tuple(switch for switch in self.switches.values() if switch.by not in blamed)

    @property
    def since(self) -> str:
        """The present moment, in words."""
        if not self.at_steps:
            return "at the end"
        return f"after step {self.steps - 1}" if self.steps else "before any step"


guards: list[Guard] = []  # one for every profile in force, outermost first

_watched: list[tuple[BaselineEntry, Guard]] = []
"""For every knob the entry to which it is held: that of the innermost profile that names it."""


def set_baseline(guard: Guard, knobs: Iterable[Knob]) -> ExitStack:
    """Hold `knobs` to what they read now.

    While the knob `guard` is on, the first call for a profile also imports ``torch.optim``, adds a
    hook of torch's own before optimizer steps and one at exit, and wraps the writers of knobs.
    Closing what is returned takes that back.
    """
    with ExitStack() as undo:
        if guard not in guards:
            guards.append(guard)
            undo.callback(_settle)
            undo.callback(guards.remove, guard)
        guard.baseline |= {knob.name: BaselineEntry.of(knob) for knob in knobs}
        if LOCKED in os.environ and "torch" in sys.modules:
            held = (knobs_by_name()[name] for name in HELD_BY_LOCKS if name not in guard.baseline)
            guard.baseline |= {knob.name: BaselineEntry.of(knob) for knob in held}
        _settle()
        if _mode() != "none" and not guard.at_steps:
            if not _guards_at_steps():
                from torch.optim.optimizer import register_optimizer_step_pre_hook

                undo.callback(_stepped.clear)
                undo.callback(register_optimizer_step_pre_hook(_before_step).remove)
                at_exit = partial(_at_exit, os.getpid())  # its own, to be unregistered alone
                atexit.register(at_exit, ExitStatus())
                undo.callback(atexit.unregister, at_exit)
                undo.enter_context(watch_writers(_note_writer))
                undo.callback(_forget_writers)
            guard.at_steps = True
            undo.callback(setattr, guard, "at_steps", False)  # noqa: FBT003 - as it was
        return undo.pop_all()


def final_check(concerned: Collection[Guard]) -> Callable[[], None]:
    """Read again what profiles have set that are about to be taken back.

    What is returned says or refuses what was found, once they are.
    """
    return partial(_act_on, check(concerned), _mode())


@contextmanager
def drift_behind(error: BaseException | None) -> Iterator[None]:
    """Say the drift that is refused within the block instead of raising it over `error`.

    An `error` that would end the process with status 0, as `sys.exit()` raises it, is raised over.
    """
    try:
        yield
    except DriftError as drift:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            raise
        if not isinstance(error, DriftError):  # that one has said it
            say(drift)


def moved_from_now() -> Callable[[], tuple[Knob, ...]]:
    """Return a function that says which of the knobs that are held have moved since this call.

    Putting a profile in force may move more than it names: torch ties some of its flags together.
    It may also put right what has drifted until now, which is therefore read before.
    """
    check(guards)
    before = [(each.knob, reading(each.knob)) for each, _ in _watched]
    return lambda: tuple(knob for knob, value in before if reading(knob) != value)


def check(
    concerned: Collection[Guard], moment: Callable[[Guard], str] = lambda guard: guard.since
) -> list[tuple[Guard, KnobChange]]:
    """Read the knobs of the guards `concerned` again, and return what has drifted.

    `moment` says when it was seen.
    """
    if present_worker() is not None:
        return []
    found = []
    for each, guard in tuple(_watched):
        if guard not in concerned or not each.readable_here:
            continue
        now, name = reading(each.knob), each.knob.name
        if now == each.value:
            guard.as_good.pop(name, None)
            continue
        known = guard.as_good.get(name)
        if known is not None and known.now == now:
            continue  # it keeps the moment at which it was seen
        guard.as_good.pop(name, None)
        change = each.change(now, moment(guard))
        if change.why:
            guard.as_good[name] = change
        else:
            found.append((guard, guard.drift.setdefault(_key(change), change)))
    return found


def reading(knob: Knob) -> Any:
    """Return what `knob` reads, or in words why it can no longer be read."""
    try:
        now = knob.access.read()
    except Exception as error:  # noqa: BLE001 - a state that cannot be read any more has drifted
        return f"unreadable: {error}"
    # An unset float32 precision comes to ieee: torch asks only whether it is tf32 or bf16
    # (https://github.com/pytorch/pytorch, aten/src/ATen/Context.cpp). Leaving
    # ``torch.backends.cudnn.flags`` unsets those of cuDNN.
    return "ieee" if now == "none" and isinstance(knob.access, Fp32Precision) else now


def _key(drift: KnobChange) -> tuple[str, str]:
    return drift.knob, shown(drift.now)


def _mode() -> str:
    return str(knobs_by_name()["guard"].access.read())


def _guards_at_steps() -> tuple[Guard, ...]:
    return tuple(guard for guard in tuple(guards) if guard.at_steps)  # threads may change it


def _settle() -> None:
    """Find out anew which entries count. Whatever moved up to now was a profile's doing."""
    before = {each.knob.name: each.last for each, _ in _watched}
    deciding: dict[str, tuple[BaselineEntry, Guard]] = {}
    for guard in tuple(guards):  # outermost first: the last one that names a knob decides
        deciding |= {name: (each, guard) for name, each in guard.baseline.items()}
    for name, (each, _) in deciding.items():
        if each.readable_here:
            now, last = reading(each.knob), before.get(name)
            each.last = last if last is not None and last.value == now else LastWrite(now)
    _watched[:] = deciding.values()  # in one step: other threads read and write meanwhile


def _before_step(optimizer: Any, *_: Any) -> None:
    known = _stepped.get(id(optimizer))
    if known is None or known[0]() is not optimizer:
        _stepped[id(optimizer)] = ref(optimizer), _smallest_parameter(optimizer)
        if len(_stepped) > _FEW:
            _stepped.pop(next(iter(_stepped)))
    mode, present = _mode(), _guards_at_steps()
    found = check(present, lambda guard: f"before step {guard.steps}") if mode != "none" else []
    for guard in present:
        guard.steps += 1
    _act_on(found, mode)


# What torch.compile looks for to leave a function alone; importing it takes a second.
_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above


_stepped: dict[int, tuple[Any, Any]] = {}
"""Optimizers that have made a step, each with a parameter that outlives it: a loss that is NaN
makes all of them NaN. It is the smallest, since it keeps its memory until the process ends."""

_MOST, _FEW = 1 << 16, 16  # bytes of it, and optimizers


def _smallest_parameter(optimizer: Any) -> Any:
    with suppress(Exception):  # whatever a class of tensors refuses
        found = (each for group in optimizer.param_groups for each in group["params"])
        sizes = [(each.untyped_storage().nbytes(), each) for each in found]
        size, smallest = min(sizes, key=itemgetter(0))
        return smallest if size <= _MOST else None
    return None


def _say_if_nan() -> None:
    """Say it if parameters are NaN in a process whose fresh memory was filled with NaN."""
    import torch

    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if not (fills and torch.are_deterministic_algorithms_enabled()):
        return
    with suppress(Exception):  # whatever a class of tensors refuses; a device may be gone
        if any(bool(each.isnan().any()) for _, each in _stepped.values() if each is not None):
            say(
                "parameters are nan at the end. The profile fills fresh memory with nan, so that "
                "what reads it unwritten shows: `torchrepro verify -- COMMAND` names the line if "
                "that is why"
            )


def _at_exit(process: int, status: ExitStatus) -> None:
    if os.getpid() != process:
        return  # a copy of the process, which does with its knobs what it likes
    _say_if_nan()
    mode = _mode()
    found = check(_guards_at_steps()) if mode != "none" else []
    _say(found)
    if found and mode == "error":
        status.value = DriftError.exit_status


def _act_on(found: list[tuple[Guard, KnobChange]], mode: str) -> None:
    if not found or mode == "none":
        return
    if mode != "error":
        _say(found)
        return
    for guard, drift in found:
        guard.said.add(_key(drift))
    # The profile may be held by something that ends the run in a way of its own.
    found[-1][0].refuse(DriftError([drift for _, drift in found]))


def _say(found: Iterable[tuple[Guard, KnobChange]]) -> None:
    new = []
    for guard, drift in found:
        if _key(drift) not in guard.said:
            guard.said.add(_key(drift))
            new.append(drift)
    for written in by_write(new):
        say(f"drift: {in_words(written)}")


# Who writes.

_SETTERS = (
    "_set_cublas*",
    "_set_cudnn_*",
    "_cuda_set_cudnn_*",
    "_set_mkldnn_*",
    "_set_onednn_*",
    "_set_sdp_use_*",
    "_set_deterministic_*",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_*_preferred_backend",
    "_set_default_dtype",
    "set_num_threads",
)
"""Patterns of the names of the functions of torch's C module that write what knobs read."""

_THEIRS = frozenset({"torch", "torch_npu", "torchrepro", *sys.stdlib_module_names})

_HUGGING_FACE = "transformers.trainer_utils"
_FULL_DETERMINISM = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "ASCEND_LAUNCH_BLOCKING": "1",
    "HCCL_DETERMINISTIC": "1",
}
"""What the switch of transformers sets in the environment, which tells it from others."""

_LIGHTNING = "trainer.connectors.accelerator_connector"
_RAY_TRAIN = "train_loop_utils"

SWITCHES = {
    (_HUGGING_FACE, "enable_full_determinism"): "transformers' enable_full_determinism",
    (_HUGGING_FACE, "set_seed"): "transformers' set_seed(deterministic)",
    ("accelerate.utils.random", "set_seed"): "accelerate's set_seed(deterministic)",
    **{
        (f"{root}.{_LIGHTNING}", "_set_torch_flags"): "Lightning's Trainer(deterministic)"
        for root in ("lightning.pytorch", "pytorch_lightning")
    },
    **{
        (f"{root}.{_RAY_TRAIN}", "enable_reproducibility"): "Ray Train's enable_reproducibility"
        for root in ("ray.train.torch", "ray.train.v2.torch")
    },
}
"""The functions by which frameworks switch determinism on or off, and what their users call them.

Nothing depends on a row but the name: what a switch writes is judged as any other write is.
"""


def _forget_writers() -> None:
    for each, _ in tuple(_watched):  # the next write may go unseen
        each.last = LastWrite(each.last.value)


def _note_writer() -> None:
    nearest = _nearest()
    is_switch = nearest is not None and bool(_switch(nearest))
    writer = _present_writer() if is_switch else UNSEEN
    for each, _ in tuple(_watched):
        now = reading(each.knob) if each.readable_here else each.last.value
        if now != each.last.value and any(map(_is_worker_loop, frames())):
            each.value, each.last = now, LastWrite(now)  # torch's own number of threads
        elif now != each.last.value:
            writer = writer if writer.where else _present_writer()
            each.note_write(now, writer)
    if writer.by:
        for guard in _guards_at_steps():
            guard.switches.setdefault(writer.by, writer)


def _is_worker_loop(frame: FrameType) -> bool:
    # A spawned worker has our guard, and at its exit torch no longer says that it was a worker.
    its = frame.f_globals.get("__name__"), frame.f_code.co_name
    return its == ("torch.utils.data._utils.worker", "_worker_loop")


def watch_writers(notify: Callable[[], None]) -> ExitStack:
    """Have `notify` called after every write; closing what is returned takes everything back.

    Changes attributes of ``torch._C``, of the flags of ``torch.backends``, of the class of torch's
    compiler settings and of the class of `os.environ`. Two kinds of writes are not seen: by a name
    that was kept before, as by ``from torch import set_num_threads``, and of opt_einsum's settings,
    which are plain attributes of a module of torch's.
    """
    listeners = [notify]

    def followed(setter: Callable[..., Any]) -> Any:
        def writing(*args: Any, **kwargs: Any) -> Any:
            try:
                return setter(*args, **kwargs)
            finally:  # some setters assign first and refuse afterwards
                for listener in listeners:
                    listener()

        writing._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - as above
        return writing

    with ExitStack() as undo:
        undo.callback(listeners.clear)  # our wrapper may stay, within somebody else's
        for owner, name in tuple(setters()):
            wrap(undo, owner, name, followed)
        return undo.pop_all()


def setters() -> Iterator[tuple[Any, str]]:
    """Yield everything through which torch and the environment are written: owner and attribute.

    Torch offers no way to hear of a write, so these are private: the setters of its C module
    (``torch._C._set_*``), what the flags of ``torch.backends`` keep of them (``ContextProp``) and
    the assignment to a setting of the compiler (``ConfigModule``). Where one is gone or renamed,
    the guard says before which step a knob was changed, and not by which line.
    """
    torch: Any = import_module("torch")
    written_in_c = vars(torch._C)  # noqa: SLF001 - see above
    for name in [name for pattern in _SETTERS for name in names_like(written_in_c, pattern)]:
        yield torch._C, name  # noqa: SLF001 - see above
        if vars(torch).get(name) is written_in_c[name]:
            yield torch, name
    backends = import_module("torch.backends")
    flag = getattr(backends, "ContextProp", ())
    for module in list(vars(backends).values()):
        # A flag calls the function that it was made with, whatever torch._C holds later.
        flags = (value for value in vars(type(module)).values() if isinstance(value, flag))
        yield from ((value, "setter") for value in flags)
    with suppress(ImportError):  # an older torch has not loaded it yet
        import_module("torch.utils._config_module")
    settings = getattr(sys.modules.get("torch.utils._config_module"), "ConfigModule", None)
    if settings is not None and "__setattr__" in vars(settings):
        yield settings, "__setattr__"
    # What every change of `os.environ` comes down to, `pop`, `update` and `clear` included.
    yield from ((type(os.environ), name) for name in ("__setitem__", "__delitem__"))


def _present_writer() -> Writer:
    nearest = _nearest()
    if nearest is None:
        return UNSEEN
    where, called = line(nearest), program_place(nearest)
    return Writer(where, called if called != where else "", _switch(nearest))


def _nearest() -> FrameType | None:
    return next((each for each in frames() if package(each) not in _THEIRS), None)


def _switch(frame: FrameType) -> str:
    return SWITCHES.get((str(frame.f_globals.get("__name__")), frame.f_code.co_name), "")


def _switch_that_sets(variable: str, text: str) -> str:
    """Return the switch all of whose variables now read as it sets them, or an empty string.

    Its module is loaded, and `variable` with this `text` is among them.
    """
    as_set = all(os.environ.get(name) == its for name, its in _FULL_DETERMINISM.items())
    if _HUGGING_FACE in sys.modules and _FULL_DETERMINISM.get(variable) == text and as_set:
        return SWITCHES[_HUGGING_FACE, "enable_full_determinism"]
    return ""
