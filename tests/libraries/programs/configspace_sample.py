import torch
from ConfigSpace import ConfigurationSpace
from training import train_on

torch.manual_seed(0)
space = ConfigurationSpace({"x": (0.0, 1.0)})
# calls: ConfigSpace.ConfigurationSpace.sample_configuration
drawn = space.sample_configuration(5)
train_on([each["x"] for each in drawn])
