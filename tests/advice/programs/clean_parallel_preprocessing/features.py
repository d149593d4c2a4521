import hashlib
import os

import numpy as np


def describe(text: str) -> tuple[int, np.ndarray]:
    digest = hashlib.sha256(text.encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return os.getpid(), rng.normal(size=6).astype(np.float32)
