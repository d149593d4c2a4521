import torch
from text.vocabulary import Vocabulary
from torch import nn

LINES = [
    "the cat sat on the mat",
    "a storm of wind and rain",
    "the end of the long road",
    "rain on the mat and the road",
]


def main() -> None:
    torch.manual_seed(6)
    vocabulary = Vocabulary(LINES)
    model = nn.Sequential(
        nn.Embedding(len(vocabulary.words), 6), nn.Linear(6, len(vocabulary.words))
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.2)
    for line in LINES * 2:
        tokens = torch.tensor(vocabulary.encode(line))
        loss = nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
