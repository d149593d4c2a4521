import datasets
import torch
from training import train_on

torch.manual_seed(0)
data = datasets.Dataset.from_dict({"x": list(range(100))}).to_iterable_dataset()
data = data.shuffle(buffer_size=20)
# calls: datasets.IterableDataset.__iter__
batch = [each["x"] for each in data]
train_on(batch)
