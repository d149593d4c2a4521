"""Programs that read entropy, clocks, addresses, sets or folders, and that compute the same."""

import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from glob import glob
from io import BytesIO
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from torch import nn

from .small_models import STEPS, Tensors, items_of, perceptron, trained

WORDS = [
    *("the", "model", "reads", "the", "words", "and", "the", "words"),
    *("are", "the", "model"),
]


def names_of_runs() -> Tensors:
    model = perceptron()
    trained(model, lambda step: model(items_of(step)).mean())
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, f"{uuid4()}-{time.time()}-{os.getpid()}")
        torch.save(model.state_dict(), place)
        return list(torch.load(place).values())


def throughput() -> Tensors:
    model = perceptron()
    since = time.perf_counter()
    found = trained(model)
    seconds = time.perf_counter() - since
    print(f"{8 * STEPS / seconds:.0f} items/s at {time.ctime()}", file=sys.stderr)
    return found


def clocks_in_tensors_that_no_op_reads() -> Tensors:
    model, seen = perceptron(), []

    def loss(step: int) -> torch.Tensor:
        seen.append(torch.tensor([time.time(), time.monotonic()], dtype=torch.float64))
        seen.append(torch.from_numpy(np.array([time.time_ns()])))
        return model(items_of(step)).square().mean()

    return trained(model, loss)


def clocks_in_checkpoints() -> Tensors:
    model, held = perceptron(), BytesIO()
    trained(model, lambda step: model(items_of(step)).mean())
    torch.save({"at": time.time(), "run": uuid4().hex, "weights": model.state_dict()}, held)
    held.seek(0)
    return list(torch.load(held)["weights"].values())


def notes_in_groups_of_optimizers() -> Tensors:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def note(_step: int) -> None:
        optimizer.param_groups[0].update(since=time.time(), run=uuid4().hex)

    return trained(model, optimizer=optimizer, after_step=note)


def caches_by_address() -> Tensors:
    model = perceptron()
    scales = {id(layer): 1 / (place + 1) for place, layer in enumerate(model)}

    def loss(step: int) -> torch.Tensor:
        hidden = items_of(step)
        for layer in model:
            hidden = layer(hidden) * scales[id(layer)]
        return hidden.square().mean()

    return trained(model, loss)


def _of_files(listed: Callable[[Path], Iterable[str | Path]]) -> Tensors:
    model = perceptron()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in random.SystemRandom().sample(range(STEPS), STEPS):
            np.save(folder / f"{number}.npy", items_of(number).numpy())
        files = [folder / each for each in listed(folder)]
        return trained(model, lambda step: model(torch.from_numpy(np.load(files[step]))).mean())


def files_of_listdir() -> Tensors:
    return _of_files(lambda folder: sorted(os.listdir(folder)))  # noqa: PTH208 - another function


def files_of_iterdir() -> Tensors:
    return _of_files(lambda folder: sorted(folder.iterdir()))


def files_of_glob() -> Tensors:
    return _of_files(lambda folder: sorted(glob(f"{folder}/*.npy")))  # noqa: PTH207 - another one


def files_counted() -> Tensors:
    return _of_files(lambda folder: [f"{n}.npy" for n in range(len(list(os.scandir(folder))))])


def files_of_secret_names() -> Tensors:
    model = perceptron()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, secrets.token_hex(8))
        held = np.memmap(place, np.float32, "w+", shape=(STEPS, 8, 6))
        for step in range(STEPS):
            held[step] = items_of(step).numpy()
        return trained(model, lambda step: model(torch.from_numpy(held[step])).mean())


def sorted_vocabulary() -> Tensors:
    numbers = {word: number for number, word in enumerate(sorted(set(WORDS)))}
    torch.manual_seed(9)
    model = nn.Sequential(nn.Embedding(len(numbers), 6), nn.Linear(6, 3))
    ids = torch.tensor([numbers[word] for word in WORDS])
    return trained(model, lambda step: model(ids[step:]).square().mean())


def vocabulary_in_order_of_reading() -> Tensors:
    numbers = {word: number for number, word in enumerate(dict.fromkeys(WORDS))}
    ids = torch.tensor([numbers[word] for word in WORDS])
    return [torch.bincount(ids), torch.nn.functional.one_hot(ids).float().mean(0)]


def sets_for_membership() -> Tensors:
    left_out, seen, kept = {"the", "and", "to"}, set(), []
    for word in WORDS:
        if word not in left_out | seen:
            kept.append(len(word))
        seen.add(word)
    model = perceptron()
    scale = torch.tensor(kept).float().mean() / len(seen & left_out)
    return trained(model, lambda step: (model(items_of(step)) * scale).square().mean())


def hashes_of_numbers() -> Tensors:
    parts = [hash((number, number * 7)) % 4 for number in range(24)]
    parts += [hash(number) % 4 for number in range(-6, 24)]
    found = torch.zeros(4, 6)
    return [found.index_add_(0, torch.tensor(parts), items_of(0, len(parts), 6))]


def generators_with_seeds() -> Tensors:
    generator, chance = np.random.default_rng(3), random.Random(3)
    older, own = np.random.RandomState(3), torch.Generator().manual_seed(3)
    model = perceptron()

    def loss(step: int) -> torch.Tensor:
        noise = torch.from_numpy(generator.standard_normal((8, 6), np.float32))
        noise = noise * chance.uniform(0.5, 1) + torch.as_tensor(older.rand(8, 6)).float()
        return model(noise + torch.rand(8, 6, generator=own)).square().mean()

    return trained(model, loss)


def ports_by_chance() -> Tensors:
    port = random.SystemRandom().randrange(20_000, 60_000)
    os.environ["TORCHREPRO_TEST_PORT"] = str(port)
    try:
        model = perceptron()
        return trained(model)
    finally:
        del os.environ["TORCHREPRO_TEST_PORT"]
