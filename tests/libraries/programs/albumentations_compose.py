import albumentations as A
import numpy as np
import torch
from training import train_on

torch.manual_seed(0)
change = A.Compose([A.RandomBrightnessContrast(p=1)])
image = np.full((4, 4, 3), 100, np.uint8)
# calls: albumentations.Compose.__call__
changed = change(image=image)["image"]
train_on(changed)
