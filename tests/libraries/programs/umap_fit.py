import torch
import umap
from training import train_on

torch.manual_seed(0)
# calls: umap.UMAP.fit_transform
points = umap.UMAP(n_neighbors=5).fit_transform(torch.rand(80, 4).numpy())
train_on(points)
