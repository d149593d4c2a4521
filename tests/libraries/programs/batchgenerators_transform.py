import numpy as np
import torch
from batchgenerators.transforms.noise_transforms import GaussianNoiseTransform
from training import train_on

torch.manual_seed(0)
change = GaussianNoiseTransform(p_per_sample=1)
# calls: batchgenerators.GaussianNoiseTransform.__call__
batch = change(data=np.zeros((1, 1, 4, 4)))
train_on(batch["data"])
