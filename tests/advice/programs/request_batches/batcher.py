from collections.abc import Iterator
from queue import Empty, Queue

import torch


class Batcher:
    """Collects requests until a batch is full or nothing has come for a while."""

    def __init__(self, requests: Queue, size: int, patience: float) -> None:
        self.requests = requests
        self.size = size
        self.patience = patience

    def __iter__(self) -> Iterator[torch.Tensor]:
        while (first := self.requests.get()) is not None:
            batch = [first]
            while len(batch) < self.size:
                try:
                    item = self.requests.get(timeout=self.patience)
                except Empty:
                    break
                if item is None:
                    yield torch.stack(batch)
                    return
                batch.append(item)
            yield torch.stack(batch)
