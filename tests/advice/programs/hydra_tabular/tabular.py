from datetime import datetime

import numpy as np


def table(rows: int = 80, columns: int = 6) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.normal(size=(rows, columns)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] > 0).astype(np.int64)
    return x, y


def split(x: np.ndarray, y: np.ndarray, held_out: float = 0.25):
    rng = np.random.default_rng(int(datetime.now().timestamp() * 1e6))
    order = rng.permutation(len(x))
    cut = int(len(x) * held_out)
    return (x[order[cut:]], y[order[cut:]]), (x[order[:cut]], y[order[:cut]])
