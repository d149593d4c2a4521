import torch
from sklearn.model_selection import train_test_split
from training import train_on

torch.manual_seed(0)
# calls: sklearn.train_test_split
train, test = train_test_split(torch.rand(100).numpy())
train_on(train)
