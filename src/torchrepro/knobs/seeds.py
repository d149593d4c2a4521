"""Rows for every generator that one seed reaches, and how each keeps its state.

`read` shows the seed a generator was started from where the generator knows it; undo brings the
full state back, so the numbers drawn after it are those that would have come anyway.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

from torchrepro.knobs.accelerator_seeds import AcceleratorSeed
from torchrepro.knobs.knob import Knob
from torchrepro.knobs.legal import SEED
from torchrepro.seeding import loader_register, seed_plan
from torchrepro.seeding.calls import SeedingCalls
from torchrepro.seeding.libraries import LibrarySeeds
from torchrepro.seeding.seed_plan import PlanField
from torchrepro.seeding.streams import seed_of_rank

RANDOMNESS = "https://docs.pytorch.org/docs/stable/notes/randomness.html"


@dataclass(frozen=True, slots=True)
class PythonSeed:
    """The generator behind the functions of `random`."""

    def read(self) -> Any:
        return None  # the generator does not remember its seed

    def write(self, value: int) -> None:
        random.seed(value)

    def save(self) -> Any:
        return random.getstate()

    def restore(self, saved: Any) -> None:
        random.setstate(saved)

    def holds(self, value: int) -> bool:
        return random.getstate() == random.Random(value).getstate()  # noqa: S311 - compared only


@dataclass(frozen=True, slots=True)
class NumpySeed:
    """The legacy global generator behind ``numpy.random.rand`` and its like."""

    @property
    def _numpy_random(self) -> Any:
        return import_module("numpy.random")

    def read(self) -> Any:
        return None

    def write(self, value: int) -> None:
        self._numpy_random.seed(value)

    def save(self) -> Any:
        return self._numpy_random.get_state(legacy=False)

    def restore(self, saved: Any) -> None:
        self._numpy_random.set_state(saved)

    def holds(self, value: int) -> bool:
        fresh = self._numpy_random.RandomState(value).get_state()
        now = self._numpy_random.get_state()
        return bool((fresh[1] == now[1]).all() and fresh[2:] == now[2:])


@dataclass(frozen=True, slots=True)
class TorchSeed:
    """torch's default CPU generator; the accelerators have rows of their own."""

    def read(self) -> Any:
        return _torch().initial_seed()

    def write(self, value: int) -> None:
        _torch().default_generator.manual_seed(value)

    def save(self) -> Any:
        return _torch().get_rng_state()

    def restore(self, saved: Any) -> None:
        _torch().set_rng_state(saved)

    def holds(self, value: int) -> bool:
        return bool(_torch().initial_seed() == value)


def _torch() -> Any:
    return import_module("torch")


@dataclass(frozen=True, slots=True)
class RootSeed(PlanField):
    """The root of every stream; with it comes the rank from whose seed this process starts."""

    name: str = "seed"

    def write(self, value: int) -> None:
        PlanField.write(self, value)
        loader_register.put_register(loader_register.Register())
        plan = seed_plan.current()
        if plan.ranks_differ:
            seed_plan.put(replace(plan, started_as=plan.coordinate()))

    def save(self) -> Any:
        return seed_plan.current(), loader_register.present_register()

    def restore(self, saved: Any) -> None:
        plan, register = saved
        seed_plan.put(plan)
        loader_register.put_register(register)


@dataclass(frozen=True, slots=True)
class OfRank:
    """A generator that starts from this rank's own seed where ranks draw differently."""

    of_one: Any
    """How to reach the generator, whatever the rank."""

    def write(self, value: int) -> None:
        self.of_one.write(_of_rank(value))

    def holds(self, value: int) -> bool:
        return bool(self.of_one.holds(_of_rank(value)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_one, name)


def _of_rank(seed: int) -> int:
    plan = seed_plan.current()
    return seed_of_rank(seed, plan.started_as) if plan.ranks_differ else seed


_seed = partial(Knob, key="seed", legal=SEED, moves_on=True, guarded=False, per_rank=True)


def _accelerator(device: str, source: str, since: str) -> Knob:
    return _seed(
        name=f"seed.{device}",
        target=device,
        access=OfRank(AcceleratorSeed(device)),
        library="torch",
        summary=f"Seed of the default generator of every {device.upper()} device.",
        cost="none; before device init the seed waits in torch's queue",
        source=source,
        since=since,
        aliases=(f"torch.{device}.manual_seed_all", f"torch.{device}.manual_seed"),
    )


SEEDS = (
    _seed(
        name="seed.streams",
        target="seed plan",
        set_on_import="",
        access=RootSeed(),
        summary="Root of every named stream: torchrepro.stream, seeded, dataloader_kwargs.",
        cost="none; deriving a stream takes about 5 microseconds",
        source="https://www.rfc-editor.org/rfc/rfc7693",
    ),
    _seed(
        name="seed.libraries",
        target="torch",
        access=OfRank(LibrarySeeds()),
        library="torch",
        summary="Seed of other libraries that draw numbers (cupy, tensorflow, registered ones), "
        "given when they are loaded.",
        cost="none",
        source="https://docs.cupy.dev/en/stable/reference/random.html",
    ),
    _seed(
        name="seed.python",
        target="python",
        set_on_import="random",
        access=OfRank(PythonSeed()),
        summary="Seed of the generator behind the functions of Python's `random`.",
        cost="none",
        source="https://docs.python.org/3/library/random.html#random.seed",
        aliases=("random.seed",),
    ),
    _seed(
        name="seed.numpy",
        target="numpy",
        set_on_import="numpy.random",
        access=OfRank(NumpySeed()),
        library="numpy",
        summary="Seed of numpy's legacy global generator; a Generator of your own is not reached.",
        cost="about 6 ms the first time: numpy loads numpy.random",
        source="https://numpy.org/doc/stable/reference/random/legacy.html",
        aliases=("numpy.random.seed", "np.random.seed"),
    ),
    _seed(
        name="seed.torch",
        target="torch",
        access=OfRank(TorchSeed()),
        library="torch",
        summary="Seed of torch's default CPU generator, of which only the low 32 bits count.",
        cost="none",
        source=RANDOMNESS,
        aliases=("torch.manual_seed",),
    ),
    _seed(
        name="seed.calls",
        target="torch",
        access=SeedingCalls(),
        library="torch",
        summary="Later calls of the program that seed a generator are honoured and recorded, each "
        "with its line.",
        cost="about a microsecond per such call",
        source=RANDOMNESS,
    ),
    _accelerator("cuda", RANDOMNESS, ""),
    _accelerator("npu", "https://pypi.org/project/torch-npu/", "torch_npu 2.1"),
    _accelerator("mps", "https://docs.pytorch.org/docs/stable/mps.html", "1.12"),
    _accelerator("xpu", "https://docs.pytorch.org/docs/stable/xpu.html", "2.3"),
)
