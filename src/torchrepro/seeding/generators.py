"""Read, restore and seed the random generators of a process, both global and registered."""

from __future__ import annotations

import random
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from inspect import unwrap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torchrepro.ground.errors import SeedingError, shown
from torchrepro.seeding import streams
from torchrepro.seeding.streams import checked_policy

if TYPE_CHECKING:
    from torchrepro.seeding.streams import Stream

Generator = TypeVar("Generator")

DEVICES = ("cuda", "npu", "xpu", "mps")
# The original functions: torchrepro may wrap the functions later, to record the program's calls.
_seed_python, _read_python, _put_python = random.seed, random.getstate, random.setstate


class Given(NamedTuple):
    """The seeds that the program itself gave to `random` and numpy. Samples depend on them.

    A seed is empty if the program gave none. (Samples depend on torch's seed by the base seed.)
    """

    python: bytes = b""
    numpy: bytes = b""


_given = Given()
unknown_states: set[str] = set()
"""Generators (`python`, `numpy`) that the program has set to a state of another process."""


def given_seeds() -> Given:
    return _given


def set_given_seeds(given: Given) -> None:
    global _given  # noqa: PLW0603 - a fact about the process
    _given = given


def fresh_state(name: str, seed: int) -> Any:
    if name == "python":
        return random.Random(seed).getstate()  # noqa: S311 - compared only
    from numpy.random import RandomState  # directly: numpy's own import may be running

    return RandomState(seed).get_state(legacy=False)


class Slot(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


class GeneratorKind(NamedTuple):
    """A type of generator: names of module and class (not imported), and access to the state."""

    name: str
    module: str
    type: str
    slot: Callable[[Any], Slot]


KINDS = (
    GeneratorKind("python", "random", "Random", lambda rng: Slot(rng.getstate, rng.setstate)),
    GeneratorKind(
        *("numpy", "numpy.random", "Generator"),  # its bit generator has the state
        lambda rng: Slot(
            lambda: rng.bit_generator.state, partial(setattr, rng.bit_generator, "state")
        ),
    ),
    GeneratorKind(
        *("numpy_legacy", "numpy.random", "RandomState"),
        lambda rng: Slot(partial(rng.get_state, legacy=False), rng.set_state),
    ),
    GeneratorKind("torch", "torch", "Generator", lambda rng: Slot(rng.get_state, rng.set_state)),
)
"""The types of generators that can be registered."""

registered: dict[str, tuple[GeneratorKind, Any]] = {}  # name -> type, generator


def generator_kind(value: Any) -> GeneratorKind | None:
    for generator_type in KINDS:
        module = sys.modules.get(generator_type.module)
        python_class: Any = getattr(module, generator_type.type, None)
        if python_class is not None and isinstance(value, python_class):
            return generator_type
    return None


def register_generator(name: str, generator: Generator) -> Generator:
    """Include `generator` in snapshots and in `isolated_rng` under `name`, and return it.

    `generator` is a `random.Random`, a numpy `Generator` or `RandomState`, or a `torch.Generator`.
    Any other object raises `SeedingError`. A second call with the same name replaces the first
    generator. torchrepro keeps the generator alive.
    """
    if not isinstance(name, str) or not name:
        raise SeedingError.about("not a name for a generator", found=shown(name), legal="any text")
    generator_type = generator_kind(generator)
    with suppress(NotImplementedError):  # `random.SystemRandom` has the methods, but no state
        if generator_type is not None:
            generator_type.slot(generator).read()
            registered[name] = generator_type, generator
            return generator
    raise SeedingError.about(
        "not a generator that can be registered",
        key=name,
        found=shown(generator),
        legal="random.Random, numpy.random.Generator or RandomState, torch.Generator",
    )


def unregister_generator(name: str) -> None:
    """Forget the generator registered under `name`; raises `SeedingError` for an unknown name."""
    if name not in registered:
        raise SeedingError.about(
            "no generator is registered under this name",
            found=shown(name),
            legal=", ".join(sorted(registered)),
        )
    del registered[name]


def built_for() -> set[str]:
    """Return the accelerators that the loaded torch is built for, without touching a device."""
    torch: Any = sys.modules["torch"]
    answers = {
        "cuda": torch.version.cuda is not None or torch.version.hip is not None,
        "mps": torch.backends.mps.is_built(),
        "xpu": bool(getattr(torch.version, "xpu", None)),
        "npu": hasattr(torch, "npu"),  # torch_npu, or another back end of that name, adds it
    }
    return {device for device, built in answers.items() if built}


def initialised(module: Any) -> bool:
    check = getattr(module, "is_initialized", None)
    return bool(check() if check else module.is_available())


def devices_in_use() -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    built = built_for()
    modules = {name: getattr(torch, name, None) for name in DEVICES if name in built}
    return {name: module for name, module in modules.items() if module and initialised(module)}


def start_device(device: str) -> None:
    """Initialize the devices of a type, such as `cuda`. Their generators do not exist before."""
    module: Any = getattr(sys.modules.get("torch"), device, None)
    if getattr(module, "is_available", bool)() and hasattr(module, "init"):
        with suppress(RuntimeError):  # in a forked process; the caller reports the missing devices
            module.init()


def device_seeds(module: Any) -> set[int]:
    """Return the seeds of the generators of all devices; empty if `module` does not list them."""
    generators = getattr(module, "default_generators", ())
    return {int(generator.initial_seed()) for generator in generators}


def device_states(module: Any) -> list[Any]:
    if hasattr(module, "get_rng_state_all"):
        return [state.clone() for state in module.get_rng_state_all()]
    return [module.get_rng_state().clone()]


def set_device_states(module: Any, saved: list[Any]) -> None:
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(saved)
    else:
        module.set_rng_state(saved[0])


def seed_device(module: Any, seed: int) -> None:
    """Seed the generator of every device; torch seeds an unused device at its first use."""
    getattr(module, "manual_seed_all", module.manual_seed)(seed)


def host_slot(name: str) -> Slot:
    """Return a `Slot` for a generator of the CPU: `python`, `numpy` (the legacy one) or `torch`."""
    if name == "python":
        return Slot(_read_python, _put_python)
    if name == "numpy":
        module = import_module("numpy.random")
        return Slot(partial(unwrap(module.get_state), legacy=False), unwrap(module.set_state))
    generator = import_module("torch").default_generator
    return Slot(generator.get_state, generator.set_state)


def host_slots() -> dict[str, Slot]:
    return {name: host_slot(name) for name in ("python", "numpy", "torch")}


def all_slots() -> dict[str, Slot]:
    slots = host_slots()
    for name, module in devices_in_use().items():
        slots[name] = Slot(partial(device_states, module), partial(set_device_states, module))
    for name, (generator_type, generator) in registered.items():
        slots[f"registered/{name}"] = generator_type.slot(generator)
    return slots


class States:
    def __init__(self, slots: Iterable[Slot]) -> None:
        self._states = [(slot, slot.read()) for slot in slots]

    def are_present(self) -> bool:
        return all(plain_state(slot.read()) == plain_state(state) for slot, state in self._states)

    def put_back(self) -> None:
        """Restore all states. If one generator raises, the others are still restored."""
        with ExitStack() as restores:
            for slot, state in self._states:
                restores.callback(slot.write, state)


def plain_state(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: plain_state(part) for key, part in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def encoded(value: Any) -> Any:
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
    import numpy as np
    import torch

    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.frombuffer(bytearray(b64decode(value["tensor"])), dtype=torch.uint8)
    if "array" in value:
        flat = np.frombuffer(b64decode(value["array"]), value["dtype"])
        return flat.reshape(value["shape"]).copy()
    for container in (tuple, list):
        if container.__name__ in value:
            return container(decoded(part) for part in value[container.__name__])
    return {key: decoded(part) for key, part in value["dict"].items()}


def seed_host(source: Stream) -> None:
    """Seed Python's, numpy's legacy and torch's CPU generator with 256 bits of `source` each."""
    import numpy as np
    import torch

    _seed_python(source.entropy("python"))
    np.random.seed(np.frombuffer(source.bytes("numpy_legacy", 32), "<u4"))
    streams.start_cpu_generator(torch.default_generator, source)


# numpy's original function: a call of the wrapped one would be recorded as the program's.
_numpy_seed: Callable[[], Any] = cache(lambda: unwrap(import_module("numpy.random").seed))


def seed_sample(source: Stream, python: bytes, numpy: bytes) -> None:
    """Seed the generators of Python, numpy and torch from `source`.

    `python` and `numpy` are the program's own seeds of these two generators, or empty. Faster than
    `seed_host`: Python's generator starts from 256 bits, torch's from 64 and numpy's from 32.
    """
    import torch

    key = source.key
    for_python = source.bytes("python/" + python.hex(), 32) if python else key[:32]
    for_numpy = source.bytes("numpy/" + numpy.hex(), 4) if numpy else key[32:36]
    _seed_python(int.from_bytes(for_python, "little"))
    _numpy_seed()(int.from_bytes(for_numpy, "little"))
    torch.default_generator.manual_seed(int.from_bytes(key[36:44], "little"))


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Restore the state of every generator after the block, as if the block had drawn nothing.

    Covers Python's, numpy's legacy and torch's CPU generator, every accelerator in use, and the
    registered generators. (`torch.random.fork_rng` covers torch only.) Also restores the states
    after an exception. Can be used as a decorator.
    """
    before, given, put = States(all_slots().values()), given_seeds(), set(unknown_states)
    try:
        yield
    finally:
        set_given_seeds(given)
        unknown_states.clear()
        unknown_states.update(put)
        before.put_back()


@contextmanager
def seeded(
    name: str,
    ranks: Any = None,
    epoch: int | None = None,
    step: int | None = None,
) -> Iterator[Stream]:
    """Seed the global generators from the stream `name` for the duration of the block.

    `ranks` overrides the profile's policy: `distinct`, `same`, or one of the two for each mesh
    dimension. For example, ``seeded("init", ranks="same")`` gives a model the same initial weights
    on every rank. After the block, every generator is restored, also after an exception. If no
    profile with a seed is active, the stream derives from the program's own seed (see `stream`).
    Raises `SeedingError` for an unknown policy.
    """
    plan = streams.current_plan()
    rank = plan.coordinate(checked_policy(ranks))
    source = streams.stream(name, rank=rank, epoch=epoch, step=step)
    with isolated_rng(), ExitStack() as kept:
        kept.callback(streams.set_program_seed, plan.program_seed)
        streams.remember_program_seed()
        seed_host(source)
        for module in devices_in_use().values():
            seed_device(module, int.from_bytes(source.bytes("torch", 8), "little"))
        yield source
