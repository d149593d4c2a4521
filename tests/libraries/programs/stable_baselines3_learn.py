import torch
from stable_baselines3 import A2C
from training import train_on

torch.manual_seed(0)
agent = A2C("MlpPolicy", "CartPole-v1", n_steps=16)
# calls: stable_baselines3.A2C.learn
agent.learn(64)
train_on([each.detach().sum().item() for each in agent.policy.parameters()])
