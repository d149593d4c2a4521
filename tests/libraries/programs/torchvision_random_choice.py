import torch
from torchvision import transforms
from training import train_on

torch.manual_seed(0)
turns = [transforms.RandomRotation((n, n)) for n in range(0, 360, 7)]
# calls: torchvision.RandomChoice.__call__
turned = transforms.RandomChoice(turns)(torch.rand(1, 9, 9))
train_on(turned)
