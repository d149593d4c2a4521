import torch
from monai.transforms import RandGaussianNoise
from training import train_on

torch.manual_seed(0)
change = RandGaussianNoise(prob=1.0)
# calls: monai.RandGaussianNoise.__call__
noisy = change(torch.zeros(1, 4, 4))
train_on(noisy)
