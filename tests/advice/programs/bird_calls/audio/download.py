import threading
from pathlib import Path
from queue import Empty, Queue

import numpy as np


def render(number: int) -> np.ndarray:
    t = np.linspace(0, 1, 4096 * (1 + number % 3))
    return np.sin(2 * np.pi * (60 + 9 * number) * t)


def fetch_all(folder: Path, clips: int, workers: int) -> None:
    jobs: Queue[int] = Queue()
    for number in range(clips):
        jobs.put(number)

    def work() -> None:
        while True:
            try:
                number = jobs.get_nowait()
            except Empty:
                return
            spectrum = np.abs(np.fft.rfft(render(number)))
            spectrum = np.sort(np.tile(spectrum, 20))[::-20]
            np.save(folder / f"call_{number:02d}.npy", spectrum[:16].astype(np.float32))

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
