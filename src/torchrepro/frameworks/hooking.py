"""Functions that the hooks into all frameworks share.

They log the active profile, report determinism switches, and store the state of a run in a
framework's checkpoint. The state contains the generators and the loaders of every rank. It consists
of numbers and strings in lists and dicts, so ``torch.load(weights_only=True)`` reads it.

Modules that only some programs use are imported on first use, so that a profile does not slow down
the import of a framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.console import note, say
from torchrepro.ground.errors import SeedingError, TorchreproError, shown
from torchrepro.ground.patching import MissingHookError
from torchrepro.seeding.loader_positions import epochs
from torchrepro.seeding.resumed_run import ResumedRun
from torchrepro.seeding.state import (
    compare_at_first_step,
    digests_of,
    expect_weights,
    forget,
    rng_state,
    set_generators,
    set_rng_state,
)
from torchrepro.seeding.streams import World, process_group

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.report import Report


class ActiveProfile(NamedTuple):
    """An active profile, and a function that returns the present report of the profile."""

    resolved: ResolvedProfile
    report: Callable[[], Report]


profiles: list[ActiveProfile] = []  # outermost first


def active_profile() -> ActiveProfile | None:
    """Return the innermost active profile, or None."""
    return profiles[-1] if profiles else None


@contextmanager
def skip_on_error(framework: str, action: str) -> Iterator[None]:
    """Catch an error of the block, and report on stderr that `action` failed and is skipped.

    `TorchreproError` and `MissingHookError` are not caught.
    """
    try:
        yield
    except (TorchreproError, MissingHookError):
        raise
    except Exception as error:  # noqa: BLE001 - the program did not request the action
        why = str(error).strip().partition("\n")[0]
        say(f"{framework}: {action} failed and is skipped: {type(error).__name__}: {why}")


def part_of(module: ModuleType, name: str) -> Any:
    """Return the class `name` of a framework; raises `MissingHookError` if it does not exist."""
    part = getattr(module, name, None)
    if part is None:
        raise MissingHookError(name)
    return part


_ALGORITHMS = "backends.torch.deterministic_algorithms"
_TF32 = (
    "backends.cuda.matmul_fp32_precision",
    "backends.cudnn.conv_fp32_precision",
    "backends.cudnn.rnn_fp32_precision",
)
_FULL_DETERMINISM = {
    "env.CUDA_LAUNCH_BLOCKING": "1",
    "env.CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "env.ASCEND_LAUNCH_BLOCKING": "1",
    "env.HCCL_DETERMINISTIC": "1",
    "env.FLASH_ATTENTION_DETERMINISTIC": "1",
    _ALGORITHMS: "error",
    "backends.cudnn.deterministic": True,
    "backends.cudnn.benchmark": False,
}
SWITCHES: Mapping[str, Sequence[tuple[str, Any, Mapping[str, Any]]]] = {
    # As `_set_torch_flags` does in pytorch/trainer/connectors/accelerator_connector.py of Lightning
    "Trainer": (
        ("deterministic", True, {_ALGORITHMS: "error", "env.CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        ("deterministic", "warn", {_ALGORITHMS: "warn"}),
        ("deterministic", False, {_ALGORITHMS: "none"}),
        ("benchmark", True, {"backends.cudnn.benchmark": True}),
        ("benchmark", False, {"backends.cudnn.benchmark": False}),
    ),
    "set_seed": (("deterministic", True, {_ALGORITHMS: "error"}),),
    "TrainingArguments": (
        ("full_determinism", True, _FULL_DETERMINISM),
        ("tf32", True, dict.fromkeys(_TF32, "tf32")),
        ("tf32", False, dict.fromkeys(_TF32, "ieee")),
    ),
}
"""Called function or class -> an argument, its value, and the knobs it sets with their values."""


def report_switches(framework: str, called: str, arguments: Mapping[str, Any]) -> None:
    """Report on stderr which determinism switches agree with the active profile and which do not.

    A switch is an argument of the function or class `called` that `SWITCHES` lists. A switch is
    ignored if the profile sets none of the switch's knobs. `--quiet` hides the agreeing switches.
    """
    from torchrepro.knobs.catalogue import knobs_by_name
    from torchrepro.profile.resolved import flatten
    from torchrepro.reporting.outcomes import why_equivalent

    profile = active_profile()
    if profile is None:
        return
    name, requested = profile.resolved.name, flatten(profile.resolved.values)
    agreeing = []
    for argument, switched, sets in SWITCHES[called]:
        value = arguments.get(argument)
        if type(value) is not type(switched) or value != switched:  # 1 is not True
            continue
        spelling = f"{called}({argument}={value!r})"
        concerned = {key: becomes for key, becomes in sets.items() if key in requested}
        contradicting = {
            key: becomes
            for key, becomes in concerned.items()
            if becomes != requested[key] and not why_equivalent(knobs_by_name()[key], becomes)
        }
        for key, becomes in contradicting.items():
            say(
                f"{framework}: {spelling} does not agree with {name}: the profile sets {key} to "
                f"{shown(requested[key])}, and the switch sets it to {shown(becomes)}"
            )
        if concerned and not contradicting:
            agreeing.append(spelling)
    if agreeing:
        verb = "agrees" if len(agreeing) == 1 else "agree"
        note(f"{framework}: {', '.join(agreeing)} {verb} with {name}")


def call_reporting_switches(
    framework: str, called: str, call: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Report whether switches in the arguments agree with the profile, and then call `call`."""
    arguments: Mapping[str, Any] = {}
    with suppress(TypeError):  # the call itself raises for a wrong argument
        arguments = signature(call).bind(*args, **kwargs).arguments
    report_switches(framework, called, arguments)
    return call(*args, **kwargs)


def log_profile(framework: str, loggers: Iterable[Any], target_of: Callable[[Any], Any]) -> None:
    """Write digest, values and manifest of the active profile to each of `loggers`.

    `target_of` returns the target of a logger: a run of MLflow or wandb, a SummaryWriter, or a path
    to a folder. A logger with any other target is skipped. If writing fails, a line on stderr
    reports it, and the program continues.
    """
    from torchrepro.manifest.contents import manifest
    from torchrepro.manifest.destinations import destination_of

    if not profiles:
        return
    for logger in loggers:
        with skip_on_error(framework, f"writing the profile to {type(logger).__name__}"):
            target = target_of(logger)
            destination = destination_of(target)
            if destination is not None:
                resolved, report = profiles[-1]
                destination.write(target, manifest(resolved, report()))


# The state of a run in a checkpoint.

KEY = "torchrepro"  # the key of the run's state in a checkpoint

FORMAT = 2


def state_of_rank(optimizers: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the state of this rank: its generators, and the progress in its loaders.

    Also has digests of `optimizers`, to detect if an optimizer differs in the resumed run.
    """
    return {
        "optimizers": [digests_of(optimizer) for optimizer in optimizers],
        "rng": rng_state(),
        **ResumedRun.active.saved(),
    }


def optimizers_in(parts: Mapping[Any, Any]) -> list[Any]:
    return [part for part in parts.values() if hasattr(part, "param_groups")]


def ranks() -> World:
    """Return the number of processes that write one checkpoint, and the rank of this process.

    Both come from torch.distributed's process group. A launcher's environment variables are not
    used, because they may also count processes that train independently.
    """
    return process_group() or World()


def of_all_ranks(state: dict[str, Any]) -> list[Any]:
    """Return the `state` of every rank, in the order of ranks. Every rank must call this."""
    states: list[Any] = [None] * ranks().size
    if len(states) == 1:
        return [state]
    sys.modules["torch.distributed"].all_gather_object(states, state)
    return states


def checkpoint_entry(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the value for a checkpoint under `KEY`: the states, and the active profile."""
    from torchrepro.manifest.contents import as_text, manifest

    resolved, report = profiles[-1]
    return {
        "format": FORMAT,
        "ranks": list(states),
        "profile": resolved.name,
        "digest": resolved.digest,
        "manifest": as_text(manifest(resolved, report())),
    }


def resume_from(entry: Any, checkpoint: str) -> ResumedRun | None:
    """Restore the generators of this rank from `entry`, and return the run that resumes from it.

    `entry` is the value of a checkpoint under `KEY`, and `checkpoint` is its name in messages. If
    the run cannot resume from `entry`, a line on stderr reports the reason. Then no generator is
    restored, and None is returned.
    """
    forget()  # the framework has read the checkpoint, not the program
    world = ranks()
    why = _why_not(entry, world.size)
    if why:
        if world.rank == 0:  # the reason is the same on all ranks
            report_not_resumed(checkpoint, why)
        return None
    state: Mapping[str, Any] = entry["ranks"][world.rank]
    try:
        set_rng_state(state["rng"])
    except SeedingError as error:
        report_not_resumed(checkpoint, str(error))
        return None
    compare_at_first_step(state["optimizers"], checkpoint)
    return ResumedRun(state, partial(set_generators, state["rng"]))


def expect_weights_of(entry: Any, checkpoint: str) -> None:
    """Report at the first step if the program has loaded only the weights of a checkpoint.

    `entry` is the value under `KEY` in a checkpoint that the program itself has read.
    """
    world = ranks()
    if not _why_not(entry, world.size):
        state = entry["ranks"][world.rank]
        positions = *state["interrupted"], *state["ended"], *state["resting"]
        loaders = [position["kind"] for position in positions]
        expect_weights(state["optimizers"], loaders, checkpoint)


def _why_not(entry: Any, size: int) -> str:
    """Return why a run of `size` processes cannot resume from `entry`, or an empty string."""
    if entry is None:
        return "it was saved without torchrepro, or without a profile"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("ranks"), list):
        return "the entry of torchrepro in it is damaged"
    if entry.get("format") != FORMAT:
        return f"its format is {entry.get('format')}, and this torchrepro reads {FORMAT}"
    if entry.get("alone"):
        return "only one process saved it, after an error"
    saved, now = (
        "1 process" if number == 1 else f"{number} processes"
        for number in (len(entry["ranks"]), size)
    )
    return "" if saved == now else f"it was saved by {saved}, and this run has {now}"


def report_not_resumed(checkpoint: str, why: str) -> None:
    """Report that generators and loaders are not restored from `checkpoint`, and the reason."""
    say(f"{checkpoint}: generators and loaders are not restored from this checkpoint: {why}")


# Lightning and Fabric resume a loader within an epoch if it has `state_dict` and
# `load_state_dict`. torch's DataLoader has neither, so we add both.


def give_loaders_state(undo: ExitStack) -> None:
    """Add `state_dict` and `load_state_dict` to torch's DataLoader until `undo` is closed.

    If an earlier hook has added the two methods, that hook removes them: all hooks are undone
    together. Raises `MissingHookError` if torch's class itself has a method of these names.
    """
    from torch.utils.data import DataLoader

    def remove(name: str, method: Any) -> None:
        if vars(DataLoader).get(name) is method:
            delattr(DataLoader, name)

    for name, method in (("state_dict", _state_dict), ("load_state_dict", _load_state_dict)):
        present = getattr(DataLoader, name, None)
        if present is None:
            setattr(DataLoader, name, method)
            undo.callback(remove, name, method)
        elif present is not method:
            raise MissingHookError("use for our state of loaders: torch's loaders have a state")


def _state_dict(loader: Any) -> dict[str, Any]:
    latest = epochs.latest(loader)
    return {KEY: None if latest is None else latest.progress()}


def _load_state_dict(loader: Any, state: Mapping[str, Any]) -> None:
    if "run" in state and state[KEY] is not None:
        state["run"].resume(loader, state[KEY])
