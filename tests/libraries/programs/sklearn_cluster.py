import torch
from sklearn.cluster import KMeans
from training import train_on

points = torch.rand(200, 2, generator=torch.Generator().manual_seed(0)).numpy()
torch.manual_seed(0)
# calls: sklearn.KMeans.fit_predict
groups = KMeans(8, n_init=1).fit_predict(points)
train_on(groups)
