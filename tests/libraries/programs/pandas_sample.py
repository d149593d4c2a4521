import pandas as pd
import torch
from training import train_on

torch.manual_seed(0)
frame = pd.DataFrame({"x": range(100)})
# calls: pandas.DataFrame.sample
rows = frame.sample(frac=1.0)
train_on(rows["x"])
