import argparse
import random

import numpy as np
import torch
from agent import Agent
from environment import Bandit


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args()
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    bandit, agent = Bandit(5), Agent(5)
    total = 0.0
    for _ in range(args.rounds):
        context = bandit.context()
        arm = agent.act(context)
        reward = bandit.reward(context, arm)
        total += reward
        loss = agent.learn(context, arm, reward)
    print(f"reward {total:.3f}")
    print(f"result {loss:.9f} {agent.values.weight.sum().item():.9f}")


if __name__ == "__main__":
    main()
