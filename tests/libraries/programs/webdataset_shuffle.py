import torch
import webdataset
from training import train_on

torch.manual_seed(0)
rows = [{"x": i} for i in range(100)]
data = webdataset.DataPipeline(lambda: iter(rows), webdataset.shuffle(50))
# calls: webdataset.DataPipeline.__iter__
batch = [each["x"] for each in data]
train_on(batch)
