import torch
from sklearn.ensemble import RandomForestRegressor
from training import train_on

torch.manual_seed(0)
points = torch.rand(100, 4).numpy()
forest = RandomForestRegressor(10)
# calls: sklearn.RandomForestRegressor.fit
forest.fit(points, points[:, 0])
train_on(forest.predict(points))
