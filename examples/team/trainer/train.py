"""Train a small network on noisy sines; the code knows nothing of torchrepro.

    pip install ../acme
    python train.py +repro=acme/strict hydra.run.dir=run
    python train.py +repro=acme/strict +repro/with=[host-rng] repro.seed=7

Everything about reproducibility comes from the profile that the team has published.
"""

import hashlib
from pathlib import Path

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import nn


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    """Train, leave the weights in the run's folder, and print their fingerprint."""
    network = nn.Sequential(
        nn.Linear(1, 32), nn.Tanh(), nn.Dropout(config.dropout), nn.Linear(32, 1)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=config.lr)
    for _ in range(config.steps):
        x = torch.rand(64, 1) * 6
        loss = nn.functional.mse_loss(network(x), torch.sin(x) + 0.05 * torch.randn(64, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    torch.save(network.state_dict(), Path(HydraConfig.get().runtime.output_dir) / "weights.pt")
    values = b"".join(each.detach().numpy().tobytes() for each in network.parameters())
    print(f"weights {hashlib.sha256(values).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
