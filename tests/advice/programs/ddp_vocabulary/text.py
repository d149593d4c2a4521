import torch
from torch.utils.data import Dataset

LINES = """the quick brown fox jumps over the lazy dog
a stitch in time saves nine they say
all that glitters is not gold but some of it is
the early bird catches the worm at dawn
a rolling stone gathers no moss on the hill
never look a gift horse in the mouth""".splitlines()


class NextWord(Dataset):
    def __init__(self) -> None:
        words = set(" ".join(LINES).split())
        self.index = {word: number for number, word in enumerate(words)}
        self.pairs = [
            (self.index[first], self.index[second])
            for line in LINES
            for first, second in zip(line.split(), line.split()[1:], strict=False)
        ]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, item: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.pairs[item]
        return torch.tensor(first), torch.tensor(second)
