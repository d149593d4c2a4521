import torch
from pynndescent import NNDescent
from training import train_on

torch.manual_seed(0)
# calls: pynndescent.NNDescent
index = NNDescent(torch.rand(3000, 16).numpy(), n_neighbors=5)
train_on(index.neighbor_graph[0][:500])
