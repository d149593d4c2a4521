import time

import torch


class NoiseSource:
    """Gaussian noise with a stream of its own, apart from initialisation and dropout."""

    def __init__(self, seed: int | None = None) -> None:
        if seed is None:
            seed = time.time_ns()
        self.generator = torch.Generator()
        self.generator.manual_seed(seed)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=self.generator)
