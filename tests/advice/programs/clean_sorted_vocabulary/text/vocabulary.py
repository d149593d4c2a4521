class Vocabulary:
    def __init__(self, lines: list[str]) -> None:
        self.words = sorted({word for line in lines for word in line.split()})
        self.index = {word: number for number, word in enumerate(self.words)}
        self.stop = frozenset({"the", "a", "of", "and"})

    def encode(self, line: str) -> list[int]:
        return [self.index[word] for word in line.split() if word not in self.stop]
