import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distributed import start


def main() -> None:
    torch.set_num_threads(1)
    rank = start()
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    corpus = torch.linspace(-1, 1, 192).reshape(32, 6)
    for _ in range(4):
        batch = corpus[torch.randperm(32)[:8]]
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss.detach())
    if rank == 0:
        print(f"result {loss.item():.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
