"""Evaluate what the other repo has trained, under the very same profile, and show that it is.

    pip install ../acme
    python evaluate.py ../trainer/run

Ends with status 1 if the run was under another profile than the one that is installed here.
"""

import json
import sys
from pathlib import Path

import torchrepro

PROFILE = "acme/strict"


def evaluate(weights: Path) -> float:
    """Return the mean squared error of the trained network on fresh points of the curve."""
    import torch
    from torch import nn

    network = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(), nn.Linear(32, 1))
    network.load_state_dict(torch.load(weights, weights_only=True))
    network.eval()
    x = torch.rand(256, 1) * 6
    with torch.no_grad():
        return nn.functional.mse_loss(network(x), torch.sin(x)).item()


def main(run: Path) -> int:
    """Compare the profile of `run` with ours, evaluate, and return the exit status."""
    manifest = json.loads((run / ".hydra" / "repro.json").read_text(encoding="utf-8"))
    profile = torchrepro.load(PROFILE)
    print(f"trained   {manifest['digest']}")
    print(f"evaluated {profile.digest}")
    if manifest["digest"] != profile.digest:
        print(f"not the same: this run was not under the {PROFILE} that is installed here")
        return 1
    with torchrepro.apply(profile):
        print(f"error     {evaluate(run / 'weights.pt'):.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
