import torch
from torch import nn


class Sentiment(nn.Module):
    def __init__(self, words: int = 50, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(self.embed(tokens))
        return self.head(hidden[-1]).squeeze(1)
