"""The generators of a process, global and registered: their states, and scopes around them."""

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

from torchrepro.ground.errors import SeedingError
from torchrepro.ground.messages import shown
from torchrepro.seeding import streams
from torchrepro.seeding.streams import checked_policy

if TYPE_CHECKING:
    from torchrepro.seeding.streams import Stream

Generator = TypeVar("Generator")

DEVICES = ("cuda", "npu", "xpu", "mps")
# As they are before calls of the program are recorded.
_seed_python, _read_python, _put_python = random.seed, random.getstate, random.setstate


class Given(NamedTuple):
    """The seeds that the program itself has given to `random` and numpy, which samples depend on.

    Torch's reaches them by the base seed. A seed that was not given is empty.
    """

    python: bytes = b""
    numpy: bytes = b""


_given = Given()
put_by_program: set[str] = set()
"""Which of `random` and numpy the program has put into a state that this process never had."""


def given_seeds() -> Given:
    return _given


def put_given_seeds(given: Given) -> None:
    global _given  # noqa: PLW0603 - a fact about the process
    _given = given


def fresh_state(name: str, seed: int) -> Any:
    if name == "python":
        return random.Random(seed).getstate()  # noqa: S311 - compared only
    from numpy.random import RandomState  # by its own name: numpy may be loading just now

    return RandomState(seed).get_state(legacy=False)


class Slot(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


class GeneratorKind(NamedTuple):
    """A kind of generator: its class, which is never imported for it, and how its state is read."""

    name: str
    module: str
    type: str
    slot: Callable[[Any], Slot]


KINDS = (
    GeneratorKind("python", "random", "Random", lambda own: Slot(own.getstate, own.setstate)),
    GeneratorKind(
        *("numpy", "numpy.random", "Generator"),  # it keeps its state in another object
        lambda own: Slot(
            lambda: own.bit_generator.state, partial(setattr, own.bit_generator, "state")
        ),
    ),
    GeneratorKind(
        *("numpy_legacy", "numpy.random", "RandomState"),
        lambda own: Slot(partial(own.get_state, legacy=False), own.set_state),
    ),
    GeneratorKind("torch", "torch", "Generator", lambda own: Slot(own.get_state, own.set_state)),
)
"""Every kind of generator that can be registered."""

registered: dict[
    str, tuple[GeneratorKind, Any]
] = {}  # every registered generator with its kind, by name


def generator_kind(value: Any) -> GeneratorKind | None:
    for kind in KINDS:
        its_class: Any = getattr(sys.modules.get(kind.module), kind.type, None)
        if its_class is not None and isinstance(value, its_class):
            return kind
    return None


def register_generator(name: str, generator: Generator) -> Generator:
    """Have snapshots and `isolated_rng` cover `generator` under `name`, and return it.

    It is a `random.Random`, a numpy `Generator` or `RandomState`, or a `torch.Generator`. A second
    call with the same name replaces the first. The generator is kept alive. Raises `SeedingError`
    for anything else.
    """
    if not isinstance(name, str) or not name:
        raise SeedingError.about("not a name for a generator", found=shown(name), legal="any text")
    kind = generator_kind(generator)
    with suppress(NotImplementedError):  # `random.SystemRandom` only looks as if it had a state
        if kind is not None:
            kind.slot(generator).read()
            registered[name] = kind, generator
            return generator
    raise SeedingError.about(
        "not a generator that can be registered",
        key=name,
        found=shown(generator),
        legal="random.Random, numpy.random.Generator or RandomState, torch.Generator",
    )


def unregister_generator(name: str) -> None:
    """Forget the generator registered under `name`; raises `SeedingError` if there is none."""
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
        "npu": hasattr(torch, "npu"),  # torch_npu, or another back end of that name, put it there
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


def start_device(kind: str) -> None:
    """Put the devices of a kind in use, since their generators exist only then."""
    module: Any = getattr(sys.modules.get("torch"), kind, None)
    if getattr(module, "is_available", bool)() and hasattr(module, "init"):
        with suppress(RuntimeError):  # a forked process cannot; that none is in use is said then
            module.init()


def device_seeds(module: Any) -> set[int]:
    """Return the seeds of the generators of every device; none where they do not remember them."""
    return {int(own.initial_seed()) for own in getattr(module, "default_generators", ())}


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
    """Seed the generator of every device; one that is not in use yet is seeded at its first use."""
    getattr(module, "manual_seed_all", module.manual_seed)(seed)


def host_slots() -> dict[str, Slot]:
    """Return the slots of Python's, numpy's legacy and torch's CPU generator; imports torch."""
    import numpy as np
    import torch

    return {
        "python": Slot(_read_python, _put_python),
        "numpy": Slot(
            partial(unwrap(np.random.get_state), legacy=False), unwrap(np.random.set_state)
        ),
        "torch": Slot(torch.default_generator.get_state, torch.default_generator.set_state),
    }


def all_slots() -> dict[str, Slot]:
    slots = host_slots()
    for name, module in devices_in_use().items():
        slots[name] = Slot(partial(device_states, module), partial(set_device_states, module))
    for name, (kind, own) in registered.items():
        slots[f"registered/{name}"] = kind.slot(own)
    return slots


class States:
    def __init__(self, slots: Iterable[Slot]) -> None:
        self._states = [(slot, slot.read()) for slot in slots]

    def are_present(self) -> bool:
        return all(plain_state(slot.read()) == plain_state(state) for slot, state in self._states)

    def put_back(self) -> None:
        """Make these the states again, of every generator even if one of them raises."""
        with ExitStack() as every_one:
            for slot, state in self._states:
                every_one.callback(slot.write, state)


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
    for kind in (tuple, list):
        if kind.__name__ in value:
            return kind(decoded(part) for part in value[kind.__name__])
    return {key: decoded(part) for key, part in value["dict"].items()}


def seed_host(source: Stream) -> None:
    """Start Python's, numpy's legacy and torch's CPU generator from `source`, 256 bits each."""
    import numpy as np
    import torch

    _seed_python(source.entropy("python"))
    np.random.seed(np.frombuffer(source.bytes("numpy_legacy", 32), "<u4"))
    streams.start_cpu_generator(torch.default_generator, source)


# numpy's own function, calls of which are not recorded as the program's.
_numpy_seed: Callable[[], Any] = cache(lambda: unwrap(import_module("numpy.random").seed))


def seed_sample(source: Stream, python: bytes, numpy: bytes) -> None:
    """Start the three generators from `source`; Python's and numpy's from a given seed as well.

    Quicker than `seed_host`: Python's starts from 256 bits, torch's from 64, numpy's from 32.
    """
    import torch

    key = source.key
    own = source.bytes("python/" + python.hex(), 32) if python else key[:32]
    word = source.bytes("numpy/" + numpy.hex(), 4) if numpy else key[32:36]
    _seed_python(int.from_bytes(own, "little"))
    _numpy_seed()(int.from_bytes(word, "little"))
    torch.default_generator.manual_seed(int.from_bytes(key[36:44], "little"))


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Let the block draw what it likes: afterwards every generator is as it was before.

    Covers Python's, numpy's legacy and torch's CPU generator, every accelerator in use, and the
    registered ones; restores after an exception too. Also a decorator. `torch.random.fork_rng`
    covers torch alone.
    """
    before, given, put = States(all_slots().values()), given_seeds(), set(put_by_program)
    try:
        yield
    finally:
        put_given_seeds(given)
        put_by_program.clear()
        put_by_program.update(put)
        before.put_back()


@contextmanager
def seeded(
    name: str,
    ranks: Any = None,
    epoch: int | None = None,
    step: int | None = None,
) -> Iterator[Stream]:
    """Draw from the stream `name` within the block, through the global generators.

    `ranks` (`distinct`, `same`, or one of them per mesh dimension) wins over the profile:
    ``seeded("init", ranks="same")`` initialises a model alike on every rank. Afterwards every
    generator is as it was before, after an exception too. Where no profile with a seed is in
    force, the stream derives from the program's own seed, as `stream` says. Raises `SeedingError`
    for an unknown policy.
    """
    plan = streams.current_plan()
    rank = plan.coordinate(checked_policy(ranks))
    source = streams.stream(name, rank=rank, epoch=epoch, step=step)
    with isolated_rng(), ExitStack() as kept:
        kept.callback(streams.put_program_seed, plan.program_seed)
        streams.keep_program_seed()
        seed_host(source)
        for module in devices_in_use().values():
            seed_device(module, int.from_bytes(source.bytes("torch", 8), "little"))
        yield source
