"""Fixtures for tests of random numbers: a profile with a seed, fresh processes, registries."""

import importlib
import json
import random
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchrepro
from torchrepro.seeding import global_seeds, streams
from torchrepro.seeding.generators import plain_state, registered
from torchrepro.seeding.streams import VARIABLES

NUMBERING = {name for pair in VARIABLES for name in pair}
DRAWER = "import random\nrng = random.Random(99)\nseeds = []\n"


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of a launcher, under which the tests themselves may run."""
    for name in NUMBERING:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _registries() -> Iterator[None]:
    """Unregister after a test what it has registered."""
    before = dict(global_seeds._registered)
    yield
    for name in list(registered):
        torchrepro.unregister_generator(name)
    global_seeds._registered.clear()
    global_seeds._registered.update(before)


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes this process one rank of several, as torchrun does."""

    def be(rank: int, size: int = 2) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))

    return be


@pytest.fixture
def full_disk() -> Callable[..., Any]:
    """Return a context in which no file of this process can grow, as on a full disk."""

    @contextmanager
    def full_disk() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full_disk


@pytest.fixture
def seed_1234() -> Iterator[Any]:
    """Apply a profile with only the seed 1234."""
    with torchrepro.apply({"seed": 1234}) as applied:
        yield applied


def read_generators() -> dict[str, Any]:
    """Read every generator of this process, including registered ones, and the seed plan."""
    kind, keys, *rest = np.random.get_state()
    own = {name: plain_state(kind.slot(it).read()) for name, (kind, it) in registered.items()}
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "plan": streams.current_plan(),
        **own,
    }


@pytest.fixture
def generators() -> Callable[[], dict[str, Any]]:
    """Return the function that reads every generator, for tests that compare before and after."""
    return read_generators


@pytest.fixture
def refused(generators: Callable[[], Any]) -> Callable[[Any], str]:
    """Return a function that expects a refused restore without a change, and its message."""

    def refused(snapshot: Any) -> str:
        before = generators()
        with pytest.raises(torchrepro.SeedingError) as error:
            torchrepro.set_rng_state(snapshot)
        assert generators() == before
        return str(error.value)

    return refused


@pytest.fixture
def forked_answer_of(fork_python: Callable[..., Any]) -> Callable[..., Any]:
    """Run a program in a fork of a Python that has torch; return the JSON in its last line."""

    def forked_answer_of(program: str, *arguments: Any, **variables: str) -> Any:
        done = fork_python("-c", program, *arguments, env=variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return forked_answer_of


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return a function that writes a library with its own generator and returns its name."""
    written: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)

    def library(name: str = "drawer_of_numbers", source: str = DRAWER) -> str:
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
        importlib.invalidate_caches()
        written.append(name)
        return name

    yield library
    for name in written:
        for module in (name, name.partition(".")[0]):
            sys.modules.pop(module, None)
