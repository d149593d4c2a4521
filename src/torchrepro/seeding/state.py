"""The state of every generator as plain JSON values, and back, all of it or none."""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

from torchrepro.errors import SeedingError
from torchrepro.messages import Problem, shown, some
from torchrepro.seeding import generators, loader, streams
from torchrepro.seeding.generators import global_state, registered, registered_states
from torchrepro.seeding.ranks import world

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrepro.seeding.generators import GlobalState, RegisteredStates

FORMAT = 1


def rng_state() -> dict[str, Any]:
    """Return a snapshot of every generator as plain JSON values.

    It holds Python's, numpy's legacy and torch's CPU generator, every device of every accelerator
    in use, the registered generators, how far the loaders seeded by the profile have come, the
    seed plan, the world size and rank, and a checksum. It can go into a JSON file or into
    ``torch.save``. Changes nothing; imports torch.
    """
    state: dict[str, Any] = {
        "format": FORMAT,
        "world": asdict(world()),
        "seed_plan": streams.current_plan().to_json(),
        "devices": {
            name: _device_names(module) for name, module in generators.devices_in_use().items()
        },
        "kinds": {name: kind.name for name, (kind, _) in registered().items()},
        "generators": {name: slot.read() for name, slot in _slots().items()},
        "loaders": loader.epochs(),
    }
    return {**state, "checksum": _checksum(state)}


def set_rng_state(state: Mapping[str, Any] | str | os.PathLike[str]) -> None:
    """Put every generator where `state`, a snapshot or the path of a saved one, says.

    Raises `SeedingError`, with nothing changed, if the snapshot is damaged or incomplete, or comes
    from another rank, world size, seed, set of devices or set of registered generators.
    """
    snapshot = _loaded(state)
    for complaint in (_damage, _other_world, _other_plan, _other_devices, _other_generators):
        problem = complaint(snapshot)
        if problem is not None:
            raise SeedingError(problem)
    before, own = global_state(), registered_states()
    try:
        for name, slot in _slots().items():
            slot.write(snapshot["generators"][name])
    except BaseException as error:
        _put_back(before, own, error)
        raise
    loader.set_epochs(snapshot["loaders"])


def _put_back(before: GlobalState, own: RegisteredStates, error: BaseException) -> None:
    """Bring every generator back that can be, and say which error made that necessary."""
    with ExitStack() as both:
        if isinstance(error, Exception):
            why = str(error).partition("\n")[0]
            refused = SeedingError(Problem(f"a generator refused its state: {why}"))
            both.callback(_raise_from, refused, error)
        both.callback(before.put_back)
        both.callback(own.put_back)


def _raise_from(refused: SeedingError, error: Exception) -> None:
    raise refused from error


def save_rng_state(path: str | os.PathLike[str]) -> None:
    """Write a snapshot to the file `path` as JSON, completely or not at all.

    Raises `OSError` where it cannot be written.
    """
    write_whole(Path(path), json.dumps(rng_state()).encode())


def write_whole(path: Path, content: bytes) -> None:
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


@dataclass(frozen=True, slots=True)
class Slot:
    """One generator of this process in a snapshot: how to read its state as JSON, and back."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _slots() -> dict[str, Slot]:
    """Return the slot of every generator of this process."""
    import random

    import numpy as np
    import torch

    found = {
        "python": _slot(random.getstate, random.setstate),
        "numpy": _slot(partial(np.random.get_state, legacy=False), np.random.set_state),
        "torch": _slot(torch.get_rng_state, torch.set_rng_state),
    }
    for name, module in generators.devices_in_use().items():
        found[name] = _slot(
            partial(generators.device_states, module), partial(generators.set_device_states, module)
        )
    for name, (kind, generator) in registered().items():
        found[f"registered/{name}"] = _slot(
            partial(kind.state, generator), partial(kind.set_state, generator)
        )
    return found


def _slot(state: Callable[[], Any], set_state: Callable[[Any], Any]) -> Slot:
    return Slot(lambda: _encoded(state()), lambda saved: set_state(_decoded(saved)))


def _encoded(value: Any) -> Any:
    """Return the state of a generator as JSON values that `_decoded` turns back exactly."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return {"tensor": b64encode(value.cpu().numpy().tobytes()).decode()}
    if isinstance(value, np.ndarray):
        plain = np.ascontiguousarray(value)
        content = b64encode(plain.tobytes()).decode()
        return {"array": content, "dtype": plain.dtype.str, "shape": list(plain.shape)}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_encoded(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": {key: _encoded(part) for key, part in value.items()}}
    return value.item() if isinstance(value, np.generic) else value


def _decoded(value: Any) -> Any:
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
            return kind(_decoded(part) for part in value[kind.__name__])
    return {key: _decoded(part) for key, part in value["dict"].items()}


def _loaded(state: Any) -> dict[str, Any]:
    if not isinstance(state, str | os.PathLike):
        if isinstance(state, Mapping):
            return dict(state)
        raise SeedingError(
            Problem("not a snapshot", found=shown(state), legal="what rng_state() returns, a path")
        )
    try:
        content = json.loads(Path(state).read_text(encoding="utf-8"))
    except OSError as error:
        raise SeedingError(Problem(f"cannot be read: {error.strerror}", str(state))) from None
    except (ValueError, RecursionError):
        raise SeedingError(
            Problem("not a whole snapshot: the file is cut off or no JSON", str(state))
        ) from None
    if not isinstance(content, dict):
        raise SeedingError(Problem("not a snapshot", str(state), found=shown(content)))
    return content


def _checksum(state: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in state.items() if key != "checksum"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return "sha256:" + sha256(text.encode()).hexdigest()


PARTS = ("world", "seed_plan", "devices", "kinds", "generators", "loaders")


def _damage(snapshot: dict[str, Any]) -> Problem | None:
    if snapshot.get("format") != FORMAT:
        return Problem(
            "not a snapshot of a format that this torchrepro reads",
            key="format",
            found=shown(snapshot.get("format")),
            legal=str(FORMAT),
        )
    try:
        whole = snapshot.get("checksum") == _checksum(snapshot)
    except (TypeError, ValueError):
        whole = False
    if not whole:
        return Problem("the snapshot is damaged: its checksum does not fit its content")
    for part in PARTS:
        if not isinstance(snapshot.get(part), Mapping):
            return Problem("the snapshot lacks a part", key=part)
    return None


def _other_world(snapshot: dict[str, Any]) -> Problem | None:
    then, now = snapshot["world"], asdict(world())
    if then == now:
        return None
    return Problem(
        "the snapshot comes from another place in another world",
        key="world",
        found=f"rank {then['rank']} of {then['size']}",
        legal=f"rank {now['rank']} of {now['size']}",
        todo="resume with as many processes as were interrupted, each from its own snapshot",
    )


def _other_plan(snapshot: dict[str, Any]) -> Problem | None:
    then, now = snapshot["seed_plan"], streams.current_plan().to_json()
    differing = [key for key in now if then.get(key) != now[key]]
    if not differing:
        return None
    key = differing[0]
    return Problem(
        "the snapshot was taken under another seed plan",
        key=key,
        found=shown(then.get(key)),
        legal=shown(now[key]),
        todo="resume under the profile that was in force",
    )


def _other_devices(snapshot: dict[str, Any]) -> Problem | None:
    then = snapshot["devices"]
    now = {name: _device_names(module) for name, module in generators.devices_in_use().items()}
    for kind in sorted(then.keys() | now.keys()):
        if len(then.get(kind, ())) != len(now.get(kind, ())):
            return Problem(
                "the snapshot comes from other devices",
                key=kind,
                found=some(then.get(kind, ())) or "none in use",
                legal=some(now.get(kind, ())) or "none in use",
                todo=f"use the {kind} device once before restoring" if kind in then else "",
            )
    return None


def _other_generators(snapshot: dict[str, Any]) -> Problem | None:
    then, now = set(snapshot["generators"]), set(_slots())
    if then == now:
        return _other_kinds(snapshot["kinds"])
    missing, unknown = sorted(now - then), sorted(then - now)
    what = "lacks a generator of this process" if missing else "holds a generator not found here"
    name = (missing or unknown)[0]
    return Problem(
        f"the snapshot {what}",
        key=name,
        todo="register the same generators under the same names as when it was taken"
        if name.startswith("registered/")
        else "",
    )


def _other_kinds(then: dict[str, str]) -> Problem | None:
    for name, (kind, _) in registered().items():
        if then[name] != kind.name:
            return Problem(
                "was another kind of generator", key=name, found=then[name], legal=kind.name
            )
    return None


def _device_names(module: Any) -> list[str]:
    name_of = getattr(module, "get_device_name", None)
    return [name_of(i) if name_of else module.__name__ for i in range(module.device_count())]
