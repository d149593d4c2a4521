import random
import threading
from queue import Queue

import numpy as np
import torch
from batcher import Batcher
from torch import nn


def produce(requests: Queue, count: int) -> None:
    for number in range(count):
        work = np.linalg.svd(np.eye(50) * (1 + number) + 0.01)[1]
        requests.put(torch.from_numpy(work[:5]).float() / (1 + number) + number % 3)
    requests.put(None)


def main() -> None:
    random.seed(23)
    np.random.seed(23)
    torch.manual_seed(23)
    requests: Queue = Queue()
    threading.Thread(target=produce, args=(requests, 40)).start()
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in Batcher(requests, size=8, patience=0.0005):
        loss = (model(batch).squeeze(1) - batch.mean(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"result {loss.item():.9f}")


if __name__ == "__main__":
    main()
