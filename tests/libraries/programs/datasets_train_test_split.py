import datasets
import torch
from training import train_on

torch.manual_seed(0)
data = datasets.Dataset.from_dict({"x": list(range(100))})
# calls: datasets.Dataset.train_test_split
parts = data.train_test_split(test_size=0.2)
train_on(parts["train"]["x"])
