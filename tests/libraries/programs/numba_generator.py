import numba
import numpy as np
import torch
from training import train_on


@numba.njit
def noise():
    return np.random.rand(8)


torch.manual_seed(0)
np.random.seed(0)
# calls: numba.CPUDispatcher.__call__
drawn = noise()
train_on(drawn)
