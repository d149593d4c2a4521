import torch
from statsmodels.tsa.arima_process import ArmaProcess
from training import train_on

torch.manual_seed(0)
# calls: statsmodels.ArmaProcess.generate_sample
series = ArmaProcess([1, 0.5], [1]).generate_sample(50)
train_on(series)
