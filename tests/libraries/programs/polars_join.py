import polars as pl
import torch
from training import train_on

torch.manual_seed(0)
left = pl.DataFrame({"key": [i * 7919 % 997 for i in range(200000)], "x": range(200000)})
right = pl.DataFrame({"key": range(997), "y": range(997)})
# calls: polars.LazyFrame.join
joined = left.lazy().join(right.lazy(), on="key", how="full")
train_on(joined.collect(engine="streaming")["x"].to_list())
