import polars as pl
import torch
from training import train_on

torch.manual_seed(0)
frame = pl.DataFrame({"user": [i * 7919 % 997 for i in range(20000)]})
# calls: polars.DataFrame.unique
users = frame.unique()
train_on(users["user"].to_list())
