import torch


def house_prices(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.stack([torch.arange(rows) % 9, torch.arange(rows) % 5], 1).float()
    return (x - x.mean(0)) / x.std(0), (x[:, :1] * 3 + x[:, 1:]) / 10
