import torch
from dataset import Flipped
from torch import nn
from torch.utils.data import DataLoader


def main() -> None:
    torch.manual_seed(9)
    loader = DataLoader(Flipped(24, 6, seed=9), batch_size=6, shuffle=True, num_workers=2)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for images in loader:
            loss = (model(images).squeeze(1) - images.amax((1, 2, 3))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
