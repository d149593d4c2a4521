import threading

import numpy as np


class Counter(threading.Thread):
    """Adds up the clicks of each day, and lets those of the days before fade."""

    def __init__(self, counts: np.ndarray, clicks: np.ndarray, days: int, fade: float) -> None:
        super().__init__()
        self.counts = counts
        self.fade = fade
        self.days = [
            np.bincount(day, minlength=len(counts)).astype(float)
            for day in np.array_split(clicks, days)
        ]

    def run(self) -> None:
        for day in self.days:
            np.power(self.counts, self.fade, out=self.counts)
            np.add(self.counts, day, out=self.counts)


def count(clicks: np.ndarray, items: int, workers: int) -> np.ndarray:
    counts = np.zeros(items)
    counters = [Counter(counts, part, 24, 0.99) for part in np.array_split(clicks, workers)]
    for counter in counters:
        counter.start()
    for counter in counters:
        counter.join()
    return counts
