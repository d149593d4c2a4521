import copy
import time
from pathlib import Path

import torch
from torch import nn


class Keeper:
    """Writes the model down whenever the last copy of it is old enough."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path = path
        self.seconds = seconds
        self.saved = time.time()
        self.copies = 0

    def maybe_save(self, model: nn.Module) -> None:
        if time.time() - self.saved < self.seconds:
            return
        torch.save(copy.deepcopy(model).state_dict(), self.path)
        self.saved = time.time()
        self.copies += 1
