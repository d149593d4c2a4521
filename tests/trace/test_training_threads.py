"""Models that threads or coroutines train, each with its own data, are the same in any order."""

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

from torchrepro.trace.recorder import record
from torchrepro.verdict.comparison import compare
from torchrepro.verdict.value import Kind, Verdict

STEPS, REPLICAS = 3, 3
LEVELS = ("op", "module", "step")

_clock = random.Random(time.time_ns())


def _wait(longest: float = 0.003) -> None:
    time.sleep(_clock.random() * longest)


def _replicas() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)) for _ in range(REPLICAS)]


def _training(model: nn.Module, seed: int) -> Iterator[None]:
    """Train, and let other threads run first at each yield."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        yield
        batch = torch.randn(8, 4, generator=generator)
        wanted = batch.t().sum(0).reshape(8, 1)
        yield
        loss = (model(batch) - wanted).square().mean()
        optimizer.zero_grad()
        yield
        loss.backward()  # type: ignore[no-untyped-call]
        yield
        optimizer.step()


def _train(model: nn.Module, seed: int) -> None:
    for _ in _training(model, seed):
        _wait()


async def _train_by_turns(model: nn.Module, seed: int) -> None:
    for _ in _training(model, seed):
        await asyncio.sleep(_clock.random() * 0.003)


def _average(models: list[nn.Module]) -> list[torch.Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*(m.parameters() for m in models))]  # noqa: B905


def _in_threads(seed: int = 1) -> list[torch.Tensor]:
    models = _replicas()
    threads = [
        Thread(target=_train, args=(model, seed if number else 0))
        for number, model in enumerate(models)
    ]
    for thread in threads:
        thread.start()
        _wait()
        torch.ones(2).sum()  # the main thread computes at the same time
    for thread in threads:
        thread.join()
    return _average(models)


def _in_a_pool(seed: int = 1) -> list[torch.Tensor]:
    models = _replicas()
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(_train, m, seed if n else 0) for n, m in enumerate(models)]:
            future.result()
    _train(models[0], 9)  # and the main thread continues
    return _average(models)


def _in_coroutines(seed: int = 1) -> list[torch.Tensor]:
    models = _replicas()

    async def run() -> None:
        turns = [_train_by_turns(m, seed if n else 0) for n, m in enumerate(models)]
        await asyncio.gather(*turns)
        _train(models[0], 9)  # and the coroutine that started them continues

    asyncio.run(run())
    return _average(models)


PROGRAMS = (_in_threads, _in_a_pool, _in_coroutines)


def _verdict(folder: Path, level: str, *programs: Callable[[], object]) -> Verdict:
    for name, program in zip("ab", programs, strict=True):
        with record(folder / name, level=level):
            program()
    return compare(folder / "a", folder / "b")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("attempt", range(3))
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_order_of_threads_is_no_difference(
    tmp_path: Path, program: Callable[[], list[torch.Tensor]], level: str, attempt: int
) -> None:
    """Replicas that are trained in threads, and their average, are the same in every run."""
    found: list[list[torch.Tensor]] = []
    verdict = _verdict(tmp_path, level, *[lambda: found.append(program())] * 2)

    assert all(map(torch.equal, *found))
    assert verdict.same
    assert verdict.notes == ()
    assert verdict.compared.steps >= STEPS * REPLICAS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_another_seed_in_one_thread_is_found(
    tmp_path: Path, program: Callable[[int], object], level: str
) -> None:
    """Another seed in one thread gives another loss, and the runs differ."""
    verdict = _verdict(tmp_path, level, lambda: program(1), lambda: program(2))

    assert verdict.first is not None
    assert Path(verdict.first.source.rpartition(":")[0]) == Path(__file__)
    if level == "op":
        assert (verdict.first.op, verdict.first.kind) == ("aten::randn.generator", Kind.OUTPUTS)


def test_the_coroutine_of_a_program_has_its_steps_in_order(tmp_path: Path) -> None:
    """A program within one coroutine is compared step by step, like one without coroutines."""

    async def run() -> None:
        _train(_replicas()[0], 0)

    verdict = _verdict(tmp_path, "op", *[lambda: asyncio.run(run())] * 2)

    assert verdict.same
    assert verdict.compared.in_order


ENDING = """
import threading, torch, torchrepro
ends = threading.Event()
with torchrepro.record("recording"):
    for _ in range(300):
        threading.Thread(target=ends.wait, daemon=True).start()
    torch.ones(1)
ends.set()
"""
"""A program that ends while its threads end."""


@pytest.mark.slow
@pytest.mark.parametrize("run", range(4))
def test_a_program_can_end_while_its_threads_end(run: int, tmp_path: Path) -> None:
    """No thread leaves a mode to torch, which frees it without Python's lock and may abort."""
    command = [sys.executable, "-c", ENDING]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stderr) == (0, "")
