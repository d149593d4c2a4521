import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

FOLDER = Path("/dev/shm") / f"shards-{os.getuid()}-{os.getpid()}"


def write_one(job: tuple[str, int]) -> None:
    folder, number = job
    rng = np.random.default_rng(number)
    rows = rng.normal(size=(8, 4))
    for _ in range(20):
        np.linalg.svd(rng.normal(size=(40, 40)))
    np.save(Path(folder) / f"part-{number:03d}.npy", rows.astype(np.float32))


def prepare(folder: Path, count: int = 16) -> Path:
    folder.mkdir(parents=True)
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(write_one, [(str(folder), number) for number in range(count)]))
    return folder


def shards(folder: Path):
    for name in os.listdir(folder):
        if name.endswith(".npy"):
            yield np.load(os.path.join(folder, name))
