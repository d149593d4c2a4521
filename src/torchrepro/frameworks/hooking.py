"""What every hook into a framework shares: the profile in force, what is said and logged of it,
and the state of a run within a framework's checkpoint.

That state is every rank's generators and its loaders. It is made of numbers and texts in lists and
dicts. So it can be read by ``torch.load(weights_only=True)``, as JSON, and where torchrepro is not
installed.

A framework is imported as fast with a profile as without: what only some programs use is loaded
when it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrepro.ground.console import note, say
from torchrepro.ground.errors import SeedingError, TorchreproError
from torchrepro.ground.messages import shown
from torchrepro.ground.patching import MissingHookError
from torchrepro.seeding.loader_positions import (
    await_loaders,
    await_resting,
    place_of,
    places,
    resting,
    take_up,
)
from torchrepro.seeding.state import (
    compare_at_first_step,
    digests_of,
    expect_weights,
    forget,
    rng_state,
    run_begins,
    set_generators,
    set_rng_state,
)
from torchrepro.seeding.streams import World, process_group

if TYPE_CHECKING:
    from torchrepro.profile.resolved import ResolvedProfile
    from torchrepro.reporting.report import Report


class InForce(NamedTuple):
    """A profile in force, as a framework's checkpoint says it."""

    resolved: ResolvedProfile
    report: Callable[[], Report]


profiles: list[InForce] = []  # those in force, outermost first


def in_force() -> InForce | None:
    """Return the innermost profile in force, or None."""
    return profiles[-1] if profiles else None


@contextmanager
def going_on_without(framework: str, what: str) -> Iterator[None]:
    """Say that `what` failed within the block, and let the program of the framework go on.

    An error that torchrepro itself has to say is raised.
    """
    try:
        yield
    except (TorchreproError, MissingHookError):
        raise
    except Exception as error:  # noqa: BLE001 - a program is not ended by what it did not ask for
        why = str(error).strip().partition("\n")[0]
        say(f"{framework}: {what} failed, and is left out: {type(error).__name__}: {why}")


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
"""What a program calls -> an argument, its value, and the knobs that it sets, each with to what."""


def say_switches(framework: str, called: str, given: Mapping[str, Any]) -> None:
    """Say which switches agree with the profile in force, and which do not.

    They are those among the arguments `given` to what is `called`. A switch of whose knobs the
    profile says nothing is the program's own affair. Those that agree are a note, which `--quiet`
    leaves out.
    """
    from torchrepro.knobs.catalogue import knobs_by_name
    from torchrepro.profile.resolved import flatten
    from torchrepro.reporting.outcomes import why_equivalent

    profile = in_force()
    if profile is None:
        return
    name, asked = profile.resolved.name, flatten(profile.resolved.values)
    agreeing = []
    for argument, switched, sets in SWITCHES[called]:
        value = given.get(argument)
        if type(value) is not type(switched) or value != switched:  # 1 is not True
            continue
        spelling = f"{called}({argument}={value!r})"
        concerned = {key: becomes for key, becomes in sets.items() if key in asked}
        others = {
            key: becomes
            for key, becomes in concerned.items()
            if becomes != asked[key] and not why_equivalent(knobs_by_name()[key], becomes)
        }
        for key, becomes in others.items():
            say(
                f"{framework}: {spelling} does not agree with {name}: {key} is "
                f"{shown(asked[key])} there, and the switch makes it {shown(becomes)}"
            )
        if concerned and not others:
            agreeing.append(spelling)
    if agreeing:
        verb = "agrees" if len(agreeing) == 1 else "agree"
        note(f"{framework}: {', '.join(agreeing)} {verb} with {name}")


def saying_switches(framework: str, called: str, call: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call `call` after saying how the switches that it is given agree with the profile."""
    given: Mapping[str, Any] = {}
    with suppress(TypeError):  # the call itself says which argument is wrong
        given = signature(call).bind(*args, **kwargs).arguments
    say_switches(framework, called, given)
    return call(*args, **kwargs)


def log_profile(framework: str, loggers: Iterable[Any], place_of: Callable[[Any], Any]) -> None:
    """Write digest, values and manifest of the profile in force to each of `loggers`.

    `place_of` gives what a logger writes to: a run of MLflow or wandb, a SummaryWriter, or a path
    to a folder; a logger with another place is left out. One that refuses is said on standard
    error, and the program goes on.
    """
    from torchrepro.manifest.contents import manifest
    from torchrepro.manifest.destinations import destination_of

    for logger in loggers if profiles else ():
        with going_on_without(framework, f"writing the profile to {type(logger).__name__}"):
            place = place_of(logger)
            destination = destination_of(place)
            if destination is not None:
                resolved, report = profiles[-1]
                destination.write(place, manifest(resolved, report()))


# The state of a run in a checkpoint.

KEY = "torchrepro"  # under this name a checkpoint holds the state of its run

FORMAT = 2


def state_of_rank(optimizers: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the state of this rank: its generators, and the loaders that it is iterating.

    Of `optimizers` it has digests, by which a run that goes on with others is seen.
    """
    return {
        "optimizers": [digests_of(each) for each in optimizers],
        "rng": rng_state(),
        "interrupted": places(over=False),
        "ended": places(over=True),
        "resting": resting(),
    }


def ranks() -> World:
    """Return how many processes write one checkpoint, and which of them this one is.

    Those of torch.distributed's group: a launcher's variables may count processes of which each
    trains on its own.
    """
    return process_group() or World()


def of_all_ranks(state: dict[str, Any]) -> list[Any]:
    """Return the states of all ranks in their order; every rank has to call it with its own."""
    states: list[Any] = [None] * ranks().size
    if len(states) == 1:
        return [state]
    sys.modules["torch.distributed"].all_gather_object(states, state)
    return states


def checkpoint_entry(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a checkpoint holds under `KEY`: the states, and the profile in force."""
    from torchrepro.manifest.contents import as_text, manifest

    resolved, report = profiles[-1]
    return {
        "format": FORMAT,
        "ranks": list(states),
        "profile": resolved.name,
        "digest": resolved.digest,
        "manifest": as_text(manifest(resolved, report())),
    }


def go_on_from(entry: Any, where: str) -> Mapping[str, Any] | None:
    """Put every generator and loader where this rank's state of `entry` says; return that state.

    `entry` is what a checkpoint held under `KEY`. None where a run cannot go on from it: one line
    on standard error says why, and nothing is changed.
    """
    forget()  # what the framework has read is not the program's own reading
    here = ranks()
    why = _why_not(entry, here.size)
    if why:
        if here.rank == 0:  # it is the same on all ranks
            say_not_resumed(where, why)
        return None
    state: Mapping[str, Any] = entry["ranks"][here.rank]
    try:
        set_rng_state(state["rng"])
    except SeedingError as error:
        say_not_resumed(where, str(error))
        return None
    await_resting(state["resting"])
    run_begins(resumed=True)
    compare_at_first_step(state["optimizers"], where)
    return state


def expect_weights_of(entry: Any, where: str) -> None:
    """Say if a training begins with the weights of a checkpoint that its program has read itself.

    `entry` is what that checkpoint held under `KEY`.
    """
    here = ranks()
    if not _why_not(entry, here.size):
        state = entry["ranks"][here.rank]
        places = *state["interrupted"], *state["ended"], *state["resting"]
        expect_weights(state["optimizers"], [each["kind"] for each in places], where)


def _why_not(entry: Any, size: int) -> str:
    # Or nothing where a run of `size` processes can go on from the entry.
    if entry is None:
        return "it was saved without torchrepro, or without a profile"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("ranks"), list):
        return "what torchrepro put there is damaged"
    if entry.get("format") != FORMAT:
        return f"its format is {entry.get('format')}, and this torchrepro reads {FORMAT}"
    if entry.get("alone"):
        return "one process saved it alone, after an error"
    saved, now = (
        "1 process" if number == 1 else f"{number} processes"
        for number in (len(entry["ranks"]), size)
    )
    return "" if saved == now else f"it was saved by {saved}, and this run has {now}"


def say_not_resumed(where: str, why: str) -> None:
    """Say that a run which goes on from a checkpoint is not the uninterrupted one."""
    say(f"{where}: generators and loaders do not go on from this checkpoint: {why}")


def generators_of(state: Mapping[str, Any]) -> Callable[[], None]:
    """Return what puts every generator where `state` says."""
    return partial(set_generators, state["rng"])


def begin_interrupted_epochs(state: Mapping[str, Any]) -> None:
    """Have the loaders that were being iterated take up their epoch, once each is iterated.

    What the program draws until then does not count: the generators are put back once more.
    """
    await_loaders(state["interrupted"], generators_of(state), state["ended"])


# A state for torch's loaders, by which Lightning and Fabric resume one within an epoch. Both ask
# whether a loader has `state_dict` and `load_state_dict`. torch's own has neither.

_collecting: list[list[tuple[Any, Mapping[str, Any]]]] = []


@contextmanager
def loaded_states() -> Iterator[list[tuple[Any, Mapping[str, Any]]]]:
    """Collect the loaders whose state is loaded within the block, each with that state.

    Those with which a run came have taken it up already, and are not among them.
    """
    _collecting.append([])
    try:
        yield _collecting[-1]
    finally:
        _collecting.pop()


def give_loaders_state(undo: ExitStack) -> None:
    """Give ``torch.utils.data.DataLoader`` a state until `undo` is closed.

    Where an earlier hook has given it, that one takes it away: hooks are undone together. Raises
    `MissingHookError` where loaders have one by themselves.
    """
    from torch.utils.data import DataLoader

    def take_away(name: str, method: Any) -> None:
        if vars(DataLoader).get(name) is method:
            delattr(DataLoader, name)

    for name, method in (("state_dict", _state_dict), ("load_state_dict", _load_state_dict)):
        present = getattr(DataLoader, name, None)
        if present is None:
            setattr(DataLoader, name, method)
            undo.callback(take_away, name, method)
        elif present is not method:
            raise MissingHookError("use for our state of loaders: torch gives them one of its own")


def _state_dict(loader: Any) -> dict[str, Any]:
    return {KEY: place_of(loader)}


def _load_state_dict(loader: Any, state: Mapping[str, Any]) -> None:
    saved = state.get(KEY)
    if saved is not None and "run" in state:
        resume_loader(loader, saved, state["run"])
    elif saved is not None and _collecting:
        _collecting[-1].append((loader, saved))


def resume_loader(loader: Any, saved: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Have `loader` go on after the batches of `saved`, with the generators of the state `run`."""
    take_up(loader, saved, generators_of(run), saved.get("done", saved["batches"]))
