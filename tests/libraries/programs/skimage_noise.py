import numpy as np
import torch
from skimage.util import random_noise
from training import train_on

torch.manual_seed(0)
# calls: skimage.random_noise
noisy = random_noise(np.full((4, 4), 0.5))
train_on(noisy)
