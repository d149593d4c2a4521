import torch


def logbook(day: int) -> list[str]:
    return [f"{day % 23:02d}:{hour:02d} gauge {(day * 5 + hour * 11) % 40}" for hour in range(50)]


def unlike(days: int, most: float = 0.9) -> list[int]:
    """Days whose logbook is not that of a day before, copied."""
    kept: list[int] = []
    for day in range(days):
        lines = set(logbook(day))
        if all(len(lines & set(logbook(other))) < most * len(lines) for other in kept):
            kept.append(day)
    return kept


def heights(days: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    t = torch.tensor(days).repeat_interleave(4) + torch.arange(4).repeat(len(days)) / 4
    x = torch.stack([(t / 3.1).sin(), (t / 6.2).cos(), t / t.max()], 1)
    return x, x[:, 0] + 0.4 * x[:, 1] * x[:, 2]
