import threading
from collections.abc import Iterator
from queue import Queue

import numpy as np
import torch


def load(number: int) -> torch.Tensor:
    rng = np.random.default_rng(number)
    return torch.from_numpy(rng.normal(size=(10, 5)).astype(np.float32))


def ahead(count: int, depth: int) -> Iterator[torch.Tensor]:
    ready: Queue[torch.Tensor] = Queue(depth)

    def work() -> None:
        for number in range(count):
            ready.put(load(number))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for _ in range(count):
        yield ready.get()
    thread.join()
