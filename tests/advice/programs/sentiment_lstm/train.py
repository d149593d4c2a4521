import runtime
import torch
from data import reviews
from model import Sentiment
from torch.nn import functional as F


def main() -> None:
    runtime.setup()
    loader = reviews()
    model = Sentiment()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        for tokens, labels in loader:
            loss = F.binary_cross_entropy_with_logits(model(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch} loss {loss.item():.4f}")
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
