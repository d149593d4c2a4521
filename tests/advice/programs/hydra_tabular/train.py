import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from tabular import split, table
from torch import nn


def build(columns: int, cfg: DictConfig) -> nn.Module:
    layers: list[nn.Module] = []
    width = columns
    for _ in range(cfg.depth):
        layers += [nn.Linear(width, cfg.hidden), nn.ReLU()]
        width = cfg.hidden
    return nn.Sequential(*layers, nn.Linear(width, 2))


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    np.random.seed(cfg.seed)
    torch.manual_seed(cfg.seed)
    (x, y), (x_test, y_test) = split(*table())
    model = build(x.shape[1], cfg.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    for _ in range(cfg.epochs):
        for start in range(0, len(inputs), 20):
            batch = slice(start, start + 20)
            loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = model(torch.from_numpy(x_test)).argmax(1) == torch.from_numpy(y_test)
    print(f"accuracy {right.float().mean().item():.3f}")
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
