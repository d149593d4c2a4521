import argparse

import torch
from denoiser import Denoiser
from noise import NoiseSource


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise-seed", type=int)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    data = torch.randn(64, 4) * 0.5 + 1
    model = Denoiser(4, args.hidden)
    noise = NoiseSource(args.noise_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        batch = data[torch.randint(0, 64, (16,))]
        t = torch.rand(16)
        eps = noise.like(batch)
        noisy = (1 - t)[:, None] * batch + t[:, None] * eps
        loss = (model(noisy, t) - eps).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
