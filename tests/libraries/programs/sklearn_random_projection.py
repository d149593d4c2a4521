import torch
from sklearn.random_projection import GaussianRandomProjection
from training import train_on

torch.manual_seed(0)
project = GaussianRandomProjection(4)
# calls: sklearn.GaussianRandomProjection.fit_transform
points = project.fit_transform(torch.rand(60, 16).numpy())
train_on(points)
