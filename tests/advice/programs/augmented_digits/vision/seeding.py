import os
import random

import numpy as np
import torch


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed + os.getpid())
