"""What a run goes on from: the state of every generator, as plain JSON values.

It is put back all of it or none. Whoever goes on from a checkpoint is told at the first step what
is not as it was saved. For that a checkpoint holds digests of its optimizers: of their parameters,
and of what they remember of each. An optimizer of the resumed run is known by their shapes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakSet

import xxhash

from torchrepro.ground.console import say
from torchrepro.ground.errors import SeedingError
from torchrepro.ground.messages import shown, some
from torchrepro.ground.writing import write_atomically
from torchrepro.seeding import generators, loader, loader_positions, streams
from torchrepro.seeding.generators import Given, States
from torchrepro.seeding.streams import world

FORMAT = 1
PARTS = ("world", "seed_plan", "devices", "kinds", "generators", "given", "loaders")

_resumed = False  # whether the run goes on from a checkpoint, for the recordings of it
_awaiting_step: list[Any] = []  # the hook that waits for the first step, if any


def rng_state() -> dict[str, Any]:
    """Return a snapshot of every generator as plain JSON values.

    It holds Python's, numpy's legacy and torch's CPU generator, every device of every accelerator
    in use, the registered generators, the seeds that the program gave to `random` and numpy, how
    far the loaders made with `dataloader_kwargs` have come, the seed plan, the world size and rank,
    and a checksum. It can go into a JSON file or into ``torch.save``. Changes nothing; imports
    torch.
    """
    slots = generators.all_slots()
    state: dict[str, Any] = {
        "format": FORMAT,
        "world": world()._asdict(),
        "seed_plan": streams.current_plan().to_json(),
        "devices": _device_names(),
        "kinds": {name: kind.name for name, (kind, _) in generators.registered.items()},
        "generators": {name: generators.encoded(slot.read()) for name, slot in slots.items()},
        "given": {name: seed.hex() for name, seed in generators.given_seeds()._asdict().items()},
        "loaders": loader.epochs(),
    }
    return {**state, "checksum": _checksum(state)}


def set_rng_state(state: Mapping[str, Any] | str | os.PathLike[str]) -> None:
    """Put every generator where `state`, a snapshot or the path of a saved one, says.

    Starts devices that were in use and here are not yet. Raises `SeedingError`, with nothing else
    changed, if the snapshot is damaged or incomplete, or comes from another rank, world size, seed,
    set of devices or set of registered generators.
    """
    snapshot = _loaded(state)
    _check_complete(snapshot)
    _check_fits(snapshot)
    set_generators(snapshot)
    loader.set_epochs(snapshot["loaders"])


def set_generators(snapshot: Mapping[str, Any]) -> None:
    """Put every generator where `snapshot` says, and leave the loaders where they are.

    Raises `SeedingError`, with nothing changed, if a generator refuses its state.
    """
    slots = generators.all_slots()
    before = States(slots.values())
    try:
        for name, slot in slots.items():
            slot.write(generators.decoded(snapshot["generators"][name]))
    except BaseException as error:
        try:
            before.put_back()
        finally:
            if isinstance(error, Exception):
                why = str(error).partition("\n")[0]
                raise SeedingError.about(f"a generator refused its state: {why}") from error
        raise
    saved = snapshot["given"]
    generators.put_given_seeds(Given(bytes.fromhex(saved["python"]), bytes.fromhex(saved["numpy"])))


def save_rng_state(path: str | os.PathLike[str]) -> None:
    """Write a snapshot to the file `path` as JSON, completely or not at all.

    Raises `OSError` where it cannot be written.
    """
    write_atomically(Path(path), json.dumps(rng_state()).encode())


def run_begins(*, resumed: bool) -> None:
    global _resumed  # noqa: PLW0603 - a fact about the process
    _resumed = resumed


def is_resumed() -> bool:
    return _resumed


def _loaded(state: Any) -> dict[str, Any]:
    if isinstance(state, Mapping):
        return dict(state)
    if not isinstance(state, str | os.PathLike):
        raise SeedingError.about(
            "not a snapshot", found=shown(state), legal="what rng_state() returns, a path"
        )
    try:
        content = json.loads(Path(state).read_text(encoding="utf-8"))
    except OSError as error:
        raise SeedingError.about(f"cannot be read: {error.strerror}", str(state)) from None
    except (ValueError, RecursionError):
        raise SeedingError.about(
            "not a complete snapshot: the file is truncated or not JSON", str(state)
        ) from None
    if not isinstance(content, dict):
        raise SeedingError.about("not a snapshot", str(state), found=shown(content))
    return content


def _checksum(state: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in state.items() if key != "checksum"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return "sha256:" + sha256(text.encode()).hexdigest()


def _check_complete(snapshot: dict[str, Any]) -> None:
    if snapshot.get("format") != FORMAT:
        raise SeedingError.about(
            "not a snapshot of a format that this torchrepro reads",
            key="format",
            found=shown(snapshot.get("format")),
            legal=str(FORMAT),
        )
    try:
        is_intact = snapshot.get("checksum") == _checksum(snapshot)
    except (TypeError, ValueError):
        is_intact = False
    if not is_intact:
        raise SeedingError.about("the snapshot is damaged: its checksum does not fit its content")
    for part in PARTS:
        if not isinstance(snapshot.get(part), Mapping):
            raise SeedingError.about("the snapshot lacks a part", key=part)


def _check_fits(snapshot: dict[str, Any]) -> None:
    # Each refusal is one sentence on one line: a framework's run goes on with that line.
    saved, now = snapshot["world"], world()._asdict()
    if saved != now:
        raise SeedingError.about(
            f"the state was saved by rank {saved['rank']} of {saved['size']}, and this is rank "
            f"{now['rank']} of {now['size']}; resume with as many processes as were interrupted, "
            "each from its own state"
        )
    plan, present = _settings(snapshot["seed_plan"]), _settings(streams.current_plan().to_json())
    keys = [key for key in sorted(plan | present) if plan.get(key) != present.get(key)]
    if keys:
        before, others = (
            some(f"{key}={shown(each[key])}" if key in each else f"no {key}" for key in keys)
            for each in (plan, present)
        )
        raise SeedingError.about(
            f"the state was saved under {before}, and this run has {others}; to go on exactly, "
            f"run with {before}"
        )
    for device in {*generators.DEVICES} & {*snapshot["devices"]} - {*generators.devices_in_use()}:
        generators.start_device(device)
    saved, now = snapshot["devices"], _device_names()
    for kind in sorted(saved.keys() | now.keys()):
        names, present_names = saved.get(kind, ()), now.get(kind, ())
        if len(names) != len(present_names):
            todo = f"; use the {kind} device once before restoring" if kind in saved else ""
            raise SeedingError.about(
                f"the state was saved with {len(names)} {kind} devices in use "
                f"({some(names) or 'none'}), and this process has {len(present_names)} in use "
                f"({some(present_names) or 'none'}){todo}"
            )
    held, here = set(snapshot["generators"]), set(generators.all_slots())
    lacking = [(name, "lacks a generator of this process") for name in sorted(here - held)]
    unknown = [(name, "holds a generator not found here") for name in sorted(held - here)]
    for name, what in lacking + unknown:
        of_program = name.startswith("registered/")
        todo = "; register the same generators under the same names as when it was saved"
        raise SeedingError.about(f"the state {what}: {name}{todo if of_program else ''}")
    for name, (kind, _) in generators.registered.items():
        found = snapshot["kinds"][name]
        if found != kind.name:
            raise SeedingError.about(
                f"the generator {name} was of kind {found} when the state was saved, and now is "
                f"of kind {kind.name}"
            )


def _settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plan.items():
        nested = value if isinstance(value, Mapping) else None
        flat |= {key: value} if nested is None else {f"{key}.{n}": v for n, v in nested.items()}
    return {key: value for key, value in flat.items() if value is not None}


def _device_names() -> dict[str, list[str]]:
    names = {}
    for kind, module in generators.devices_in_use().items():
        name_of = getattr(module, "get_device_name", lambda _, its=module: its.__name__)
        names[kind] = [name_of(index) for index in range(module.device_count())]
    return names


def digests_of(optimizer: Any) -> dict[str, str]:
    """Return digests of the parameters of `optimizer`, and of its state without its rates."""
    parameters, state = xxhash.xxh3_64(), xxhash.xxh3_64()
    for number, parameter in enumerate(_parameters(optimizer)):
        _add(parameters, "", parameter)
        its = optimizer.state.get(parameter) or {}
        for name, value in sorted(its.items(), key=str) if isinstance(its, dict) else ():
            _add(state, f"{number} {name} ", value)
    return {
        "kind": _kind(optimizer),
        "parameters": parameters.hexdigest(),
        "state": state.hexdigest(),
    }


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _kind(optimizer: Any) -> str:
    # Some keep other parameters while they train than while they are saved: `train_mode` says it.
    shapes = [tuple(each.shape) for each in _parameters(optimizer)]
    modes = [group.get("train_mode") for group in optimizer.param_groups]
    return xxhash.xxh3_64(repr((shapes, modes)).encode()).hexdigest()


def _add(digest: Any, name: str, value: Any) -> None:
    digest.update(name.encode())
    part = getattr(value, "to_local", lambda: value)()
    if hasattr(part, "untyped_storage"):
        held = part.detach().cpu().contiguous()
        digest.update(f"{held.dtype} {tuple(held.shape)} ".encode())
        digest.update(held.reshape(-1).view(sys.modules["torch"].uint8).numpy().data)
    else:
        digest.update(repr(part).encode())


def compare_at_first_step(saved: Sequence[Mapping[str, str]], where: str) -> None:
    """Say at the first step what is not as the checkpoint `where` has `saved` it, in one line."""

    def others(name: str, state: str, same: list[Mapping[str, str]]) -> list[str]:
        found = [] if same else [f"the parameters of {name}"]
        if state not in [each["state"] for each in same or saved]:
            found.append(f"the state of {name}")
        return [*found, *loader_positions.loaders_behind()]

    _say_at_first_step(saved, where, others)


def expect_weights(saved: Sequence[Mapping[str, str]], loaders: Iterable[str], where: str) -> None:
    """Say at the first step if it goes on with the weights of the checkpoint `where`, and no more.

    The program has read that checkpoint by itself: for its weights alone, perhaps, to train them on
    other data than what `loaders` read. Of that nothing is said.
    """
    kinds = {*loaders}

    def others(name: str, state: str, same: list[Mapping[str, str]]) -> list[str]:
        if not same or not kinds.intersection(loader_positions.kinds_in_use()):
            return []
        is_lost = state not in [each["state"] for each in same]
        return [f"the state of {name}"] * is_lost + ["the generators", "the loaders"]

    _say_at_first_step(saved, where, others)


def _say_at_first_step(
    saved: Sequence[Mapping[str, str]],
    where: str,
    others: Callable[[str, str, list[Mapping[str, str]]], list[str]],
) -> None:
    # At the first step of an optimizer of a saved kind. `others` is given its name, the digest of
    # its state, and what was saved of those with the same parameters.
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    forget()
    kinds = {each["kind"] for each in saved}
    stepped: WeakSet[Any] = WeakSet()

    def before_step(optimizer: Any, *_: Any) -> None:
        if not kinds or optimizer in stepped:
            return
        stepped.add(optimizer)
        if _kind(optimizer) not in kinds:
            return
        kinds.clear()  # torch is reading its hooks: this one is removed later
        now = digests_of(optimizer)
        same = [each for each in saved if each["parameters"] == now["parameters"]]
        found = others(type(optimizer).__name__, now["state"], same)
        if found and not world().rank:
            say(
                f"{where}: not as saved at the first step: {some(found)}; so this run is not the "
                "uninterrupted one"
            )

    if kinds:
        _awaiting_step.append(register_optimizer_step_pre_hook(before_step))


def forget() -> None:
    while _awaiting_step:
        _awaiting_step.pop().remove()
