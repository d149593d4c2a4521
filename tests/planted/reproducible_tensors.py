"""Reproducible programs whose tensors, memory or threads might look nondeterministic."""

import queue
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional

import torchrepro

from .small_models import STEPS, Tensors, items_of, perceptron, trained, training


def random_numbers() -> Tensors:
    torch.manual_seed(5)
    found = [torch.rand(5), torch.randperm(9), torch.bernoulli(torch.full((7,), 0.5))]
    found += [torch.multinomial(torch.rand(4), 3), torch.empty(4).exponential_()]
    return [*found, torch.randint(0, 9, (3,)), torch.normal(torch.zeros(3), 1.0)]


def _a_moment() -> None:
    """Wait for a random time, so that threads run in a different order in every run."""
    time.sleep(random.SystemRandom().uniform(0, 0.002))


def pool_of_threads() -> Tensors:
    torch.manual_seed(3)
    parts = torch.randn(24, 40)

    def work(part: torch.Tensor) -> torch.Tensor:
        _a_moment()
        total = part.exp()
        for _ in range(5):
            total.mul_(0.9).add_(part.sin())
        return total.sum()

    found = []
    for _ in range(STEPS):
        with ThreadPoolExecutor(4) as pool:
            found += pool.map(work, parts)
        torchrepro.end_step()
    return found


def key_value_cache() -> Tensors:
    torch.manual_seed(4)
    attention, found = nn.Linear(6, 18), []
    with torch.inference_mode():
        keys, values = torch.empty(1, 32, 6), torch.empty(1, 32, 6)
        for place in range(12):
            query, key, value = attention(items_of(place, 1, 1, 6)).chunk(3, -1)
            keys[:, place : place + 1] = key
            values[:, place : place + 1].copy_(value)
            known = keys[:, : place + 1], values[:, : place + 1]
            found.append(functional.scaled_dot_product_attention(query, *known))
            torchrepro.end_step()
    return found


def cache_read_whole() -> Tensors:
    with torch.inference_mode():
        return cache_read_whole_with_versions()


def cache_read_whole_with_versions() -> Tensors:
    torch.manual_seed(4)
    cache, written, found = torch.empty(16, 6), torch.zeros(16, 1, dtype=torch.bool), []
    for place in range(8):
        index = torch.tensor([place])
        cache.index_copy_(0, index, items_of(place, 1, 6))
        written.index_fill_(0, index, True)
        found.append(cache.masked_fill(~written, 0.0).sum(0))
        torchrepro.end_step()
    return found


def filled_by_masks() -> Tensors:
    found = []
    for step in range(STEPS):
        items = items_of(step)
        chosen = items > 0
        result, places = torch.empty_like(items), torch.empty(8, dtype=torch.long)
        result[chosen] = items[chosen].sqrt()
        result[~chosen] = items[~chosen].exp()
        order = items[:, 0].argsort()
        places[order[:5]] = torch.arange(5)
        places.index_copy_(0, order[5:], torch.arange(5, 8))
        found.append(result[places] * 2)
        torchrepro.end_step()
    return found


def garbage_that_nobody_reads() -> Tensors:
    found = []
    for step in range(STEPS):
        held = torch.empty(40, 6)
        held[:8] = items_of(step)
        bigger = torch.empty_like(held).resize_(50, 6)
        bigger[:8].copy_(held[:8])
        found.append(bigger[:8].clone())
        torchrepro.end_step()
    return found


def sparse() -> Tensors:
    torch.manual_seed(2)
    bag = nn.EmbeddingBag(20, 4, sparse=True, mode="sum")

    def loss(step: int) -> torch.Tensor:
        words = torch.from_numpy(np.random.default_rng(step).integers(20, size=12))
        return bag(words, torch.tensor([0, 3, 3, 9])).square().sum()

    trained(bag, loss, torch.optim.SparseAdam(bag.parameters(), 0.1))
    matrix = torch.eye(5).to_sparse() @ torch.ones(5, 2)
    return [bag.weight, matrix, torch.eye(4).to_sparse_csr().values()]


def complex_numbers() -> Tensors:
    torch.manual_seed(6)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
    optimizer = torch.optim.Adam([weight], 0.01)
    for step in range(STEPS):
        signal = torch.fft.fft(items_of(step, 4, 4))
        result = (weight @ signal).conj().mH.imag + signal.real
        result.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [torch.view_as_real(weight)]


def small_types() -> Tensors:
    found = []
    for step in range(STEPS):
        items = items_of(step)
        found += [items.to(torch.bfloat16).mul(3), items.to(torch.float16).cumsum(0)]
        found += [items.to(torch.float8_e4m3fn).view(torch.uint8), items > 0]
        found += [(items * 9).to(torch.int8).bitwise_and(5), items.double().logsumexp(1)]
        torchrepro.end_step()
    return found


def functions_of_functions() -> Tensors:
    model = perceptron()
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: Any, item: torch.Tensor) -> torch.Tensor:
        return functional_call(model, values, (item,)).square().sum()

    for step in range(STEPS):
        slopes = vmap(grad(loss), in_dims=(None, 0))(parameters, items_of(step))
        parameters = {
            name: value - 0.01 * slopes[name].mean(0) for name, value in parameters.items()
        }
        torchrepro.end_step()
    return [*parameters.values(), jacrev(lambda item: model(item).sin())(items_of(9, 6))]


@training()
def nested(model: nn.Sequential, step: int) -> torch.Tensor:
    rows = [items_of(step, 2, 6), items_of(step + 9, 5, 6)]
    ragged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    older = torch.nested.nested_tensor(rows)
    padded = torch.nested.to_padded_tensor(older, 0.0).sum()
    return model(ragged).values().square().mean() + padded


@training()
def in_place_and_out(model: nn.Sequential, step: int) -> torch.Tensor:
    items = items_of(step)
    items[:, ::2].mul_(2).clamp_(-1, 1)
    items.t()[1].zero_()
    held = torch.empty(8, 6)
    torch.add(items, 1, out=held)
    torch.sort(held, dim=1, out=(items, torch.empty(8, 6, dtype=torch.long)))
    held.copy_(items).transpose_(0, 1).transpose_(0, 1)
    result = model(held).tanh_() * 2
    result[0] += 1
    return result.view(-1).unfold(0, 4, 2).mean()


@training()
def not_contiguous(model: nn.Sequential, step: int) -> torch.Tensor:
    wide = items_of(step, 6, 16)
    spread = wide[:, :1].expand(6, 8)
    return model((wide[:, ::2] + spread).t()).t().flip(0).square().mean()


def empty_batches() -> Tensors:
    model = perceptron()
    return trained(model, lambda step: model(items_of(step, 0 if step % 2 else 3, 6)).sum())


def channels_last() -> Tensors:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)

    def loss(step: int) -> torch.Tensor:
        items = items_of(step, 2, 3, 8, 8).to(memory_format=torch.channels_last)
        return model(items).square().mean()

    return trained(model, loss)


def training_on_threads() -> Tensors:
    models = [perceptron() for _ in range(3)]

    def work(number: int) -> None:
        for step in range(STEPS):
            loss = models[number](items_of(10 * number + step)).square().mean()
            with torch.no_grad():
                for parameter, slope in zip(
                    models[number].parameters(),
                    torch.autograd.grad(loss, list(models[number].parameters())),
                    strict=True,
                ):
                    parameter.sub_(slope, alpha=0.1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in random.SystemRandom().sample(threads, 3):  # it is up to the system anyway
        thread.start()
    for thread in threads:
        thread.join()
    return [parameter for model in models for parameter in model.parameters()]


def buffers_of_each_thread() -> Tensors:
    buffers: dict[int, torch.Tensor] = {}

    def work(number: int) -> torch.Tensor:
        buffer = buffers.setdefault(threading.get_ident(), torch.empty(8, 6))
        buffer.copy_(items_of(number))
        _a_moment()
        return buffer.mul_(2).sum(0)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(work, range(6)))


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
