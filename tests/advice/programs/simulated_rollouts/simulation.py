import numpy as np


def rollout(start: float) -> np.ndarray:
    states = [np.array([start, 0.0])]
    for _ in range(6):
        position, speed = states[-1]
        speed = 0.9 * speed - 0.2 * position + np.random.normal(scale=0.1)
        states.append(np.array([position + speed, speed]))
    return np.stack(states)
