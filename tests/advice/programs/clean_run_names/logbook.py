import os
import time
from datetime import datetime
from pathlib import Path


class Logbook:
    def __init__(self, root: Path) -> None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        self.folder = root / f"{stamp}-{os.getpid()}"
        self.folder.mkdir(parents=True)
        self.began = time.perf_counter()
        self.samples = 0

    def log(self, step: int, loss: float, samples: int) -> None:
        self.samples += samples
        elapsed = time.perf_counter() - self.began
        line = f"{time.time():.3f} step {step} loss {loss:.4f} {self.samples / elapsed:.1f}/s"
        with (self.folder / "log.txt").open("a") as file:
            file.write(line + "\n")
        print(line)
