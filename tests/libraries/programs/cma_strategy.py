import cma
import torch
from training import train_on

torch.manual_seed(0)
search = cma.CMAEvolutionStrategy([0.0] * 3, 0.5, {"verbose": -9})
# calls: cma.CMAEvolutionStrategy.ask
points = search.ask()
train_on(points)
