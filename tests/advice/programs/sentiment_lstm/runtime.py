import random
import time

import numpy as np
import torch


def setup(threads: int = 1) -> None:
    torch.set_num_threads(threads)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(int(time.time()))
