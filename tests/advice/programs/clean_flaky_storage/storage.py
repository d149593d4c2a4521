import os
import time

import numpy as np


class Storage:
    """A remote store whose answers sometimes take too long."""

    def __init__(self, rows: int) -> None:
        self.rows = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4) / (rows * 4)

    def _ask(self, number: int) -> np.ndarray:
        if os.urandom(1)[0] < 64:
            raise TimeoutError(f"row {number}")
        return self.rows[number]

    def get(self, number: int, attempts: int = 40) -> np.ndarray:
        for attempt in range(attempts):
            try:
                return self._ask(number)
            except TimeoutError:
                time.sleep(0.0005 * min(attempt, 4))
        raise TimeoutError(f"row {number}, {attempts} times")
