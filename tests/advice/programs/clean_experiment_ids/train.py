from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import nn
from tracking import Experiment


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    experiment = Experiment(list(cfg.tags))
    print(f"experiment {experiment.id}")
    torch.manual_seed(cfg.seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(cfg.steps):
        x = torch.rand(12, 4)
        loss = (model(x) - x.flip(1)).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        experiment.history.append(loss.item())
    experiment.finish(Path("experiments"))
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
