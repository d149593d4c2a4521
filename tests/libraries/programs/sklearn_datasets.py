import torch
from sklearn.datasets import make_classification
from training import train_on

torch.manual_seed(0)
# calls: sklearn.make_classification
points, _ = make_classification(100)
train_on(points)
