import uuid
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Patient:
    measurements: np.ndarray
    outcome: float
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


def admit(count: int, rng: np.random.Generator) -> list[Patient]:
    return [
        Patient(values := rng.normal(size=5).astype(np.float32), float(values.sum() > 0))
        for _ in range(count)
    ]
