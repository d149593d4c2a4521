from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np


def spectrum(number: int) -> np.ndarray:
    signal = np.sin(np.arange(20000 * (1 + number % 4)) * (0.01 + number / 500))
    power = np.abs(np.fft.rfft(signal)) ** 2
    return np.log1p(np.add.reduceat(power, np.linspace(0, len(power) - 1, 9).astype(int)[:-1]))


def extract(count: int, workers: int) -> np.ndarray:
    features = []
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(spectrum, number) for number in range(count)]
        for future in as_completed(futures):
            features.append(future.result())
    return np.stack(features).astype(np.float32)
