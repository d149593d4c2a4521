import torch
from sklearn.mixture import GaussianMixture
from training import train_on

torch.manual_seed(0)
mixture = GaussianMixture(5)
# calls: sklearn.GaussianMixture.fit
mixture.fit(torch.rand(200, 2).numpy())
train_on(mixture.means_)
