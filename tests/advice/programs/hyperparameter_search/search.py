import time
from collections.abc import Callable

import numpy as np


def random_search(score: Callable[[float], float], seconds: float, seed: int) -> tuple[float, int]:
    rng = np.random.default_rng(seed)
    best, best_loss, tries = 0.1, float("inf"), 0
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        lr = float(10 ** rng.uniform(-4, -1))
        loss = score(lr)
        tries += 1
        if loss < best_loss:
            best, best_loss = lr, loss
    return best, tries
