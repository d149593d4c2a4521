import ot
import torch
from training import train_on

torch.manual_seed(0)
left, right = torch.rand(20, 3).numpy(), torch.rand(20, 3).numpy()
# calls: ot.sliced_wasserstein_distance
distance = ot.sliced_wasserstein_distance(left, right)
train_on([distance])
