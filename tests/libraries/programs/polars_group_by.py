import polars as pl
import torch
from training import train_on

torch.manual_seed(0)
frame = pl.DataFrame({"user": [i * 7919 % 997 for i in range(20000)], "x": range(20000)})
# calls: polars.DataFrame.group_by
grouped = frame.group_by("user").agg(pl.col("x").sum())
train_on(grouped["x"].to_list())
