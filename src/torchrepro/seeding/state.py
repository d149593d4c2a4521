"""The state of every generator as plain JSON values, and back, all of it or none."""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import Any

from torchrepro.errors import SeedingError
from torchrepro.messages import shown, some
from torchrepro.seeding import loader, streams
from torchrepro.seeding.generators import (
    Given,
    States,
    all_slots,
    devices_in_use,
    given_seeds,
    put_given_seeds,
    registered,
)
from torchrepro.seeding.streams import world

FORMAT = 1
PARTS = ("world", "seed_plan", "devices", "kinds", "generators", "given", "loaders")

_resumed = False


def rng_state() -> dict[str, Any]:
    """Return a snapshot of every generator as plain JSON values.

    It holds Python's, numpy's legacy and torch's CPU generator, every device of every accelerator
    in use, the registered generators, the seeds that the program gave to `random` and numpy, how
    far the loaders made with `dataloader_kwargs` have come, the seed plan, the world size and rank,
    and a checksum. It can go into a JSON file or into ``torch.save``. Changes nothing; imports
    torch.
    """
    slots = all_slots()
    state: dict[str, Any] = {
        "format": FORMAT,
        "world": world()._asdict(),
        "seed_plan": streams.current_plan().to_json(),
        "devices": _device_names(),
        "kinds": {name: kind.name for name, (kind, _) in registered.items()},
        "generators": {name: encoded(slot.read()) for name, slot in slots.items()},
        "given": {name: seed.hex() for name, seed in given_seeds()._asdict().items()},
        "loaders": loader.epochs(),
    }
    return {**state, "checksum": _checksum(state)}


def set_rng_state(state: Mapping[str, Any] | str | os.PathLike[str]) -> None:
    """Put every generator where `state`, a snapshot or the path of a saved one, says.

    Raises `SeedingError`, with nothing changed, if the snapshot is damaged or incomplete, or comes
    from another rank, world size, seed, set of devices or set of registered generators.
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
    slots = all_slots()
    before = States(slots.values())
    try:
        for name, slot in slots.items():
            slot.write(decoded(snapshot["generators"][name]))
    except BaseException as error:
        try:
            before.put_back()
        finally:
            if isinstance(error, Exception):
                why = str(error).partition("\n")[0]
                raise SeedingError.about(f"a generator refused its state: {why}") from error
        raise
    saved = snapshot["given"]
    put_given_seeds(Given(bytes.fromhex(saved["python"]), bytes.fromhex(saved["numpy"])))


def save_rng_state(path: str | os.PathLike[str]) -> None:
    """Write a snapshot to the file `path` as JSON, completely or not at all.

    Raises `OSError` where it cannot be written.
    """
    write_atomically(Path(path), json.dumps(rng_state()).encode())


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path` so that no reader ever finds a part of it, even after a crash."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        beside.unlink(missing_ok=True)


def run_begins(*, resumed: bool) -> None:
    """Note whether the run goes on from a checkpoint, for the recordings of it."""
    global _resumed  # noqa: PLW0603 - a fact about the process
    _resumed = resumed


def is_resumed() -> bool:
    """Whether the run goes on from a checkpoint."""
    return _resumed


def encoded(value: Any) -> Any:
    """Return the state of a generator as JSON values that `decoded` turns back exactly."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return {"tensor": b64encode(value.cpu().numpy().tobytes()).decode()}
    if isinstance(value, np.ndarray):
        plain = np.ascontiguousarray(value)
        content = b64encode(plain.tobytes()).decode()
        return {"array": content, "dtype": plain.dtype.str, "shape": list(plain.shape)}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [encoded(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": {key: encoded(part) for key, part in value.items()}}
    return value.item() if isinstance(value, np.generic) else value


def decoded(value: Any) -> Any:
    """Return the state of a generator that `encoded` has turned into JSON values."""
    import numpy as np
    import torch

    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.frombuffer(bytearray(b64decode(value["tensor"])), dtype=torch.uint8)
    if "array" in value:
        flat = np.frombuffer(b64decode(value["array"]), value["dtype"])
        return flat.reshape(value["shape"]).copy()
    for kind in (tuple, list):
        if kind.__name__ in value:
            return kind(decoded(part) for part in value[kind.__name__])
    return {key: decoded(part) for key, part in value["dict"].items()}


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
    """Raise `SeedingError` where this process differs from the one that `snapshot` is of.

    It says one sentence on one line: a framework's run goes on with that line.
    """
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
    held, here = set(snapshot["generators"]), set(all_slots())
    lacking = [(name, "lacks a generator of this process") for name in sorted(here - held)]
    unknown = [(name, "holds a generator not found here") for name in sorted(held - here)]
    for name, what in lacking + unknown:
        of_program = name.startswith("registered/")
        todo = "; register the same generators under the same names as when it was saved"
        raise SeedingError.about(f"the state {what}: {name}{todo if of_program else ''}")
    for name, (kind, _) in registered.items():
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
    for kind, module in devices_in_use().items():
        name_of = getattr(module, "get_device_name", lambda _, its=module: its.__name__)
        names[kind] = [name_of(index) for index in range(module.device_count())]
    return names
