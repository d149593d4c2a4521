import datasets
import torch
from training import train_on

torch.manual_seed(0)
data = datasets.Dataset.from_dict({"x": list(range(100))})
# calls: datasets.Dataset.shuffle
shuffled = data.shuffle()
train_on(shuffled["x"])
