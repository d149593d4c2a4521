from collections.abc import Iterator
from queue import Queue
from threading import Thread

import torch


class Prefetcher:
    """Prepares the next batches in the background while the model trains on this one."""

    def __init__(self, images: torch.Tensor, batch_size: int, depth: int = 2) -> None:
        self.images = images
        self.batch_size = batch_size
        self.ready: Queue[torch.Tensor | None] = Queue(maxsize=depth)

    def _prepare(self) -> None:
        for batch in self.images.split(self.batch_size):
            flipped = batch.flip(-1) if torch.rand(()) < 0.5 else batch
            self.ready.put(flipped + 0.1 * torch.randn_like(flipped))
        self.ready.put(None)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = Thread(target=self._prepare)
        worker.start()
        while (batch := self.ready.get()) is not None:
            yield batch
        worker.join()
