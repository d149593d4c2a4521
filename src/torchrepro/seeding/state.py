"""Snapshots of the state of every generator, as plain JSON values, to resume a run.

A snapshot is restored completely or not at all. At its first step, a resumed run reports what
differs from the checkpoint. For this, a checkpoint has digests of each optimizer's parameters and
state. The shapes of the parameters identify an optimizer.
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
from torchrepro.ground.errors import SeedingError, shown, some
from torchrepro.ground.writing import write_atomically
from torchrepro.seeding import generators, loader, streams
from torchrepro.seeding.generators import Given, States
from torchrepro.seeding.loader_positions import epochs, kind_of
from torchrepro.seeding.streams import world

FORMAT = 1
PARTS = ("world", "seed_plan", "devices", "kinds", "generators", "given", "loaders")

_awaiting_step: list[Any] = []  # at most one hook, for the first step


def rng_state() -> dict[str, Any]:
    """Return a snapshot of every generator as plain JSON values.

    The snapshot contains the states of Python's generator, numpy's legacy generator, torch's CPU
    generator, the generators of all devices in use, and the registered generators. It also contains
    the program's seeds of `random` and numpy, the next epochs of the loaders made with
    `dataloader_kwargs`, the seed plan, world size and rank, and a checksum. It can be saved as JSON
    or with ``torch.save``. The call imports torch and changes nothing else.
    """
    slots = generators.all_slots()
    state: dict[str, Any] = {
        "format": FORMAT,
        "world": world()._asdict(),
        "seed_plan": streams.current_plan().to_json(),
        "devices": _device_names(),
        "kinds": {name: registered.name for name, (registered, _) in generators.registered.items()},
        "generators": {name: generators.encoded(slot.read()) for name, slot in slots.items()},
        "given": {name: seed.hex() for name, seed in generators.given_seeds()._asdict().items()},
        "loaders": loader.epochs(),
    }
    return {**state, "checksum": _checksum(state)}


def set_rng_state(state: Mapping[str, Any] | str | os.PathLike[str]) -> None:
    """Restore every generator from `state`, a snapshot or the path of a saved snapshot.

    Starts devices that were in use in the saved run but are not in use now. Raises `SeedingError`
    and changes nothing else if the snapshot is damaged or incomplete, or if the rank, the world
    size, the seed, the devices or the registered generators differ from the saved run.
    """
    snapshot = _loaded(state)
    _check_complete(snapshot)
    _check_fits(snapshot)
    set_generators(snapshot)
    loader.set_epochs(snapshot["loaders"])


def set_generators(snapshot: Mapping[str, Any]) -> None:
    """Restore every generator from `snapshot`, but not the epochs of the loaders.

    Raises `SeedingError` and changes no generator if one of them refuses its saved state.
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
    generators.set_given_seeds(Given(bytes.fromhex(saved["python"]), bytes.fromhex(saved["numpy"])))


def save_rng_state(path: str | os.PathLike[str]) -> None:
    """Write a snapshot to the file `path` as JSON, completely or not at all.

    Raises `OSError` if the file cannot be written.
    """
    write_atomically(Path(path), json.dumps(rng_state()).encode())


def _loaded(state: Any) -> dict[str, Any]:
    if isinstance(state, Mapping):
        return dict(state)
    if not isinstance(state, str | os.PathLike):
        raise SeedingError.about(
            "not a snapshot", found=shown(state), legal="the return value of rng_state(), a path"
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
    # Each message is a single line: a framework prints only that line and continues.
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
        before, after = (
            some(f"{key}={shown(flat[key])}" if key in flat else f"no {key}" for key in keys)
            for flat in (plan, present)
        )
        raise SeedingError.about(
            f"the state was saved under {before}, and this run has {after}; to continue exactly, "
            f"run with {before}"
        )
    for device in {*generators.DEVICES} & {*snapshot["devices"]} - {*generators.devices_in_use()}:
        generators.start_device(device)
    saved, now = snapshot["devices"], _device_names()
    for device in sorted(saved.keys() | now.keys()):
        names, present_names = saved.get(device, ()), now.get(device, ())
        if len(names) != len(present_names):
            todo = f"; use the {device} device once before restoring" if device in saved else ""
            raise SeedingError.about(
                f"the state was saved with {len(names)} {device} devices in use "
                f"({some(names) or 'none'}), and this process has {len(present_names)} in use "
                f"({some(present_names) or 'none'}){todo}"
            )
    in_snapshot, in_process = set(snapshot["generators"]), set(generators.all_slots())
    lacking, unknown = sorted(in_process - in_snapshot), sorted(in_snapshot - in_process)
    if lacking or unknown:
        name = (lacking or unknown)[0]
        problem = "lacks a generator of" if lacking else "has a generator that is unknown to"
        of_program = name.startswith("registered/")
        todo = "; register the same generators under the same names as when it was saved"
        raise SeedingError.about(
            f"the state {problem} this process: {name}{todo if of_program else ''}"
        )
    for name, (generator_type, _) in generators.registered.items():
        saved_type = snapshot["kinds"][name]
        if saved_type != generator_type.name:
            raise SeedingError.about(
                f"the generator {name} was of type {saved_type} when the state was saved, and now "
                f"is of type {generator_type.name}"
            )


def _settings(plan: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in plan.items():
        nested = value if isinstance(value, Mapping) else None
        flat |= {key: value} if nested is None else {f"{key}.{n}": v for n, v in nested.items()}
    return {key: value for key, value in flat.items() if value is not None}


def _device_names() -> dict[str, list[str]]:
    names = {}
    for device, module in generators.devices_in_use().items():
        name_of = getattr(module, "get_device_name", lambda _, module=module: module.__name__)
        names[device] = [name_of(index) for index in range(module.device_count())]
    return names


def digests_of(optimizer: Any) -> dict[str, str]:
    """Return digests of parameters, shapes and state of `optimizer`, without learning rates."""
    parameters, state = xxhash.xxh3_64(), xxhash.xxh3_64()
    for number, parameter in enumerate(_parameters(optimizer)):
        _add(parameters, "", parameter)
        of_parameter = optimizer.state.get(parameter)
        if not isinstance(of_parameter, dict):
            continue
        for name, value in sorted(of_parameter.items(), key=str):
            _add(state, f"{number} {name} ", value)
    return {
        "kind": _signature(optimizer),
        "parameters": parameters.hexdigest(),
        "state": state.hexdigest(),
    }


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _signature(optimizer: Any) -> str:
    """Return a digest of the shapes of the parameters, to find the same optimizer in a checkpoint.

    Some optimizers train with other parameters than they save. Their option `train_mode`
    distinguishes the two cases, so the digest includes it.
    """
    shapes = [tuple(parameter.shape) for parameter in _parameters(optimizer)]
    modes = [group.get("train_mode") for group in optimizer.param_groups]
    return xxhash.xxh3_64(repr((shapes, modes)).encode()).hexdigest()


def _add(digest: Any, name: str, value: Any) -> None:
    digest.update(name.encode())
    part = getattr(value, "to_local", lambda: value)()
    if hasattr(part, "untyped_storage"):
        tensor = part.detach().cpu().contiguous()
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(sys.modules["torch"].uint8).numpy().data)
    else:
        digest.update(repr(part).encode())


def compare_at_first_step(saved: Sequence[Mapping[str, str]], checkpoint: str) -> None:
    """Report at the first step how the run differs from `checkpoint`, with `saved` optimizers."""

    def differences(name: str, state: str, same: list[Mapping[str, str]]) -> list[str]:
        changed = [] if same else [f"the parameters of {name}"]
        if state not in [optimizer["state"] for optimizer in same or saved]:
            changed.append(f"the state of {name}")
        return [*changed, *epochs.behind()]

    _report_at_first_step(saved, checkpoint, differences)


def expect_weights(
    saved: Sequence[Mapping[str, str]], loaders: Iterable[str], checkpoint: str
) -> None:
    """Report at the first step if the run resumes only the weights of `checkpoint`.

    The program has read the checkpoint itself. It may want only the weights, to train them on other
    data. So the report requires that a loader with one of the signatures `loaders` is in use.
    """
    saved_loaders = {*loaders}

    def differences(name: str, state: str, same: list[Mapping[str, str]]) -> list[str]:
        in_use = {kind_of(epoch.loader) for epoch in epochs.in_use() if epoch.batches}
        if not same or not saved_loaders & in_use:
            return []
        is_lost = state not in [optimizer["state"] for optimizer in same]
        return [f"the state of {name}"] * is_lost + ["the generators", "the loaders"]

    _report_at_first_step(saved, checkpoint, differences)


def _report_at_first_step(
    saved: Sequence[Mapping[str, str]],
    checkpoint: str,
    differences: Callable[[str, str, list[Mapping[str, str]]], list[str]],
) -> None:
    """Report `differences` at the first step of an optimizer whose signature was saved.

    `differences` is called with the name of the optimizer, the digest of its state, and the saved
    optimizers that have equal parameters. It returns a text for each difference.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    forget()
    signatures = {optimizer["kind"] for optimizer in saved}
    stepped: WeakSet[Any] = WeakSet()

    def before_step(optimizer: Any, *_: Any) -> None:
        if not signatures or optimizer in stepped:
            return
        stepped.add(optimizer)
        if _signature(optimizer) not in signatures:
            return
        signatures.clear()  # torch iterates over its hooks now, so this one is removed later
        now = digests_of(optimizer)
        same = [before for before in saved if before["parameters"] == now["parameters"]]
        changed = differences(type(optimizer).__name__, now["state"], same)
        if changed and not world().rank:
            say(
                f"{checkpoint}: the run differs from it at the first step in {some(changed)}; so "
                "it differs from the uninterrupted run"
            )

    if signatures:
        _awaiting_step.append(register_optimizer_step_pre_hook(before_step))


def forget() -> None:
    while _awaiting_step:
        _awaiting_step.pop().remove()
