import numpy as np
import torch
from audiomentations import AddGaussianNoise, Compose
from training import train_on

torch.manual_seed(0)
change = Compose([AddGaussianNoise(p=1.0)])
# calls: audiomentations.Compose.__call__
noisy = change(np.zeros(64, np.float32), 16000)
train_on(noisy)
