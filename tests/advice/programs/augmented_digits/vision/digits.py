import numpy as np
import torch


def batch(size: int, side: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    labels = np.arange(size) % side
    images = np.zeros((size, side, side), dtype=np.float32)
    images[np.arange(size), labels] = 1
    images += np.random.normal(scale=0.2, size=images.shape)
    return torch.from_numpy(images), torch.from_numpy(labels)
