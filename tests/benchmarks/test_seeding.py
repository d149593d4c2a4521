"""What declared random numbers cost: streams, workers, and loading data, paired in one run."""

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from torch.utils.data import DataLoader, Dataset

import torchrepro

from .paired import Comparison, hold

pytestmark = pytest.mark.benchmark

ROUNDS = 11
CALLS = 20_000
BATCH = 32


@pytest.fixture(autouse=True)
def _seed_in_force() -> Iterator[None]:
    with torchrepro.isolated_rng(), torchrepro.apply("seed-only", ["dataloader.seeding=none"]):
        yield


class Photos(Dataset):
    """Photos of 480 x 360 pixels, augmented as ImageNet training does, but not decoded.

    A random part is resized to 224 x 224, its colours and brightness are shifted, and it is
    normalised. Whatever is drawn, the work is the same: other numbers must not take other times.
    """

    count = 256

    def __init__(self) -> None:
        self.photos = torch.arange(8 * 3 * 360 * 480, dtype=torch.int64).view(8, 3, 360, 480)
        self.photos = (self.photos * 2654435761 % 256).to(torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        down, right = random.randrange(60), random.randrange(120)
        photo = self.photos[index % 8, :, down : down + 300, right : right + 360].float()
        photo = interpolate(photo[None], (224, 224), mode="bilinear", antialias=True)[0]
        photo = photo * (0.8 + 0.4 * torch.rand(3, 1, 1)) + 20 * np.random.rand()
        return (photo - 118.0) / 58.0


def _each(call: Callable[[], object], calls: int = CALLS // ROUNDS) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _usually(call: Callable[[], object]) -> str:
    call()
    return f"{statistics.median(_each(call, 200) for _ in range(ROUNDS)) * 1e6:.1f} us"


def _numpy_seed() -> object:
    """Derive a seed as numpy does: https://numpy.org/doc/stable/reference/random/parallel.html."""
    return np.random.SeedSequence((1234, 0, 3)).generate_state(1)


def test_deriving_a_stream_takes_at_most_twice_what_numpy_takes() -> None:
    """A stream and its seed, rank and worker found out, beside a `SeedSequence` and its state."""
    stream = torchrepro.stream("augment")
    kinds = ("python", "numpy", "numpy_legacy", "torch")
    hold(
        "streams",
        2,
        ("numpy's SeedSequence and its state", partial(_each, _numpy_seed)),
        (
            "stream(name, epoch).seed",
            partial(_each, lambda: torchrepro.stream("augment", epoch=3).seed),
        ),
        lambda _: [(f"stream.{kind}()", _usually(getattr(stream, kind))) for kind in kinds],
    )


def _usual_worker_init() -> None:
    """Seed a worker as https://docs.pytorch.org/docs/stable/notes/randomness.html has it."""
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)
    torch.manual_seed(seed)


def test_seeding_a_worker_takes_no_longer_than_by_hand() -> None:
    """A worker's generators are started in the time that the usual three calls take."""
    seed_worker = torchrepro.dataloader_kwargs("train")["worker_init_fn"]
    by_hand = ("by hand", partial(_each, _usual_worker_init, 200))

    hold("workers", 1, by_hand, ("seeding one", partial(_each, lambda: seed_worker(3), 200)))


def _epoch(dataset: Dataset, seeding: str, workers: int) -> float:
    """Return the wall time of reading `dataset` once, in seconds."""
    with torchrepro.apply({"seed": 1, "dataloader": {"seeding": seeding}}):
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers)
        start = time.perf_counter()
        for _ in loader:
            pass
        return time.perf_counter() - start


MISSED = pytest.mark.xfail(
    reason="each sample is seeded, in 14 us: 2 % of a photo that is not decoded may be 11 us",
    strict=False,
)
"""Where the bound may be missed; `torchrepro explain dataloader.seeding` says what it costs."""


@MISSED
@pytest.mark.parametrize("workers", [0, 2])
def test_an_automatically_seeded_loader_takes_at_most_1_02_times_a_plain_one(workers: int) -> None:
    """Seeding every photo costs at most 2 % of loading it, with workers and without."""
    photos = Photos()
    plain, seeded = (partial(_epoch, photos, seeding, workers) for seeding in ("none", "auto"))

    def added(seen: Comparison) -> list[tuple[str, str]]:
        each = (seen.other - seen.plain) / (len(photos) / BATCH)
        return [(f"added to each batch of {BATCH}", f"{each * 1e6:.0f} us")]

    hold(
        f"loading {len(photos)} photos, {workers} workers",
        1.02,
        ("a plain loader", plain),
        ("seeded", seeded),
        added,
        # 16 pairs at least: where loading varies by some percent 8 of them may all come out above.
        error=1e-4,
    )
