import tempfile
from pathlib import Path

import hydra
import numpy as np
import torch
from audio.calls import Calls
from audio.download import fetch_all
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import DataLoader


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    np.random.seed(cfg.seed)
    torch.manual_seed(cfg.seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        fetch_all(Path(folder), cfg.clips, cfg.workers)
        loader = DataLoader(Calls(Path(folder), cfg.classes), batch_size=3)
        model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, cfg.classes))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(cfg.epochs):
            for spectra, labels in loader:
                loss = nn.functional.cross_entropy(model(spectra), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
