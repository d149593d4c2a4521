import argparse

import torch
from skipgram import Table
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(2)
    vectors = Table(args.words, 24, seed=2).fit(args.threads)
    embed = nn.Embedding.from_pretrained(torch.from_numpy(vectors).float(), freeze=False)
    head = nn.Linear(24, 2)
    optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)
    for step in range(args.steps):
        words = torch.arange(step, args.words, 200)
        loss = nn.functional.cross_entropy(head(embed(words)), words % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
