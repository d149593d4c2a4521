LETTERS = "ACDEFGHIKLMNPQRSTVWY"


def sequences(count: int) -> list[str]:
    made = [
        "".join(LETTERS[(number * 7 + place * (3 + number % 4)) % 20] for place in range(length))
        for number, length in enumerate(60 + number * 37 % 90 for number in range(count))
    ]
    return [sequence for number, sequence in enumerate(made) if not seen(sequence, made[:number])]


def seen(sequence: str, others: list[str], most: float = 0.9) -> bool:
    """Whether a sequence shares nearly all its pieces of three letters with one of the others."""
    pieces = {sequence[place : place + 3] + str(place) for place in range(len(sequence) - 2)}
    for other in others:
        theirs = {other[place : place + 3] + str(place) for place in range(len(other) - 2)}
        if len(pieces & theirs) > most * len(pieces | theirs):
            return True
    return False
