import torch
from scipy.cluster.vq import kmeans2
from training import train_on

torch.manual_seed(0)
# calls: scipy.kmeans2
centres, _ = kmeans2(torch.rand(200, 2).numpy(), 8)
train_on(centres)
