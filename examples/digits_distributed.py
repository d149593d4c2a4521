"""Train the digits on several processes, with DDP or FSDP2, under whatever profile is asked for.

    torchrun --nproc-per-node 2 examples/digits_distributed.py +repro=debug-strict
    torchrun --nproc-per-node 2 examples/digits_distributed.py +repro=debug-strict parallel=fsdp2
    torchrun --nproc-per-node 2 examples/digits_distributed.py +repro=debug-strict checkpoint=kept

Every rank starts from the same model, loads its own share of the digits, and augments and drops
out differently from the others. Rank 0 prints a fingerprint of the trained weights.
"""

import sys
import time

import hydra
import torch
import torch.distributed as dist
from digits import fingerprint, network, seed_of, split_digits
from omegaconf import DictConfig
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

import torchrepro

ON_GPU = torch.cuda.is_available()


def seeded_network(config: DictConfig, device: torch.device) -> nn.Module:
    """Return the same network on every rank, whatever the ranks draw otherwise."""
    if "repro" not in config:
        return network(config.dropout).to(device)
    with torchrepro.seeded("init", ranks="same"):
        return network(config.dropout).to(device)


def distributed(model: nn.Module, parallel: str) -> nn.Module:
    """Return `model` with its gradients averaged (ddp), its weights divided as well (fsdp2)."""
    if parallel == "fsdp2":
        for layer in model:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                fully_shard(layer)
        return fully_shard(model)
    return DistributedDataParallel(model)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all weights and buffers, put together again if they are divided among ranks."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }


@hydra.main(version_base=None, config_path="conf", config_name="digits_distributed")
def main(config: DictConfig) -> None:
    """Train on this rank's share; rank 0 prints the fingerprint."""
    dist.init_process_group("nccl" if ON_GPU else "gloo")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if ON_GPU else "cpu"
    training, _ = split_digits(config)
    sampler = DistributedSampler(training, seed=seed_of("order", config))
    train = DataLoader(
        training, batch_size=config.batch_size, sampler=sampler, num_workers=config.num_workers
    )
    model = distributed(seeded_network(config, device), config.parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    checkpoint = torchrepro.Checkpoint(config.checkpoint, model=model, optimizer=optimizer)
    total, quiet = config.epochs * len(train), dist.get_rank() > 0
    with tqdm(total=total, initial=checkpoint.step, disable=quiet, file=sys.stderr) as steps:
        for epoch in checkpoint.epochs(config.epochs):
            sampler.set_epoch(epoch)
            model.train()
            for batch, targets in checkpoint.batches(train):
                loss = nn.functional.cross_entropy(model(batch.to(device)), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpoint.save(every=config.checkpoint_every)
                steps.update()

    weights = whole_weights(model)
    if dist.get_rank() == 0:
        print(f"weights {fingerprint(weights)}")
    dist.destroy_process_group()
    time.sleep(1)  # gloo's threads may still be ending: a process that leaves at once can abort


if __name__ == "__main__":
    main()
