from __future__ import annotations


class Paper:
    def __init__(self, year: int) -> None:
        self.year = year
        self.cites: set[Paper] = set()


def citations(count: int = 300) -> set[Paper]:
    papers = [Paper(1990 + number % 30) for number in range(count)]
    for number, paper in enumerate(papers):
        paper.cites.update(papers[number * step % count] for step in (3, 7, 11))
    return set(papers)
