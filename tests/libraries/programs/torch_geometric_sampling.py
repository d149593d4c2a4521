import torch
from torch_geometric.utils import negative_sampling
from training import train_on

torch.manual_seed(0)
edges = torch.randint(0, 50, (2, 100))
# calls: torch_geometric.negative_sampling
absent = negative_sampling(edges, 50)
train_on(absent)
