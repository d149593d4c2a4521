"""Programs whose threads or shared memory take turns in a fixed way, and that compute the same."""

import queue
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import torch
from torch import nn

from .small_models import STEPS, Tensors, items_of, perceptron, trained, training

THREADS = 3


def _a_moment() -> None:
    """Wait for another time in every run, so that threads take turns in another order."""
    time.sleep(random.SystemRandom().uniform(0, 0.002))


def _slopes(number: int) -> torch.Tensor:
    _a_moment()
    items = items_of(number)
    return (items.t() @ items.tanh()).softmax(1)


def added_up_in_order() -> Tensors:
    parts: list[torch.Tensor] = [torch.empty(6, 6) for _ in range(THREADS)]

    def work(number: int) -> None:
        parts[number].copy_(_slopes(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = torch.zeros(6, 6)
    for part in parts:
        total += part
    return [total]


def mapped_in_order() -> Tensors:
    model = perceptron()
    with ThreadPoolExecutor(THREADS) as pool:

        def loss(step: int) -> torch.Tensor:
            parts = pool.map(_slopes, range(step, step + THREADS))
            return model(sum(parts, torch.zeros(6, 6))).square().mean()

        return trained(model, loss)


def completed_in_any_order() -> Tensors:
    found: dict[int, torch.Tensor] = {}
    with ThreadPoolExecutor(THREADS) as pool:
        numbers = {pool.submit(_slopes, number): number for number in range(2 * THREADS)}
        for future in as_completed(numbers):
            found[numbers[future]] = future.result()
    return [torch.stack([found[number] for number in sorted(found)]).sum(0)]


def buffers_of_each_thread() -> Tensors:
    buffers: dict[int, torch.Tensor] = {}

    def work(number: int) -> torch.Tensor:
        buffer = buffers.setdefault(threading.get_ident(), torch.empty(8, 6))
        buffer.copy_(items_of(number))
        _a_moment()
        return buffer.mul_(2).sum(0)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(2 * THREADS)))


def read_after_the_thread_is_joined() -> Tensors:
    model, buffer = perceptron(), np.empty((8, 6), np.float32)

    def refill(step: int) -> None:
        _a_moment()
        buffer[:] = items_of(step).numpy()

    def loss(step: int) -> torch.Tensor:
        thread = threading.Thread(target=refill, args=(step,))
        thread.start()
        thread.join()
        return model(torch.from_numpy(buffer)).square().mean()

    return trained(model, loss)


def loaded_ahead() -> Tensors:
    batches: queue.Queue[torch.Tensor] = queue.Queue(2)

    def load() -> None:
        for step in range(STEPS):
            _a_moment()
            batches.put(items_of(step).mul_(0.5).clamp(-1, 1))

    thread = threading.Thread(target=load)
    thread.start()
    model = perceptron()
    found = trained(model, lambda _step: model(batches.get()).square().mean())
    thread.join()
    return found


def watched_by_a_thread() -> Tensors:
    model, steps, over = perceptron(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.001):
            steps.append(steps[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def loss(step: int) -> torch.Tensor:
        steps[0] = step
        return model(items_of(step)).square().mean()

    found = trained(model, loss)
    over.set()
    thread.join()
    return found


def _refilled(buffer: np.ndarray) -> Iterator[torch.Tensor]:
    shared = torch.from_numpy(buffer)
    for step in range(STEPS):
        buffer[:] = items_of(step).numpy()
        yield shared


def refilled_every_step() -> Tensors:
    model, buffers = perceptron(), _refilled(np.zeros((8, 6), np.float32))
    return trained(model, lambda _step: model(next(buffers)).square().mean())


@training()
def shared_with_numpy(model: nn.Sequential, step: int) -> torch.Tensor:
    result = model(items_of(step))
    seen = result.detach().numpy()
    kept, copied = result.detach().clone().share_memory_(), seen.copy()
    kept.numpy()[0] = copied.mean(0)
    kept[1] += torch.asarray(copied[2], copy=False)
    return (result - kept).abs().mean() + torch.from_dlpack(copied).mean()
