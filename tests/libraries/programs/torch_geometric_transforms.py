import torch
from torch_geometric.data import Data
from torch_geometric.transforms import RandomRotate
from training import train_on

torch.manual_seed(0)
cloud = Data(pos=torch.rand(20, 3))
# calls: torch_geometric.RandomRotate.__call__
turned = RandomRotate(180)(cloud)
train_on(turned.pos)
