import numpy as np
import torch
from study import Patient, admit, train_and_test
from torch import nn


def tensors(patients: list[Patient]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.from_numpy(np.stack([patient.measurements for patient in patients]))
    return x, torch.tensor([patient.outcome for patient in patients])


def main() -> None:
    torch.manual_seed(21)
    train, test = train_and_test(admit(40, np.random.default_rng(21)))
    x, y = tensors(train)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(6):
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, y = tensors(test)
    with torch.no_grad():
        held_out = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    print(f"result {loss.item():.9f} {held_out.item():.9f}")


if __name__ == "__main__":
    main()
