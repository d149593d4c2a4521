from pathlib import Path

import hydra
import torch
from extraction import features
from omegaconf import DictConfig
from torch import nn


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.manual_seed(cfg.seed)
    x = torch.from_numpy(features(Path(cfg.features)))
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(cfg.steps):
        batch = x[torch.randperm(len(x))[:10]]
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
