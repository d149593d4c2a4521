import monai.transforms as mt
import torch
from training import train_on

torch.manual_seed(0)
change = mt.Compose([mt.RandGaussianNoise(prob=1.0)])
# calls: monai.Compose.__call__
noisy = change(torch.zeros(1, 4, 4))
train_on(noisy)
