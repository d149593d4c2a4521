import gymnasium
import torch
from training import train_on

torch.manual_seed(0)
env = gymnasium.make("CartPole-v1")
# calls: gymnasium.OrderEnforcing.reset
seen, _ = env.reset()
train_on(seen)
