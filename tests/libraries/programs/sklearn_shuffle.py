import torch
from sklearn.utils import shuffle
from training import train_on

torch.manual_seed(0)
# calls: sklearn.shuffle
points = shuffle(torch.rand(100).numpy())
train_on(points)
