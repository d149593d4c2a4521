import torch
from sklearn.model_selection import KFold
from training import train_on

torch.manual_seed(0)
points = torch.rand(100).numpy()
folds = KFold(5, shuffle=True)
# calls: sklearn.KFold.split
train, _ = next(folds.split(points))
train_on(points[train])
