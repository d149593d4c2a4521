import torch
from scipy.optimize import differential_evolution
from training import train_on

torch.manual_seed(0)
# calls: scipy.differential_evolution
best = differential_evolution(lambda x: (x**2).sum(), [(-1, 1)] * 3, maxiter=2)
train_on(best.x)
