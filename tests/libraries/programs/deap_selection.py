import torch
from deap import tools
from training import train_on

torch.manual_seed(0)
# calls: deap.selRandom
chosen = tools.selRandom(list(range(100)), 20)
train_on(chosen)
