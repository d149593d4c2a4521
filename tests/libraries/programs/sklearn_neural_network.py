import torch
from sklearn.neural_network import MLPRegressor
from training import train_on

torch.manual_seed(0)
points = torch.rand(100, 4).numpy()
network = MLPRegressor(hidden_layer_sizes=8, max_iter=300)
# calls: sklearn.MLPRegressor.fit
network.fit(points, points[:, 0])
train_on(network.predict(points))
