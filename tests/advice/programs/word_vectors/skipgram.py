import threading

import numpy as np


class Table:
    """Word vectors that several threads update at once."""

    def __init__(self, words: int, width: int, seed: int) -> None:
        self.vectors = np.random.default_rng(seed).normal(size=(words, width))

    def sweep(self, shift: int, rate: float, passes: int) -> None:
        for _ in range(passes):
            pull = np.roll(self.vectors, shift, axis=0) - self.vectors
            self.vectors += rate * pull

    def fit(self, threads: int, rate: float = 0.05, passes: int = 12) -> np.ndarray:
        workers = [
            threading.Thread(target=self.sweep, args=(shift + 1, rate, passes))
            for shift in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return self.vectors
