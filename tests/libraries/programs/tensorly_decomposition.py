import tensorly.decomposition as td
import torch
from training import train_on

torch.manual_seed(0)
tensor = torch.rand(4, 5, 6).numpy()
# calls: tensorly.parafac
parts = td.parafac(tensor, 3, init="random", n_iter_max=3)
train_on(parts.factors[0])
