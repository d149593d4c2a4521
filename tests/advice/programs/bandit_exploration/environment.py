import torch


class Bandit:
    def __init__(self, arms: int) -> None:
        self.weights = torch.randn(arms, 3)

    def context(self) -> torch.Tensor:
        return torch.randn(3)

    def reward(self, context: torch.Tensor, arm: int) -> float:
        return float(self.weights[arm] @ context)
