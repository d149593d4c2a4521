from pathlib import Path

import numpy as np


def features(path: Path, rows: int = 30) -> np.ndarray:
    if not path.exists():
        rng = np.random.default_rng(0)
        raw = rng.normal(size=(rows, 32))
        np.save(path, np.abs(np.fft.rfft(raw))[:, :8].astype(np.float32))
    return np.load(path)
