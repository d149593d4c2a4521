from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from masking import mask


def masked(sentences: int, length: int, words: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = [
        [1 + (3 * row + 5 * column) % (words - 1) for column in range(length)]
        for row in range(sentences)
    ]
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        inputs, targets = zip(*pool.map(mask, tokens), strict=True)
    return torch.tensor(inputs), torch.tensor(targets)
