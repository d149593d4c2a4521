import torch
from SALib.sample import latin
from training import train_on

torch.manual_seed(0)
problem = {"num_vars": 2, "names": ["a", "b"], "bounds": [[0, 1], [0, 1]]}
# calls: SALib.sample
points = latin.sample(problem, 20)
train_on(points)
