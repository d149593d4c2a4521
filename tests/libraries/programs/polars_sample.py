import polars as pl
import torch
from training import train_on

torch.manual_seed(0)
frame = pl.DataFrame({"x": range(1000)})
# calls: polars.DataFrame.sample
rows = frame.sample(fraction=0.5)
train_on(rows["x"].to_list())
