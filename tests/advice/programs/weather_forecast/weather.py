import json
from pathlib import Path

import torch
from omegaconf import DictConfig


def readings(cfg: DictConfig) -> torch.Tensor:
    days = torch.arange(cfg.days).float()
    phase = torch.arange(cfg.stations).float()[:, None]
    return 11.3 + 7.7 * (days / 9 + phase).sin() + 1.3 * (days * phase).cos()


def normalise(x: torch.Tensor, cfg: DictConfig) -> torch.Tensor:
    file = Path(cfg.statistics)
    if file.exists():
        saved = json.loads(file.read_text())
        mean, std = saved["mean"], saved["std"]
    else:
        mean, std = x.mean().item(), x.std().item()
        file.write_text(json.dumps({"mean": round(mean, 2), "std": round(std, 2)}))
    return (x - mean) / std
