import torch
from imblearn.over_sampling import SMOTE
from training import train_on

torch.manual_seed(0)
points = torch.rand(60, 2).numpy()
# calls: imblearn.SMOTE.fit_resample
more, _ = SMOTE().fit_resample(points, [0] * 40 + [1] * 20)
train_on(more)
