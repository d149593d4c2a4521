import gymnasium
import torch
from training import train_on

torch.manual_seed(0)
env = gymnasium.make("CartPole-v1")
env.reset(seed=0)
# calls: gymnasium.Discrete.sample
actions = [env.action_space.sample() for _ in range(50)]
train_on(actions)
