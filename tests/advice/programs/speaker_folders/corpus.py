import os
import subprocess
import sys
import tempfile

import torch

RECORD = """
import sys
speaker, path = int(sys.argv[1]), sys.argv[2]
total = sum(i * i % 7 for i in range(20000 * (1 + speaker % 3)))
with open(path, "w") as file:
    file.write(" ".join(str((speaker * 31 + i * 17) % 23 / 23) for i in range(8)))
"""


def record(count: int = 9) -> str:
    folder = tempfile.mkdtemp(prefix="speakers-", dir="/dev/shm")
    running = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", RECORD, str(speaker), f"{folder}/speaker{speaker}.txt"]
        )
        for speaker in range(count)
    ]
    for process in running:
        process.wait()
    return folder


def load(folder: str) -> list[torch.Tensor]:
    clips = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file():
                with open(entry.path) as file:
                    clips.append(torch.tensor([float(word) for word in file.read().split()]))
    return clips
