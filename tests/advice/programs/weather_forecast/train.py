import hydra
import torch
from omegaconf import DictConfig
from torch import nn
from weather import normalise, readings


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    torch.manual_seed(cfg.seed)
    series = normalise(readings(cfg.data), cfg.data)
    windows = series.unfold(1, 8, 4).flatten(0, 1)
    model = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    for _ in range(cfg.steps):
        batch = windows[torch.randperm(len(windows))[:16]]
        loss = (model(batch[:, :-1]) - batch[:, -1:]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
