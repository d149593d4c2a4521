import random

import numpy as np
import torch
from replay import Replay
from torch import nn


class Walker:
    def __init__(self) -> None:
        self.state = torch.zeros(3)

    def move(self) -> tuple[torch.Tensor, float]:
        self.state = 0.8 * self.state + torch.randn(3)
        return self.state, float(self.state.square().sum())


def main() -> None:
    random.seed(33)
    np.random.seed(33)
    torch.manual_seed(33)
    walker, replay = Walker(), Replay(100)
    critic = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for step in range(40):
        replay.add(*walker.move())
        if step >= 16 and step % 4 == 0:
            states, values = replay.sample(12)
            loss = nn.functional.smooth_l1_loss(critic(states).squeeze(1), values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
