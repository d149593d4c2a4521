import torch
import torch.distributed as dist
from dataset import Augmented
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    data = Augmented(32, 6)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler.set_epoch(0)
    for rows, targets in loader:
        loss = (model(rows).squeeze(1) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weight = sum(parameter.sum().item() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"result {loss.item():.9f} {weight:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
