import random

MASK = 0


def mask(tokens: list[int]) -> tuple[list[int], list[int]]:
    inputs = [MASK if random.random() < 0.3 else token for token in tokens]
    return inputs, tokens
