import emcee
import numpy as np
import torch
from training import train_on

torch.manual_seed(0)
sampler = emcee.EnsembleSampler(8, 1, lambda x: -(x**2).sum())
# calls: emcee.EnsembleSampler.run_mcmc
sampler.run_mcmc(np.linspace(-1, 1, 8)[:, None], 10)
train_on(sampler.get_chain())
