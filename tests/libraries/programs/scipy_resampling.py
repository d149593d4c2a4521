import torch
from scipy.stats import bootstrap
from training import train_on

torch.manual_seed(0)
values = torch.rand(50).numpy()
# calls: scipy.bootstrap
result = bootstrap((values,), max, n_resamples=100, method="basic", vectorized=False)
train_on(result.bootstrap_distribution)
